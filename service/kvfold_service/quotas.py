"""What one tenant may take of a worker. Without a quota only the worker's own limits hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvfold_service.errors import ServiceError

if TYPE_CHECKING:
    from kvfold_service.worker import Worker


@dataclass(frozen=True, slots=True)
class Quota:
    """None: not bounded.

    requests   live requests
    pages      pages, of all pools together
    queue      bodies that are on their way, wait or run
    staging    bytes of these
    """

    requests: int | None = None
    pages: int | None = None
    queue: int | None = None
    staging: int | None = None

    def expect(self, name: str, used: int, needed: int) -> None:
        """Raises quota_exceeded if `needed` more would be too many."""
        limit = getattr(self, name)
        if limit is not None and used + needed > limit:
            raise ServiceError(
                "quota_exceeded",
                f"this tenant may have {limit} of {name}, has {used} and needs {needed} more; release or wait",
                retry_after=1.0,
                quota=name,
                limit=limit,
                used=used,
                needed=needed,
            )


Quotas = Mapping[str, Quota]
"""By tenant."""
UNLIMITED = Quota()
NAMES = tuple(field.name for field in fields(Quota))


def parse(words: list[str]) -> dict[str, int]:
    """`name=number` words. Raises ValueError with what is wrong."""
    given: dict[str, int] = {}
    for word in words:
        name, _, number = word.partition("=")
        if name not in NAMES or name in given or not (number.isascii() and number.isdecimal() and len(number) < 19):
            raise ValueError(f"{word!r} is no quota: name=number, once each of {', '.join(NAMES)}")
        given[name] = int(number)
    return given


def expect_requests(worker: Worker, tenant: str, needed: int) -> None:
    """Before a tenant is given so many more requests. Raises quota_exceeded. Engine thread."""
    if needed and tenant in worker.quotas:
        worker.quotas[tenant].expect("requests", len(worker.slots_of.get(tenant, ())), needed)


def expect_pages(worker: Worker, tenant: str, needed: int) -> None:
    """Before a tenant is given so many more pages. Raises quota_exceeded. Engine thread."""
    if needed and tenant in worker.quotas and worker.quotas[tenant].pages is not None:
        slots = list(worker.slots_of.get(tenant, ()))
        caches = worker.caches.compressors
        used = sum(int((cache.num_pages[slots] - cache.first_page[slots]).sum()) for cache in caches)
        worker.quotas[tenant].expect("pages", used, needed)
