"""The backends under test, and what the kernel tests share: streams of rows, ways to feed them, the serial run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch
from hypothesis import settings

from kvfold_kernels import backends
from kvfold_kernels import plan as p
from kvfold_kernels.backends import Backend
from kvfold_kernels.compressor import Compressor
from kvfold_kernels.geometry import KINDS, Geometry, PageLayout, entry_format
from kvfold_kernels.pages import read_entries, write_entries
from kvfold_kernels.rope import Rope
from tests.cases import Holder, make_compressor, make_rows

BACKENDS = ("reference", "cpu")
"""Every kernel test runs on each of these; one that cannot be loaded fails."""

LONG_STREAM = 8192
NAN = float("nan")

torch.set_num_threads(1)  # small tensors; threads that spin for each other cost more than they give
settings.register_profile("kvfold", deadline=None, derandomize=True, database=None)
settings.load_profile("kvfold")


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return backends.load(request.param)


@functools.cache
def stream(kind: str, seed: int = 1, num_tokens: int = 640) -> torch.Tensor:
    """bf16 rows of one request `[num_tokens, row_width]`."""
    usual = KINDS[kind]
    return make_rows(Geometry(kind, usual.ratio, usual.head_dim), num_tokens, seed=seed)


@functools.cache
def serial(backend: Backend, kind: str, cache_format: str, seed: int = 1, num_tokens: int = 640) -> torch.Tensor:
    """Entries of `stream(kind, seed, num_tokens)` alone in one step: what every other way to feed it must give."""
    holder = hold(backend, kind, cache_format, num_rings=1)
    feed(holder, {0: stream(kind, seed, num_tokens)}, [[(0, num_tokens)]])
    return holder.entries()


def hold(backend: Backend, kind: str, cache_format: str, *, num_rings: int = 4, ring="fp32", **options) -> Holder:
    """A holder with entries that are few to a page, so that requests cross pages often."""
    options.setdefault("page_entries", {"hca": 2, "csa": 5, "indexer": 5}[kind])
    compressor = compressor_of(kind, cache_format, **options)
    dtype = torch.bfloat16 if ring == "bf16" else torch.float32
    num_pages = num_rings * (LONG_STREAM // KINDS[kind].ratio // options["page_entries"] + 1) if num_rings < 4 else 512
    return Holder(compressor, backend, num_rings, num_pages, dtype)


def compressor_of(kind: str, cache_format: str, *, head_dim: int | None = None, **options) -> Compressor:
    """As `make_compressor`, of any head_dim."""
    usual = make_compressor(kind, cache_format, **options)
    if head_dim is None:
        return usual
    geometry = dataclasses.replace(usual.geometry, head_dim=head_dim)
    return dataclasses.replace(
        usual,
        geometry=geometry,
        layout=PageLayout.of(entry_format(cache_format, geometry), usual.layout.entries),
        ape=usual.ape[:, : geometry.half_width],
        norm_weight=usual.norm_weight[:head_dim],
    )


Step = list[tuple[int, int]]
"""(ring slot, number of tokens) of each request."""


def feed(
    holder: Holder,
    streams: dict[int, torch.Tensor],
    steps: Iterable[Step],
    *,
    pad: int = 0,
    before: Callable[[Holder], None] = lambda holder: None,
) -> None:
    """Give each request the next tokens of its stream, step by step; `pad` rows of NaN follow the last token."""
    for step in steps:
        before(holder)
        at = {slot: int(holder.state[p.COMMITTED, slot]) for slot, _ in step}
        rows = [streams[slot][at[slot] : at[slot] + length] for slot, length in step]
        width = holder.compressor.geometry.row_width
        holder.step(step, torch.cat([*rows, torch.full((pad, width), NAN, dtype=rows[0].dtype)]))


def alone(lengths: Iterable[int], slot: int = 0) -> list[Step]:
    """Steps of one request."""
    return [[(slot, length)] for length in lengths]


def one_by_one(num_tokens: int, slot: int = 0) -> list[Step]:
    return alone([1] * num_tokens, slot)


def adopt(holder: Holder, slot: int, num_tokens: int, live_rows: torch.Tensor, ring_start: int = 0) -> None:
    """Put a request into a ring slot as an import does: the rows of its last positions, at any ring index.

    Entries before `num_tokens` keep no page: only later ones may be read.
    """
    geometry, n = holder.compressor.geometry, holder.compressor.layout.entries
    index = (ring_start + np.arange(len(live_rows))) % geometry.ring_rows
    holder.rings[slot, torch.from_numpy(index)] = live_rows.to(holder.rings.dtype)
    holder.state[:, slot] = num_tokens, num_tokens - len(live_rows), ring_start
    full_pages = geometry.num_entries(num_tokens) // n
    missing = max(0, full_pages + holder.num_pages - holder.page_table.shape[1])
    holder.page_table = np.pad(holder.page_table, ((0, 0), (0, missing)), constant_values=-1)
    holder.page_table[slot] = -1
    holder.page_table[slot, :full_pages] = 0


def resume(holder: Holder, slot: int, rows: torch.Tensor, num_tokens: int, ring_start: int = 0) -> None:
    """A request that has seen rows[:num_tokens], without running them."""
    live_start = holder.compressor.geometry.live_start(num_tokens)
    adopt(holder, slot, num_tokens, rows[live_start:num_tokens], ring_start)


def live_rows(holder: Holder, slot: int) -> torch.Tensor:
    """Rows of a request that later windows can still need, oldest first: what an export takes."""
    return holder.rings[slot, torch.from_numpy(_live_index(holder, slot))]


def _live_index(holder: Holder, slot: int) -> np.ndarray:
    committed, live, ring = holder.state[:, slot]
    return (ring + np.arange(committed - live)) % holder.compressor.geometry.ring_rows


def poison_dead(holder: Holder) -> None:
    """NaN into every ring row that no request needs and every page byte that is no committed entry's."""
    for slot in range(holder.num_rings):
        kept = live_rows(holder, slot)
        holder.rings[slot] = NAN
        holder.rings[slot, torch.from_numpy(_live_index(holder, slot))] = kept
    layout = holder.compressor.layout
    slots = torch.cat([holder.slots_of(slot) for slot in range(holder.num_rings)])
    values, scales = read_entries(holder.pages, slots, layout).split(
        [layout.format.value_bytes, layout.format.scale_bytes], dim=1
    )
    holder.pages.fill_(0xFF)
    write_entries(holder.pages, slots, layout, values, scales)


