"""Import: how a request comes in. Slot, pages and open rows first, then entries by and by, then it is known.

Until `finish` nobody can name the request, so that nothing of it is seen; `abandon` takes all of it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvfold_client import wire
from kvfold_service import quotas
from kvfold_service.caches import CompressorCache, Reservation
from kvfold_service.errors import ServiceError
from kvfold_service.reserve import exhausted
from kvfold_service.runner import as_torch, non_finite

if TYPE_CHECKING:
    from kvfold_service.worker import Request, RequestKey, Worker


@dataclass(frozen=True, slots=True)
class ImportPart:
    """entries uint8 `[num_entries − first_entry, entry_bytes]`, or None: none yet; those before are not held here.

    open_rows `[committed − live_start, row_width]`, open_positions their positions.
    """

    committed: int
    first_entry: int
    entries: wire.Tensor | None
    open_rows: wire.Tensor
    open_positions: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ImportCall:
    request_id: str
    compat: str
    parts: Mapping[str, ImportPart]


@dataclass(frozen=True, eq=False)
class Incoming:
    """A request that is not known yet, with its slot and pages."""

    key: RequestKey
    request: Request
    parts: dict[CompressorCache, ImportPart]
    held: Reservation


def import_(worker: Worker, given: ImportCall, tenant: str) -> None:
    """Make the request known and put its rows and entries in place; all or nothing.

    Raises request_exists, pool_exhausted, non_finite; see `calls.parse_import` for what is checked before.
    """
    incoming = begin(worker, given, tenant)
    try:
        for cache, part in incoming.parts.items():
            if part.entries is not None and part.entries.shape[0]:
                entries = np.frombuffer(part.entries.data, np.uint8).reshape(part.entries.shape)
                put(incoming, cache, part.first_entry, entries)
        finish(worker, incoming)
    except BaseException:
        abandon(worker, incoming)
        raise


def begin(worker: Worker, given: ImportCall, tenant: str) -> Incoming:
    """Slot, pages and open rows. Raises request_exists, quota_exceeded, pool_exhausted, non_finite."""
    key = tenant, given.request_id
    worker.reap()
    _expect_new(worker, key)
    if key in worker.incoming:
        raise _exists(given.request_id)
    quotas.expect_requests(worker, tenant, 1)
    if not worker.free_slots:
        raise exhausted("requests", 1, 0)
    parts = {worker.caches.by_name[name]: part for name, part in given.parts.items()}
    _check_room(worker, parts, tenant)
    incoming = worker.incoming[key] = Incoming(key, worker.take_slot(tenant), parts, Reservation())
    try:
        for cache, part in parts.items():
            rows = as_torch(part.open_rows).to(worker.backend.device)
            if found := worker.backend.find_non_finite(rows, len(rows)):
                raise non_finite(cache, *found)
            _reserve(cache, incoming.request.slot, part, incoming.held)
            cache.rings[incoming.request.slot, : len(rows)] = rows.to(cache.rings.dtype)
    except BaseException:
        abandon(worker, incoming)
        raise
    return incoming


def put(incoming: Incoming, cache: CompressorCache, start: int, entries: NDArray[np.uint8]) -> None:
    """Entries [start, start + n) as page-free rows `[n, entry_bytes]`."""
    cache.put_page_free_rows(incoming.request.slot, start, entries)


def finish(worker: Worker, incoming: Incoming) -> None:
    """From now on the request is known, and its lease runs. Raises request_exists: a step was faster."""
    worker.reap()
    _expect_new(worker, incoming.key)
    names = tuple(cache.name for cache in incoming.parts)
    for name in names:
        incoming.request.carried_with[name] = names
    del worker.incoming[incoming.key]
    worker.add(incoming.key, incoming.request)


def abandon(worker: Worker, incoming: Incoming) -> None:
    """Give all of it back; harmless for one that is known, set aside or abandoned already."""
    if worker.incoming.get(incoming.key) is incoming:
        del worker.incoming[incoming.key]
        _give_back(worker, incoming)


def set_aside(worker: Worker, incoming: Incoming) -> None:
    """Abandon it, but for its slot and pages: something may still write to them, until `give_back`."""
    del worker.incoming[incoming.key]
    worker.aside.append(incoming)


def give_back(worker: Worker, incoming: Incoming) -> None:
    """Nothing writes there any more."""
    worker.aside.remove(incoming)
    _give_back(worker, incoming)


def _give_back(worker: Worker, incoming: Incoming) -> None:
    incoming.held.give_back()
    worker.caches.release_slot(incoming.request.slot)
    worker.give_slot(incoming.request.slot, incoming.key[0])


def _expect_new(worker: Worker, key: RequestKey) -> None:
    if key in worker.requests:
        raise _exists(key[1])


def _exists(request_id: str) -> ServiceError:
    return ServiceError("request_exists", f"there is a request {request_id}; release it or take another id")


def _pages_needed(cache: CompressorCache, part: ImportPart) -> tuple[int, int]:
    """Pages [first, end) of the request that hold its imported entries."""
    n, total = cache.page_entries, cache.compressor.geometry.num_entries(part.committed)
    return part.first_entry // n, -(-total // n)


def _check_room(worker: Worker, parts: dict[CompressorCache, ImportPart], tenant: str) -> None:
    needed = dict.fromkeys(worker.caches.groups, 0)
    for cache, part in parts.items():
        first, end = _pages_needed(cache, part)
        needed[cache.group] += end - first
    quotas.expect_pages(worker, tenant, sum(needed.values()))
    for group, count in needed.items():
        if count > group.pool.num_free:
            raise exhausted(group.label, count, group.pool.num_free)


def _reserve(cache: CompressorCache, slot: int, part: ImportPart, held: Reservation) -> None:
    """The slot's pages, and its state as of the part's tokens."""
    first_page, end_page = _pages_needed(cache, part)
    cache.num_pages[slot] = first_page
    cache.first_page[slot] = first_page
    cache.first_entry[slot] = part.first_entry
    held.take(cache, slot, end_page - first_page)
    cache.state[:, slot] = (part.committed, cache.compressor.geometry.live_start(part.committed), 0)
