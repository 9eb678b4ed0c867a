"""The worker's state, and its calls. Every method here runs on the engine thread, one at a time.

What a call does in full stands in a module of its own: `execute` (steps), `reads` (pages), `rollback` (truncate),
`transfer` (export), `arrivals` (import). Here is what they share: requests, their slots and leases, what is said of
them.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvfold_client import wire
from kvfold_kernels.backends import Backend
from kvfold_service import arrivals, execute, reads, rollback, transfer
from kvfold_service.blocks import HandleCodec, PageName
from kvfold_service.caches import Caches, CompressorCache
from kvfold_service.compat import compat_hash
from kvfold_service.device import runner_for
from kvfold_service.errors import ServiceError
from kvfold_service.manifest import Manifest
from kvfold_service.quotas import Quotas
from kvfold_service.step import Step, StepRules
from kvfold_service.weights import Weights

log = logging.getLogger("kvfold")
Message = dict[str, Any]
RequestKey = tuple[str, str]
"""(tenant, request id)."""


@dataclass
class Request:
    """A sequence, known from its first step or import until it is released or its lease ends.

    carried_with  compressor → the compressors of the last step that carried it, for `rollback`
    """

    slot: int
    expires: float = math.inf
    carried_with: dict[str, tuple[str, ...]] = field(default_factory=dict)


class Worker:
    """State caches and calls of one worker. `clock` gives seconds that never go back."""

    def __init__(
        self,
        manifest: Manifest,
        weights: Weights,
        backend: Backend,
        *,
        max_requests: int = 64,
        pages: int = 1024,
        max_step_tokens: int = 65536,
        max_step_bytes: int = 1 << 30,
        graphs: bool = True,
        lease_seconds: float = 30.0,
        handle_key: bytes | None = None,
        worker_id: str = "worker",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.manifest, self.backend, self.clock, self.lease_seconds = manifest, backend, clock, lease_seconds
        self.compat = compat_hash(manifest, weights)
        self.epoch = os.urandom(8)
        self.caches = Caches.allocate(manifest, weights, max_requests, pages, backend.device)
        self.handles = HandleCodec(handle_key or os.urandom(32), worker_id, self.epoch)
        self.runner = runner_for(backend, self.caches, max_step_bytes, max_step_tokens, graphs)
        self.requests: dict[RequestKey, Request] = {}
        self.incoming: dict[RequestKey, arrivals.Incoming] = {}
        """Requests on their way in, which nobody can name yet."""
        self.aside: list[arrivals.Incoming] = []
        """Abandoned ones to whose pages something may still write."""
        self.queued: Counter[RequestKey] = Counter()
        """Requests named by steps that wait or run; the event loop counts, `reap` looks."""
        self.free_slots = list(range(max_requests - 1, -1, -1))
        self.slots_of: dict[str, set[int]] = {}
        """Ring slots by the tenant who has them, of steps that run too."""
        self.quotas: Quotas = {}
        self.rules = StepRules(
            compat=self.compat,
            parts={part.name: part for part in manifest.compressors},
            row_widths={cache.name: cache.compressor.geometry.row_width for cache in self.caches.compressors},
            max_position=manifest.max_position,
            max_step_tokens=max_step_tokens,
            draft_slack=manifest.draft_slack,
        )
        self.entry_bytes = {c.name: c.group.layout.format.entry_bytes for c in self.caches.compressors}
        self.totals = {
            "steps": 0,
            "batches": 0,
            "tokens": 0,
            "entries": 0,
            "launches": 0,
            "skipped": 0,
            "released": 0,
            "expired": 0,
        }
        self.by_kind: Counter[tuple[str, str]] = Counter()
        """("launches" or "skipped", kind of compressor) → how many."""

    # -- calls ---------------------------------------------------------------------------------------------------

    def step(self, step: Step, tenant: str = "") -> Message:
        """Run one step; all of it or none."""
        return execute.step(self, step, tenant)

    def read_pages(self, handles: list[str], tenant: str = "") -> Message:
        """The pages' bytes; all or nothing."""
        return reads.read_pages(self, handles, tenant)

    def verify(self, handles: list[str], tenant: str = "") -> Message:
        """Digests of the pages' entries; all or nothing."""
        return reads.verify(self, handles, tenant)

    def locate(self, handles: list[str], tenant: str = "") -> Message:
        """Where pages lie in this worker's memory; all or nothing."""
        return reads.locate(self, handles, tenant)

    def truncate(self, request_id: str, length: int, tenant: str = "") -> Message:
        """Withdraw draft tokens from `length` on."""
        rollback.truncate(self, request_id, length, tenant)
        return self.request(request_id, tenant)

    def export(self, request_id: str, wanted: transfer.ExportCall, tenant: str = "") -> Message:
        """Entries and open rows of a request."""
        return transfer.export(self, request_id, wanted, tenant)

    def entries(self, request_id: str, wanted: transfer.EntriesCall, tenant: str = "") -> Message:
        """Some entries of one compressor."""
        return transfer.entries(self, request_id, wanted, tenant)

    def import_(self, given: arrivals.ImportCall, tenant: str = "") -> Message:
        """Go on with an exported request."""
        arrivals.import_(self, given, tenant)
        return self.request(given.request_id, tenant)

    def request(self, request_id: str, tenant: str = "") -> Message:
        """The request's part of a step reply, for all compressors. Raises unknown_request."""
        slot = self.known(request_id, tenant).slot
        return {"version": wire.PROTOCOL_VERSION, "id": request_id, "compressors": self._all_parts(tenant, slot)}

    def lease(self, request_id: str, seconds: float, tenant: str = "") -> Message:
        """Keep a request for so long from now on, whatever its lease was. Raises unknown_request."""
        self.known(request_id, tenant).expires = self.clock() + seconds
        return {"version": wire.PROTOCOL_VERSION, "expires_in": seconds}

    def release(self, request_id: str, tenant: str = "") -> None:
        """Forget a request and free its pages; an unknown id is fine."""
        if self._forget((tenant, request_id)):
            self.totals["released"] += 1

    def can_keep(self, key: RequestKey) -> bool:
        """Whether a step that comes now keeps the request's lease from ending: not one that has ended already."""
        request = self.requests.get(key)
        return request is None or request.expires > self.clock() or self.queued[key] > 0

    def reap(self) -> int:
        """Release what nobody has renewed and no step waits for; returns how many requests that were."""
        now = self.clock()
        expired = [key for key, request in self.requests.items() if request.expires <= now and not self.queued[key]]
        for key in expired:
            self._forget(key)
        self.totals["expired"] += len(expired)
        return len(expired)

    # -- shared by the calls -------------------------------------------------------------------------------------

    def known(self, request_id: str, tenant: str) -> Request:
        """Raises unknown_request, also for one whose lease has ended."""
        request = self.requests.get((tenant, request_id))
        if request is None or request.expires <= self.clock():
            raise ServiceError("unknown_request", "there is no request of this id")
        return request

    def renew(self, request: Request) -> None:
        """A use of the request: its lease is at least the default from now on."""
        request.expires = max(request.expires, self.clock() + self.lease_seconds)

    def add(self, key: RequestKey, request: Request) -> None:
        """Make a request known; its lease starts."""
        request.expires = self.clock() + self.lease_seconds
        self.requests[key] = request

    def take_slot(self, tenant: str) -> Request:
        request = Request(self.free_slots.pop())
        self.slots_of.setdefault(tenant, set()).add(request.slot)
        return request

    def give_slot(self, slot: int, tenant: str) -> None:
        """The inverse; its pages and rows are given back already."""
        self.free_slots.append(slot)
        self.slots_of[tenant].remove(slot)
        if not self.slots_of[tenant]:
            del self.slots_of[tenant]

    def _forget(self, key: RequestKey) -> bool:
        request = self.requests.pop(key, None)
        if request is None:
            return False
        self.caches.release_slot(request.slot)
        self.give_slot(request.slot, key[0])
        return True

    def part(self, tenant: str, slot: int, cache: CompressorCache, start: int, length: int, all_pages: bool) -> Message:
        """One request's state in one compressor; entries that closed in [start, start + length) are the new ones."""
        ratio = cache.compressor.geometry.ratio
        committed = start + length
        first, end = start // ratio, committed // ratio
        part = {
            "committed": committed,
            "open_tokens": committed % ratio,
            "num_entries": end,
            "new_entries": [first, end],
            "pages": self._handles(tenant, slot, cache, 0 if all_pages else first, end),
        }
        if slot >= 0 and (held_from := cache.first_entry[slot]):
            part["first_entry"] = int(held_from)
        return part

    def _all_parts(self, tenant: str, slot: int) -> Message:
        parts = {}
        for cache in self.caches.compressors:
            part = self.part(tenant, slot, cache, 0, cache.committed(slot), all_pages=True)
            del part["new_entries"]
            parts[cache.name] = part
        return parts

    def _handles(self, tenant: str, slot: int, cache: CompressorCache, first: int, end: int) -> list[str]:
        """Handles of the pages that hold entries [first, end) of a request, as far as they are held here."""
        if slot < 0:
            return []
        first = max(first, int(cache.first_entry[slot]))
        if first >= end:
            return []
        n = cache.page_entries
        pages = cache.page_table[slot, first // n : -(-end // n)].tolist()
        generation, group = cache.group.pool.generation, cache.group.index
        return [self.handles.seal(tenant, PageName(group, page, int(generation[page]))) for page in pages]

    # -- health --------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Slots, rings, pools and page tables agree; raises AssertionError."""
        held = [(key[0], request.slot) for key, request in self.requests.items()]
        held += [(i.key[0], i.request.slot) for i in [*self.incoming.values(), *self.aside]]
        used = [slot for _, slot in held]
        assert sorted([*used, *self.free_slots]) == list(range(self.caches.num_rings)), "a slot is lost or used twice"
        owned = {(tenant, slot) for tenant, slots in self.slots_of.items() for slot in slots}
        assert owned == set(held), "a slot is not its tenant's"
        self.caches.check_integrity(set(used))

    def stats(self) -> Message:
        pools = {
            group.label: {
                "used": group.pool.num_used,
                "free": group.pool.num_free,
                "page_bytes": group.layout.page_bytes,
            }
            for group in self.caches.groups
        }
        return {
            "backend": self.backend.name,
            "compat": self.compat,
            "epoch": self.epoch.hex(),
            "requests": {"live": len(self.requests), "max": self.caches.num_rings},
            "pools": pools,
            "bytes": self.caches.bytes_by_pool(),
            "totals": dict(self.totals),
        }
