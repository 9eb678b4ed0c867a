"""Handles → bytes. What is served is what the handle promised, or nothing: all of a call's pages or none."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfold_client import wire
from kvfold_service.blocks import ForgedHandleError, StaleEpochError
from kvfold_service.caches import CompressorCache, Entries
from kvfold_service.errors import ServiceError

if TYPE_CHECKING:
    from kvfold_service.worker import Worker


class _Page(NamedTuple):
    """A page that a handle names, and which of its entries are valid: [first, end), counted in the page."""

    cache: CompressorCache
    page: int
    slot: int
    page_idx: int
    first: int
    end: int

    @property
    def entries(self) -> Entries:
        base = self.page_idx * self.cache.page_entries
        return Entries(self.slot, base + self.first, base + self.end)


def read_pages(worker: Worker, handles: list[str], tenant: str) -> dict[str, Any]:
    """Bytes of pages, zero beyond their valid entries. Raises unknown_handle, stale_handle."""
    found = _find(worker, handles, tenant)
    for page in found:
        page.cache.group.pool.unread[page.page] = False
    return {
        "version": wire.PROTOCOL_VERSION,
        "pages": [
            {**_head(handle, page), **wire.tensor_map("uint8", [page.cache.group.layout.page_bytes], _bytes(page))}
            for handle, page in zip(handles, found, strict=True)
        ],
    }


def num_unread(worker: Worker) -> int:
    """Pages that are held for readers and were never fetched, by a read or an export."""
    return sum(int(group.pool.unread.sum()) for group in worker.caches.groups)


def verify(worker: Worker, handles: list[str], tenant: str) -> dict[str, Any]:
    """xxh3-64 (16 hex digits) of each page's valid entries as page-free rows. Raises unknown_handle, stale_handle."""
    found = _find(worker, handles, tenant)
    digests: list[str] = []
    for cache, pages in itertools.groupby(found, lambda page: page.cache):
        digests += cache.digests(page.entries for page in pages)
    told = zip(handles, found, digests, strict=True)
    return {
        "version": wire.PROTOCOL_VERSION,
        "pages": [{**_head(handle, page), "xxh3_64": digest} for handle, page, digest in told],
    }


def locate(worker: Worker, handles: list[str], tenant: str) -> dict[str, Any]:
    """Addresses of pages, and how they are laid out, for a peer that reads them from our memory.

    Raises unknown_handle, stale_handle.
    """
    found = _find(worker, handles, tenant)
    pages, layouts = [], {}
    for handle, page in zip(handles, found, strict=True):
        group = page.cache.group
        group.pool.unread[page.page] = False
        address = group.pages.data_ptr() + page.page * group.layout.page_bytes
        pages.append({**_head(handle, page), "address": address})
        layouts[page.cache.name] = {
            "page_entries": group.layout.entries,
            "page_bytes": group.layout.page_bytes,
            "memory": "VRAM" if group.pages.is_cuda else "DRAM",
            "device": max(0, group.pages.get_device()),
        }
    return {"version": wire.PROTOCOL_VERSION, "pages": pages, "layouts": layouts}


def _head(handle: str, page: _Page) -> dict[str, Any]:
    head = {"handle": handle, "compressor": page.cache.name, "num_entries": page.end}
    return head | ({"first_entry": page.first} if page.first else {})


def _find(worker: Worker, handles: list[str], tenant: str) -> list[_Page]:
    worker.reap()
    found = [_page(worker, handle, tenant) for handle in handles]
    slots = {page.slot for page in found}
    for request in worker.requests.values():
        if request.slot in slots:
            worker.renew(request)
    return found


def _page(worker: Worker, handle: str, tenant: str) -> _Page:
    try:
        name = worker.handles.open(tenant, handle)
    except ForgedHandleError:
        raise ServiceError("unknown_handle", "there is no page of this handle") from None
    except StaleEpochError:
        raise _stale() from None
    pool = worker.caches.groups[name.group].pool
    if pool.generation[name.page] != name.generation:
        raise _stale()
    cache = worker.caches.compressors[pool.owner_compressor[name.page]]
    slot, page_idx = int(pool.owner_slot[name.page]), int(pool.owner_page_idx[name.page])
    base = page_idx * cache.page_entries
    first = max(int(cache.first_entry[slot]) - base, 0)
    return _Page(cache, name.page, slot, page_idx, first, min(cache.num_entries(slot) - base, cache.page_entries))


def _stale() -> ServiceError:
    return ServiceError("stale_handle", "the page of this handle was freed or has changed; ask for the request again")


def _bytes(page: _Page) -> memoryview:
    """The page's bytes on the host, zero wherever no valid entry lies."""
    layout = page.cache.group.layout
    data = page.cache.group.pages[page.page].cpu().numpy().copy()
    for area, item in ((0, layout.format.value_bytes), (layout.scale_offset, layout.format.scale_bytes)):
        data[area : area + page.first * item] = 0
        data[area + page.end * item : area + layout.entries * item] = 0
    data[layout.entries * layout.format.entry_bytes :] = 0
    return data.data
