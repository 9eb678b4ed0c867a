"""The memory of a worker: rings, pages and page tables of every compressor, allocated once.

    group        compressors with the same page layout share one pool of pages and one tensor of page bytes
    ring slot    one number for a request in every compressor: its ring, its column of the ring state and page table

The engine thread alone changes anything here. Entries [0, committed // ratio) of a request are valid; whatever else the
pages hold is not, and is never shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from kvfold_kernels import pages
from kvfold_kernels import plan as p
from kvfold_kernels.compressor import Compressor
from kvfold_kernels.geometry import PageLayout
from kvfold_service.blocks import FREE, PagePool
from kvfold_service.host_pages import read_rows, write_rows
from kvfold_service.manifest import CompressorPart, Manifest
from kvfold_service.tables import Tables
from kvfold_service.weights import Weights

_ENTRIES_AT_A_TIME: Final = 8192
"""Between a device's pages and the host: each time costs a wait, and takes memory for so many entries on both sides."""
TORCH_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True, eq=False)
class PageGroup:
    """One pool: `pages` uint8 `[pool.num_pages, layout.page_bytes]`, zeroed, so that no byte of before can show."""

    index: int
    label: str
    layout: PageLayout
    pool: PagePool
    pages: torch.Tensor


class Entries(NamedTuple):
    """Entries [start, stop) of the request in a slot."""

    slot: int
    start: int
    stop: int


def _together(parts: Iterable[Entries]) -> Iterator[list[Entries]]:
    """Some at a time, but always one."""
    some: list[Entries] = []
    num_entries = 0
    for part in parts:
        num_entries += part.stop - part.start
        if some and num_entries > _ENTRIES_AT_A_TIME:
            yield some
            some, num_entries = [], part.stop - part.start
        some.append(part)
    if some:
        yield some


def _digest(rows: torch.Tensor) -> str:
    return xxhash.xxh3_64_hexdigest(rows.numpy().data)