def inject(backend: Backend, compressor: Compressor, row: torch.Tensor) -> torch.Tensor:
    """The entry a backend makes of a given normed row.

    kv of 1 everywhere pools to exactly 1 and has norm 1, the first window is rotated by 0: what remains is the weight.
    """
    geometry = compressor.geometry
    holder = Holder(dataclasses.replace(compressor, norm_weight=row, rms_eps=0.0), backend, num_rings=1, num_pages=1)
    rows = torch.zeros(geometry.ratio, geometry.row_width)
    rows[:, : geometry.half_width] = 1
    holder.step([(0, geometry.ratio)], rows)
    return holder.entries()


def naive(rows: torch.Tensor, compressor: Compressor) -> np.ndarray:
    """fp64 entries `[num_entries, head_dim]` of a request's rows before quantising, straight from the formula."""
    geometry = compressor.geometry
    dim, ratio, halves = geometry.head_dim, geometry.ratio, geometry.halves
    ape, weight, cos_sin = (t.double().numpy() for t in (compressor.ape, compressor.norm_weight, compressor.cos_sin))
    kv, score = (t.double().numpy().reshape(len(rows), halves, dim) for t in rows.chunk(2, dim=1))
    entries = np.empty((len(rows) // ratio, dim))
    for e, x in enumerate(entries):
        own = e * ratio
        window = [(q, 0) for q in range(max(0, own - ratio), own)] if halves == 2 else []
        window += [(q, halves - 1) for q in range(own, own + ratio)]
        s = np.stack([score[q, half] + ape[q % ratio, half * dim : (half + 1) * dim] for q, half in window])
        top = s.max(0)
        weights = np.exp(s - np.where(np.isneginf(top), 0, top))
        c = (weights * np.stack([kv[q, half] for q, half in window])).sum(0)
        c = np.divide(c, weights.sum(0), out=np.zeros(dim), where=weights.sum(0) > 0)
        x[:] = c / np.sqrt(np.mean(c**2) + compressor.rms_eps) * weight
        turn = np.array([complex(*pair) for pair in zip(*np.split(cos_sin[own], 2), strict=True)])
        x[geometry.nope_dim :] = (x[geometry.nope_dim :].view(np.complex128) * turn).view(np.float64)
    return entries


def last_entries(holder: Holder, count: int, slot: int = 0) -> torch.Tensor:
    """Page-free rows of a request's last entries."""
    return read_entries(holder.pages, holder.slots_of(slot)[-count:], holder.compressor.layout)


def as_fp32(entries: torch.Tensor) -> np.ndarray:
    """Rows of the plain fp32 format."""
    return entries.contiguous().view(torch.float32).numpy()


def assert_near(actual: np.ndarray, expected: np.ndarray, relative: float) -> None:
    """Every entry within `relative` of its own norm, and every element within it of the entry's largest."""
    assert actual.shape == expected.shape
    error, expected = np.abs(actual.astype(np.float64) - expected), np.abs(expected)
    norms = np.linalg.norm(error, axis=1), np.linalg.norm(expected, axis=1)
    assert np.all(norms[0] <= relative * norms[1]), f"norm error {np.max(norms[0] / norms[1]):.2e}"
    assert np.all(error.max(1) <= relative * expected.max(1)), f"error {np.max(error.max(1) / expected.max(1)):.2e}"


def sparse_rope(first: int, stop: int) -> torch.Tensor:
    """A rotation table of `stop` positions of which only those from `first` on are filled, and take memory."""
    rope = Rope()
    table = torch.empty(stop, rope.dim)
    angle = (np.arange(first, stop, dtype=np.float32)[:, None] * rope.inv_freq()).astype(np.float64)
    table[first:] = torch.from_numpy(np.concatenate((np.cos(angle), np.sin(angle)), 1))
    return table
