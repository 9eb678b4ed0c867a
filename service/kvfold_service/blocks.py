"""Who owns which page, and the names that outsiders know pages by.

A pool hands out page numbers; the bytes belong to `caches`. Every page is either free or owned by one
(request slot, compressor) as that request's page_idx-th page. A page's generation grows whenever what it held is no
longer what a reader was promised: when it is freed, and when a published entry is withdrawn from it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
FREE: Final = -1


class PagePool:
    """Pages 0 … num_pages − 1 of one group. Not thread-safe: the engine thread owns it."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.generation: I64 = np.zeros(num_pages, np.int64)
        self.owner_slot: I32 = np.full(num_pages, FREE, np.int32)
        self.owner_compressor: I32 = np.full(num_pages, FREE, np.int32)
        self.owner_page_idx: I32 = np.full(num_pages, FREE, np.int32)
        self.unread: NDArray[np.bool_] = np.zeros(num_pages, bool)
        """Owned pages that nobody has fetched since they were taken, or since an entry was withdrawn from them."""
        # [0, num_free) of `_free` are free pages; the last freed is the first taken.
        self._free: I32 = np.arange(num_pages - 1, -1, -1, dtype=np.int32)
        self.num_free = num_pages

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def take(self, slot: int, compressor: int, first_page_idx: int, count: int) -> I32:
        """Give `count` pages to a request, as its pages first_page_idx … The caller has checked num_free."""
        assert 0 <= count <= self.num_free
        self.num_free -= count
        pages = self._free[self.num_free : self.num_free + count][::-1].copy()
        self.owner_slot[pages] = slot
        self.owner_compressor[pages] = compressor
        self.owner_page_idx[pages] = np.arange(first_page_idx, first_page_idx + count)
        self.unread[pages] = True
        return pages

    def release(self, pages: I32) -> None:
        """Take pages back; every handle to them is stale from now on."""
        assert bool((self.owner_slot[pages] != FREE).all())
        self.withdraw(pages)
        for owner in (self.owner_slot, self.owner_compressor, self.owner_page_idx):
            owner[pages] = FREE
        self.unread[pages] = False
        self._free[self.num_free : self.num_free + len(pages)] = pages[::-1]
        self.num_free += len(pages)

    def withdraw(self, pages: I32) -> None:
        """Make every handle to these pages stale; the owner stays."""
        self.generation[pages] += 1
        self.unread[pages] = True

    def check_integrity(self) -> None:
        """Every page is free once, or owned; raises AssertionError."""
        free = self._free[: self.num_free]
        assert len(np.unique(free)) == self.num_free, "a page is free twice"
        is_free = np.zeros(self.num_pages, bool)
        is_free[free] = True
        for owner in (self.owner_slot, self.owner_compressor, self.owner_page_idx):
            assert bool(((owner == FREE) == is_free).all()), "a page is free and owned, or neither"
        assert not bool((self.unread & is_free).any()), "a free page waits to be read"


@dataclass(frozen=True, slots=True)
class PageName:
    """What a handle says: a page of a pool group, as it was in one generation."""

    group: int
    page: int
    generation: int


class ForgedHandleError(ValueError):
    """Not a handle of this worker for this tenant: forged, damaged, foreign, or made with another key."""


class StaleEpochError(ValueError):
    """A true handle, from before the worker's last start."""


class HandleCodec:
    """Page names as opaque, fenced strings.

    handle = base64url(version u8 | epoch 8 bytes | group u16 | page u32 | generation u64 | MAC 16 bytes), 52 characters
    MAC    = blake2b-128, keyed, over worker id, tenant and the fields before it

    The worker and the tenant are in the MAC only, so that a handle of either other reads as forged.
    """

    _VERSION: Final = 1
    _FIELDS: Final = struct.Struct("<B8sHIQ")
    _MAC_BYTES: Final = 16

    def __init__(self, key: bytes, worker_id: str, epoch: bytes) -> None:
        assert len(epoch) == 8
        self._key, self._worker, self._epoch = key, worker_id.encode(), epoch
        self._keyed: dict[str, hashlib.blake2b] = {}

    def _mac(self, tenant: str, fields: bytes) -> bytes:
        keyed = self._keyed.get(tenant)
        if keyed is None:
            keyed = hashlib.blake2b(key=self._key, digest_size=self._MAC_BYTES)
            for part in (self._worker, tenant.encode()):
                keyed.update(len(part).to_bytes(4, "little") + part)
            self._keyed[tenant] = keyed
        state = keyed.copy()
        state.update(fields)
        return state.digest()

    def seal(self, tenant: str, name: PageName) -> str:
        fields = self._FIELDS.pack(self._VERSION, self._epoch, name.group, name.page, name.generation)
        return base64.urlsafe_b64encode(fields + self._mac(tenant, fields)).decode()

    def open(self, tenant: str, handle: str) -> PageName:
        """Raises ForgedHandleError, StaleEpochError."""
        try:
            raw = base64.b64decode(handle, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise ForgedHandleError from None
        if len(raw) != self._FIELDS.size + self._MAC_BYTES or base64.urlsafe_b64encode(raw).decode() != handle:
            raise ForgedHandleError  # a page has one handle: no padding behind it, no other alphabet
        fields, mac = raw[: self._FIELDS.size], raw[self._FIELDS.size :]
        if not hmac.compare_digest(mac, self._mac(tenant, fields)):
            raise ForgedHandleError
        _, epoch, group, page, generation = self._FIELDS.unpack(fields)
        if epoch != self._epoch:
            raise StaleEpochError
        return PageName(group, page, generation)
