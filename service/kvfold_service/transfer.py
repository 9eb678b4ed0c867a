"""Export: a request's entries and open rows, free of page size, ring size and ring position, for `arrivals`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvfold_client import wire
from kvfold_kernels import plan as p
from kvfold_service.caches import TORCH_DTYPES, CompressorCache
from kvfold_service.errors import ServiceError

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
class EntriesCall:
    """Entries [from_entry, to_entry) of one compressor."""

    compressor: str
    from_entry: int
    to_entry: int


def export(worker: Worker, request_id: str, wanted: ExportCall, tenant: str) -> dict[str, Any]:
    """What another worker needs to go on. Drafts become final: another holder may build on them.

    Raises unknown_request, unknown_compressor.
    """
    request = worker.known(request_id, tenant)
    caches = [c for c in worker.caches.compressors if c.committed(request.slot)]
    if wanted.compressors is not None:
        caches = [_cache(worker, name) for name in wanted.compressors]
    parts = {cache.name: _export_one(cache, request.slot, wanted) for cache in caches}
    for cache in caches:
        cache.drafts[request.slot] = 0
    worker.renew(request)
    return {"version": wire.PROTOCOL_VERSION, "compat": worker.compat, "compressors": parts}


def entries(worker: Worker, request_id: str, wanted: EntriesCall, tenant: str) -> dict[str, Any]:
    """Entries of one compressor as page-free rows, as far as they are there. Renews the lease.

    Raises unknown_request, unknown_compressor.
    """
    request = worker.known(request_id, tenant)
    cache = _cache(worker, wanted.compressor)
    first, end = entry_range(cache, request.slot, wanted)
    worker.renew(request)
    return {
        "version": wire.PROTOCOL_VERSION,
        "compressor": cache.name,
        "first_entry": first,
        "entries": _entries(cache, request.slot, first, end),
    }


def entry_range(cache: CompressorCache, slot: int, wanted: EntriesCall) -> tuple[int, int]:
    """[first, end) of what is wanted and held; empty where nothing is."""
    end = min(wanted.to_entry, cache.num_entries(slot))
    return min(max(wanted.from_entry, int(cache.first_entry[slot])), end), end


def _cache(worker: Worker, name: str) -> CompressorCache:
    cache = worker.caches.by_name.get(name)
    if cache is None:
        raise ServiceError("unknown_compressor", f"this worker serves no compressor {name}", compressor=name)
    return cache


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
        part["entries"] = _entries(cache, slot, start, num_entries)
        if start:
            part["first_entry"] = start
    return part


def _entries(cache: CompressorCache, slot: int, first: int, end: int) -> dict[str, Any]:
    """A tensor of entries [first, end); their pages count as read."""
    n = cache.page_entries
    if first < end:
        cache.group.pool.unread[cache.page_table[slot, first // n : -(-end // n)]] = False
    return _tensor_map("uint8", cache.page_free_rows(slot, first, end))


def _ring_index(cache: CompressorCache, slot: int, first: int, end: int) -> NDArray[np.int64]:
    """Ring rows of positions [first, end), which are live."""
    offset = int(cache.state[p.RING_START, slot] - cache.state[p.LIVE_START, slot])
    return np.arange(first + offset, end + offset) % cache.compressor.geometry.ring_rows


def _tensor_map(dtype: str, rows: torch.Tensor) -> dict[str, Any]:
    flat = rows.contiguous().view(torch.uint8) if rows.numel() else torch.empty(0, dtype=torch.uint8)
    return wire.tensor_map(dtype, list(rows.shape), flat.reshape(-1).numpy().data)
