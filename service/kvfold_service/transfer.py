"""Export and import: a request's entries and open rows, free of page size, ring size and ring position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvfold_client import wire
from kvfold_kernels import plan as p
from kvfold_service import execute, quotas
from kvfold_service.caches import TORCH_DTYPES, CompressorCache, Reservation
from kvfold_service.errors import ServiceError
from kvfold_service.runner import as_torch, non_finite

if TYPE_CHECKING:
    from kvfold_service.worker import Worker

_DTYPE_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class ExportCall:
    """compressors None: all that the request has tokens in; entries from `from_entry` on as far as held, or none."""

    compressors: tuple[str, ...] | None
    entries: bool
    from_entry: int


@dataclass(frozen=True, slots=True)
class ImportPart:
    """entries uint8 `[k, entry_bytes]`, the last k of the request's, or None: none are held here.

    open_rows `[committed − live_start, row_width]`, open_positions their positions.
    """

    committed: int
    entries: wire.Tensor | None
    open_rows: wire.Tensor
    open_positions: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ImportCall:
    request_id: str
    compat: str
    parts: Mapping[str, ImportPart]


def export(worker: Worker, request_id: str, wanted: ExportCall, tenant: str) -> dict[str, Any]:
    """What another worker needs to go on. Drafts become final: another holder may build on them.

    Raises unknown_request, unknown_compressor.
    """
    request = worker.known(request_id, tenant)
    caches = [c for c in worker.caches.compressors if c.committed(request.slot)]
    if wanted.compressors is not None:
        for name in wanted.compressors:
            if name not in worker.caches.by_name:
                raise ServiceError("unknown_compressor", f"this worker serves no compressor {name}", compressor=name)
        caches = [worker.caches.by_name[name] for name in wanted.compressors]
    parts = {cache.name: _export_one(cache, request.slot, wanted) for cache in caches}
    for cache in caches:
        cache.drafts[request.slot] = 0
    worker.renew(request)
    return {"version": wire.PROTOCOL_VERSION, "compat": worker.compat, "compressors": parts}


def _export_one(cache: CompressorCache, slot: int, wanted: ExportCall) -> dict[str, Any]:
    committed, num_entries = cache.committed(slot), cache.num_entries(slot)
    first = cache.compressor.geometry.live_start(committed)
    rows = cache.rings[slot, torch.from_numpy(_ring_index(cache, slot, first, committed))].cpu()
    part: dict[str, Any] = {
        "committed": committed,
        "open_rows": _tensor_map(_DTYPE_NAMES[rows.dtype], rows),
        "open_positions": list(range(first, committed)),
    }
    if wanted.entries:
        start = min(max(wanted.from_entry, int(cache.first_entry[slot])), num_entries)
        part["entries"] = _tensor_map("uint8", cache.page_free_rows(slot, start, num_entries))
        if start:
            part["first_entry"] = start
        first_page, end_page = start // cache.page_entries, int(cache.num_pages[slot])
        cache.group.pool.unread[cache.page_table[slot, first_page:end_page]] = False
    return part


def _ring_index(cache: CompressorCache, slot: int, first: int, end: int) -> NDArray[np.int64]:
    """Ring rows of positions [first, end), which are live."""
    offset = int(cache.state[p.RING_START, slot] - cache.state[p.LIVE_START, slot])
    return np.arange(first + offset, end + offset) % cache.compressor.geometry.ring_rows


def _tensor_map(dtype: str, rows: torch.Tensor) -> dict[str, Any]:
    flat = rows.contiguous().view(torch.uint8) if rows.numel() else torch.empty(0, dtype=torch.uint8)
    return wire.tensor_map(dtype, list(rows.shape), flat.reshape(-1).numpy().data)


def import_(worker: Worker, given: ImportCall, tenant: str) -> None:
    """Make the request known and put its rows and entries in place; all or nothing.

    Raises request_exists, pool_exhausted, non_finite; see `calls.parse_import` for what is checked before.
    """
    worker.reap()
    if (tenant, given.request_id) in worker.requests:
        raise ServiceError("request_exists", f"there is a request {given.request_id}; release it or take another id")
    quotas.expect_requests(worker, tenant, 1)
    if not worker.free_slots:
        raise execute.exhausted("requests", 1, 0)
    caches = {worker.caches.by_name[name]: part for name, part in given.parts.items()}
    _check_room(worker, caches, tenant)
    request = worker.take_slot(tenant)
    held = Reservation()
    try:
        for cache, part in caches.items():
            rows = as_torch(part.open_rows).to(worker.backend.device)
            if found := worker.backend.find_non_finite(rows, len(rows)):
                raise non_finite(cache, *found)
            _import_one(cache, request.slot, part, rows, held)
    except BaseException:
        held.give_back()
        worker.caches.release_slot(request.slot)
        worker.give_slot(request.slot, tenant)
        raise
    for name in given.parts:
        request.carried_with[name] = tuple(given.parts)
    worker.add((tenant, given.request_id), request)


def _first_entry(cache: CompressorCache, part: ImportPart) -> int:
    """Entries before it are not held here."""
    return cache.compressor.geometry.num_entries(part.committed) - (part.entries.shape[0] if part.entries else 0)


def _pages_needed(cache: CompressorCache, part: ImportPart) -> tuple[int, int]:
    """Pages [first, end) of the request that hold its imported entries."""
    n, total = cache.page_entries, cache.compressor.geometry.num_entries(part.committed)
    return _first_entry(cache, part) // n, -(-total // n)


def _check_room(worker: Worker, caches: dict[CompressorCache, ImportPart], tenant: str) -> None:
    needed = dict.fromkeys(worker.caches.groups, 0)
    for cache, part in caches.items():
        first, end = _pages_needed(cache, part)
        needed[cache.group] += end - first
    quotas.expect_pages(worker, tenant, sum(needed.values()))
    for group, count in needed.items():
        if count > group.pool.num_free:
            raise execute.exhausted(group.label, count, group.pool.num_free)


def _import_one(cache: CompressorCache, slot: int, part: ImportPart, rows: torch.Tensor, held: Reservation) -> None:
    first_page, end_page = _pages_needed(cache, part)
    cache.num_pages[slot] = first_page
    cache.first_page[slot] = first_page
    cache.first_entry[slot] = _first_entry(cache, part)
    held.take(cache, slot, end_page - first_page)
    geometry = cache.compressor.geometry
    cache.state[:, slot] = (part.committed, geometry.live_start(part.committed), 0)
    cache.rings[slot, : len(rows)] = rows.to(cache.rings.dtype)
    if part.entries is not None and part.entries.shape[0]:
        entries = np.frombuffer(part.entries.data, np.uint8).reshape(part.entries.shape)
        cache.put_page_free_rows(slot, int(cache.first_entry[slot]), entries)