@dataclass(frozen=True, eq=False)
class CompressorCache:
    """What a worker keeps for one compressor. What is int64 is a row of `Tables`.

    rings       bf16 or fp32 `[num_rings, ring_rows, row_width]`
    state       int64 `[3, num_rings]`, see `plan`
    drafts      int64 `[num_rings]`, how many of a request's last tokens may still be withdrawn
    page_table  int32 `[num_rings, max_pages]`, page of a request's page_idx-th page
    num_pages   int64 `[num_rings]`; a request holds its pages [first_page, num_pages)
    first_page, first_entry   int64 `[num_rings]`, 0 but for a request that was imported without its first entries
    """

    index: int
    part: CompressorPart
    compressor: Compressor
    group: PageGroup
    rings: torch.Tensor
    state: NDArray[np.int64]
    drafts: NDArray[np.int64]
    page_table: NDArray[np.int32]
    num_pages: NDArray[np.int64]
    first_page: NDArray[np.int64]
    first_entry: NDArray[np.int64]

    @property
    def name(self) -> str:
        return self.part.name

    @property
    def page_entries(self) -> int:
        return self.group.layout.entries

    def committed(self, slot: int) -> int:
        return int(self.state[p.COMMITTED, slot])

    def num_entries(self, slot: int) -> int:
        return self.compressor.geometry.num_entries(self.committed(slot))

    def pages_for(self, num_entries: NDArray[np.int64]) -> NDArray[np.int64]:
        """Pages that hold this many entries."""
        return -(-num_entries // self.page_entries)

    def entry_slots(self, slot: int, start: int, stop: int) -> NDArray[np.int64]:
        """Output slots of a request's entries [start, stop)."""
        entry = np.arange(start, stop)
        page = self.page_table[slot, entry // self.page_entries].astype(np.int64)
        return page * self.page_entries + entry % self.page_entries

    def check_integrity(self, live_slots: set[int]) -> None:
        """A ring holds what it must and no more than it may, pages are as many as the entries need, and ours."""
        geometry, pool = self.compressor.geometry, self.group.pool
        committed, live_start, ring_start = self.state
        live = committed - live_start
        needed = np.maximum(0, committed // geometry.ratio - geometry.halves + 1) * geometry.ratio
        assert bool(((live >= 0) & (live <= geometry.max_live_rows)).all()), "a ring holds too many rows"
        assert bool((live_start <= needed).all()), "a ring lacks rows of an open window"
        assert bool(((ring_start >= 0) & (ring_start < geometry.ring_rows)).all())
        assert bool(((self.drafts >= 0) & (self.drafts <= geometry.draft_slack)).all())
        assert bool((self.num_pages == self.pages_for(committed // geometry.ratio)).all()), "pages not as entries need"
        assert bool((self.first_page == self.first_entry // self.page_entries).all())
        for slot in np.flatnonzero((committed > 0) | (self.num_pages > 0)).tolist():
            assert slot in live_slots, "a free slot holds something"
            page_idx = np.arange(self.first_page[slot], self.num_pages[slot])
            pages = self.page_table[slot, page_idx]
            assert bool((pool.owner_slot[pages] == slot).all())
            assert bool((pool.owner_compressor[pages] == self.index).all())
            assert bool((pool.owner_page_idx[pages] == page_idx).all())

    def drop_pages(self, slot: int, keep: int) -> None:
        """Free a request's pages from its `keep`-th on."""
        keep, held = max(keep, int(self.first_page[slot])), int(self.num_pages[slot])
        if held > keep:
            self.group.pool.release(self.page_table[slot, keep:held])
            self.num_pages[slot] = keep

    @property
    def in_host_memory(self) -> bool:
        return self.group.pages.device.type == "cpu"

    def page_free_rows(self, slot: int, start: int, stop: int) -> torch.Tensor:
        """uint8 `[stop − start, entry_bytes]` of a request's entries, on the host."""
        rows = torch.empty((stop - start, self.group.layout.format.entry_bytes), dtype=torch.uint8)
        if self.in_host_memory:
            table, layout = self.page_table[slot], self.group.layout
            read_rows(self.group.pages.numpy(), table, layout, start, stop, rows.numpy())
            return rows
        for first, end, slots in self._some_at_a_time(slot, start, stop):
            rows[first - start : end - start] = pages.read_entries(self.group.pages, slots, self.group.layout)
        return rows

    def put_page_free_rows(self, slot: int, start: int, rows: NDArray[np.uint8]) -> None:
        """The inverse: `[n, entry_bytes]` become a request's entries [start, start + n); its pages are in place."""
        if self.in_host_memory:
            write_rows(self.group.pages.numpy(), self.page_table[slot], self.group.layout, start, rows)
            return
        for first, end, slots in self._some_at_a_time(slot, start, start + len(rows)):
            part = torch.from_numpy(rows[first - start : end - start].copy()).to(self.group.pages.device)
            pages.write_rows(self.group.pages, slots, self.group.layout, part)

    def digests(self, parts: Iterable[Entries]) -> list[str]:
        """XXH3-64 of each part as page-free rows, in 16 hex digits."""
        if self.in_host_memory:
            return [_digest(self.page_free_rows(*part)) for part in parts]
        found: list[str] = []
        for some in _together(parts):
            slots = torch.from_numpy(np.concatenate([self.entry_slots(*part) for part in some]))
            rows = pages.read_entries(self.group.pages, slots.to(self.group.pages.device), self.group.layout).cpu()
            found += [_digest(piece) for piece in rows.split([part.stop - part.start for part in some])]
        return found

    def _some_at_a_time(self, slot: int, start: int, stop: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Entries [first, end) and their output slots, so that what a copy needs in between stays small."""
        for first in range(start, stop, _ENTRIES_AT_A_TIME):
            end = min(first + _ENTRIES_AT_A_TIME, stop)
            yield first, end, torch.from_numpy(self.entry_slots(slot, first, end)).to(self.group.pages.device)


class Reservation:
    """Pages that a call has taken and gives back if it fails."""

    def __init__(self) -> None:
        self._taken: list[tuple[CompressorCache, int, int]] = []

    def take(self, cache: CompressorCache, slot: int, count: int) -> None:
        """`count` more pages for a request; the caller has checked that they are free."""
        before = int(cache.num_pages[slot])
        pages = cache.group.pool.take(slot, cache.index, before, count)
        cache.page_table[slot, before : before + count] = pages
        cache.num_pages[slot] = before + count
        self._taken.append((cache, slot, before))

    def give_back(self) -> None:
        for cache, slot, before in reversed(self._taken):
            cache.drop_pages(slot, before)


@dataclass(frozen=True)
class Caches:
    num_rings: int
    groups: tuple[PageGroup, ...]
    compressors: tuple[CompressorCache, ...]
    by_name: dict[str, CompressorCache] = field(repr=False)
    tables: Tables = field(repr=False)

    @classmethod
    def allocate(
        cls, manifest: Manifest, weights: Weights, num_rings: int, pages_per_compressor: int, device: str
    ) -> Caches:
        """Rings for num_rings requests; each group's pool has pages_per_compressor pages for each of its members."""
        rope = torch.from_numpy(manifest.rope.rope().table(manifest.max_position)).to(device)
        members: dict[PageLayout, list[CompressorPart]] = {}
        for part in manifest.compressors:
            members.setdefault(part.layout(), []).append(part)
        groups = {
            layout: PageGroup(
                index,
                _label(layout, members),
                layout,
                PagePool(len(parts) * pages_per_compressor),
                torch.zeros((len(parts) * pages_per_compressor, layout.page_bytes), dtype=torch.uint8, device=device),
            )
            for index, (layout, parts) in enumerate(members.items())
        }
        of_part = [groups[part.layout()] for part in manifest.compressors]
        tables = Tables.empty(
            num_rings,
            [part.geometry(manifest.draft_slack).ratio for part in manifest.compressors],
            [group.layout.entries for group in of_part],
            [group.index for group in of_part],
        )
        caches = tuple(
            _allocate_one(index, part, manifest, weights, group, rope, tables)
            for index, (part, group) in enumerate(zip(manifest.compressors, of_part, strict=True))
        )
        return cls(num_rings, tuple(groups.values()), caches, {cache.name: cache for cache in caches}, tables)

    def bytes_by_pool(self) -> dict[str, int]:
        """Bytes of every page pool, by group label, and of all rings."""
        pools = {group.label: group.pages.numel() for group in self.groups}
        return {**pools, "rings": sum(c.rings.numel() * c.rings.element_size() for c in self.compressors)}

    def release_slot(self, slot: int) -> None:
        """Free a request's pages and forget its rows."""
        for cache in self.compressors:
            cache.drop_pages(slot, 0)
            cache.state[:, slot] = 0
            for column in (cache.drafts, cache.num_pages, cache.first_page, cache.first_entry):
                column[slot] = 0

    def check_integrity(self, live_slots: set[int]) -> None:
        """Page tables and pools agree, rings hold no more than they may; raises AssertionError."""
        for group in self.groups:
            group.pool.check_integrity()
            held = sum(int((c.num_pages - c.first_page).sum()) for c in self.compressors if c.group is group)
            assert held == group.pool.num_used, "a used page is in no page table"
        for cache in self.compressors:
            cache.check_integrity(live_slots)


def _label(layout: PageLayout, others: Iterable[PageLayout]) -> str:
    """format.dim x entries, and the page's bytes where that alone would name two."""
    label = f"{layout.format.name}.{layout.format.head_dim}x{layout.entries}"
    same = [other for other in others if (other.format, other.entries) == (layout.format, layout.entries)]
    return label if len(same) == 1 else f"{label}.{layout.page_bytes}"


def _allocate_one(
    index: int,
    part: CompressorPart,
    manifest: Manifest,
    weights: Weights,
    group: PageGroup,
    rope: torch.Tensor,
    tables: Tables,
) -> CompressorCache:
    geometry = part.geometry(manifest.draft_slack)
    ape, norm_weight = (tensor.to(rope.device) for tensor in weights[part.name])
    compressor = Compressor(
        geometry,
        group.layout,
        ape,
        norm_weight,
        rope,
        rms_eps=manifest.rms_eps,
        fp8_scale=part.fp8_scale,
        scale_floor=part.scale_floor,
        indexer_profile=part.indexer_profile,
    )
    ring_dtype = torch.bfloat16 if part.input_dtype == "bf16" else torch.float32
    num_rings = tables.states.shape[-1]
    max_pages = -(-geometry.num_entries(manifest.max_position) // group.layout.entries) or 1
    return CompressorCache(
        index=index,
        part=part,
        compressor=compressor,
        group=group,
        rings=torch.empty((num_rings, geometry.ring_rows, geometry.row_width), dtype=ring_dtype, device=rope.device),
        state=tables.states[index],
        drafts=tables.drafts[index],
        page_table=np.full((num_rings, max_pages), FREE, np.int32),
        num_pages=tables.num_pages[index],
        first_page=tables.first_page[index],
        first_entry=tables.first_entry[index],
    )
