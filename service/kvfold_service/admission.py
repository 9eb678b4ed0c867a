"""Who may send a body now: decided from the headers, before a byte of the body is read.

In this order: the tenant's quota, the body's size, room in staging, room in the queue. A body takes its place in the
queue only when it is whole, so that a slow sender keeps nobody out. The event loop owns it.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from kvfold_service.errors import ServiceError
from kvfold_service.quotas import UNLIMITED, Quotas
from kvfold_service.staging import Extent, Staging

FIRST_BYTES: Final = 64 << 10
"""Staging for a body that does not say its size; doubled whenever it is full."""


class Admission:
    """`places` bodies are on their way, wait or run; `queued` of them are whole; `num_admitted` there were so far."""

    def __init__(self, staging: Staging, max_body_bytes: int, max_queue: int, quotas: Quotas) -> None:
        self.staging, self.max_body_bytes, self.max_queue, self._quotas = staging, max_body_bytes, max_queue, quotas
        self.queued = self.num_admitted = 0
        self._open: set[int] = set()
        self._bodies: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def admit(self, tenant: str, announced: int | None) -> Place:
        """Room for a body of `announced` bytes, or of a size not yet known.

        Raises quota_exceeded, body_too_large, queue_full.
        """
        self._quotas.get(tenant, UNLIMITED).expect("queue", self._bodies[tenant], 1)
        limit = self.limit(tenant)
        size = min(FIRST_BYTES, limit) if announced is None else announced
        if size > limit:
            raise _too_large(limit)
        self.expect_share(tenant, size)
        extent = self.staging.lend(size)
        if extent is None:
            raise self.no_staging()
        try:
            self.expect_queue_room()
        except ServiceError:
            self.staging.give_back(extent)
            raise
        return Place(self, tenant, extent, limit if announced is None else announced)

    @property
    def places(self) -> int:
        return len(self._open)

    def holds_any_of(self, first: int) -> bool:
        """Whether one of the first so many that were admitted is still there."""
        return min(self._open, default=first) < first

    def limit(self, tenant: str) -> int:
        """Bytes that a body of this tenant may have."""
        own = self._quotas.get(tenant, UNLIMITED).staging
        return self.max_body_bytes if own is None else min(own, self.max_body_bytes)

    def expect_share(self, tenant: str, more: int) -> None:
        """Raises quota_exceeded."""
        self._quotas.get(tenant, UNLIMITED).expect("staging", self._bytes[tenant], more)

    def expect_queue_room(self) -> None:
        if self.queued >= self.max_queue:
            raise ServiceError(
                "queue_full", "too many calls wait; try again later", retry_after=1.0, max_queue=self.max_queue
            )

    def no_staging(self) -> ServiceError:
        return ServiceError(
            "queue_full",
            "too many bodies are on their way; try again later",
            retry_after=1.0,
            staging_bytes=self.staging.num_bytes,
        )

    def enter(self) -> int:
        """A place is taken: its number."""
        self.num_admitted += 1
        self._open.add(self.num_admitted - 1)
        return self.num_admitted - 1

    def leave(self, number: int) -> None:
        self._open.remove(number)

    def count(self, tenant: str, bodies: int, num_bytes: int) -> None:
        """A place taken, grown or left."""
        for counter, change in ((self._bodies, bodies), (self._bytes, num_bytes)):
            counter[tenant] += change
            if not counter[tenant]:
                del counter[tenant]

    def check_integrity(self) -> None:
        """What is lent is what the places hold; raises AssertionError."""
        self.staging.check_integrity()
        assert self.staging.num_lent == sum(self._bytes.values()), "staging is lent to nobody"
        assert 0 <= self.queued <= self.places == sum(self._bodies.values()), "a place is lost"


class Place:
    """One body's share of the worker, until `leave`: staging, its tenant's count and, once whole, a place in line."""

    def __init__(self, admission: Admission, tenant: str, extent: Extent, limit: int) -> None:
        self._admission, self._tenant, self._limit = admission, tenant, limit
        self._extent: Extent | None = extent
        self.view = extent.view
        self._queued = False
        self._number = admission.enter()
        admission.count(tenant, 1, len(extent.view))

    def hold(self, num_bytes: int) -> None:
        """Room for so many bytes; what is there stays. Raises body_too_large, quota_exceeded, queue_full."""
        if num_bytes > self._limit:
            raise _too_large(self._limit)
        if num_bytes > len(self.view):
            self._grow(num_bytes)

    def _grow(self, num_bytes: int) -> None:
        assert self._extent is not None
        before, staging = len(self.view), self._admission.staging
        wanted = max(num_bytes, min(2 * before, self._limit))
        self._admission.expect_share(self._tenant, wanted - before)
        grown = staging.grow(self._extent, wanted) or staging.grow(self._extent, num_bytes)
        if grown is None:
            raise self._admission.no_staging()
        self._extent, self.view = grown, grown.view
        self._admission.count(self._tenant, 0, len(grown.view) - before)

    def enter_queue(self) -> None:
        """The body is whole. Raises queue_full: others were faster."""
        self._admission.expect_queue_room()
        self._queued = True
        self._admission.queued += 1

    def leave(self) -> None:
        """Give all of it back; once more is harmless."""
        if self._extent is not None:
            self._admission.queued -= self._queued
            self._admission.leave(self._number)
            self._admission.count(self._tenant, -1, -len(self._extent.view))
            self._admission.staging.give_back(self._extent)
            self._extent = None


def _too_large(limit: int) -> ServiceError:
    return ServiceError("body_too_large", f"a body may have {limit} bytes; split the step", limit=limit)
