"""The worker's state and what each call does to it. Every method here runs on the engine thread, one at a time.

A step goes through: find requests → check starts → check capacity → reserve slots and pages → plan → check values →
run kernels → commit. Until the commit nothing that a reader can see has changed, and a failure gives back what was
reserved.
"""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvfold_client import wire
from kvfold_kernels import plan as p
from kvfold_kernels.backends import Backend
from kvfold_service.blocks import ForgedHandleError, HandleCodec, PageName, StaleEpochError
from kvfold_service.caches import TORCH_DTYPES, Caches, CompressorCache
from kvfold_service.compat import compat_hash
from kvfold_service.errors import ServiceError
from kvfold_service.manifest import Manifest
from kvfold_service.step import Step, StepRules
from kvfold_service.weights import Weights

log = logging.getLogger("kvfold")
Message = dict[str, Any]


@dataclass
class Request:
    """A sequence: its ring slot. Known from its first step until it is released."""

    slot: int


@dataclass
class _Reservation:
    """What a step has taken and would have to give back."""

    new_requests: dict[tuple[str, str], Request] = field(default_factory=dict)
    pages: list[tuple[CompressorCache, int, int]] = field(default_factory=list)
    """(cache, slot, page count before)"""


@dataclass(frozen=True)
class _Work:
    """One compressor's part of a step that is about to run."""

    cache: CompressorCache
    rows: torch.Tensor
    plan: p.Plan


class Worker:
    """State caches and calls of one worker. See the module's docstring; the engine owns the thread."""

    def __init__(
        self,
        manifest: Manifest,
        weights: Weights,
        backend: Backend,
        *,
        max_requests: int = 64,
        pages: int = 1024,
        max_step_tokens: int = 65536,
        handle_key: bytes | None = None,
        worker_id: str = "worker",
    ) -> None:
        self.manifest, self.backend = manifest, backend
        self.compat = compat_hash(manifest, weights)
        self.epoch = os.urandom(8)
        self.caches = Caches.allocate(manifest, weights, max_requests, pages, backend.device)
        self.handles = HandleCodec(handle_key or os.urandom(32), worker_id, self.epoch)
        self.requests: dict[tuple[str, str], Request] = {}
        self.free_slots = list(range(max_requests - 1, -1, -1))
        self.rules = StepRules(
            compat=self.compat,
            parts={part.name: part for part in manifest.compressors},
            row_widths={cache.name: cache.compressor.geometry.row_width for cache in self.caches.compressors},
            max_position=manifest.max_position,
            max_step_tokens=max_step_tokens,
            draft_slack=manifest.draft_slack,
        )
        self.totals = {"steps": 0, "tokens": 0, "entries": 0, "launches": 0, "skipped": 0, "released": 0}

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self, step: Step, tenant: str = "") -> Message:
        """Run one step; all of it or none. Raises ServiceError."""
        began = time.perf_counter_ns()
        known = [self.requests.get((tenant, request.id)) for request in step.requests]
        caches = [self.caches.by_name[name] for name in step.tensors]
        self._check_starts(step, known, caches)
        active = np.flatnonzero(np.diff(step.query_start_loc))
        held = _Reservation()
        try:
            slots = self._reserve(step, tenant, known, caches, active, held)
            plans = [self._plan(cache, step, slots[active], active) for cache in caches]
            planned = time.perf_counter_ns()
            work = [
                _Work(cache, _as_torch(tensor, self.backend.device), plan)
                for cache, tensor, plan in zip(caches, step.tensors.values(), plans, strict=True)
            ]
            copied = time.perf_counter_ns()
            self._check_values(work)
            launches = self._run(work)
        except BaseException:
            self._give_back(held)
            raise
        self.requests.update(held.new_requests)
        for item in work:
            item.plan.commit(item.cache.state)
            item.cache.drafts[item.plan.slots] = step.draft_tokens[active]
        done = time.perf_counter_ns()
        skipped = [item.cache.name for item in work if not item.plan.boundary]
        self._count(step, work, launches, len(skipped))
        return {
            "version": wire.PROTOCOL_VERSION,
            "step_id": step.step_id,
            "epoch": self.epoch.hex(),
            "compat": self.compat,
            "launches": launches,
            "skipped": skipped,
            "requests": self._parts(step, tenant, slots, caches),
            "timings_us": {
                "plan": (planned - began) // 1000,
                "copy": (copied - planned) // 1000,
                "kernel": (done - copied) // 1000,
            },
        }

    def _check_starts(self, step: Step, known: list[Request | None], caches: list[CompressorCache]) -> None:
        for request, state in zip(step.requests, known, strict=True):
            for cache in caches:
                expected = cache.committed(state.slot) if state else 0
                if request.start != expected:
                    code = "position_conflict" if request.start < expected else "position_gap"
                    raise ServiceError(
                        code,
                        f"request {request.id} has {expected} tokens in {cache.name}, so the step must start there, "
                        f"not at {request.start}",
                        request=request.id,
                        compressor=cache.name,
                        expected=expected,
                    )

    def _reserve(
        self,
        step: Step,
        tenant: str,
        known: list[Request | None],
        caches: list[CompressorCache],
        active: np.ndarray,
        held: _Reservation,
    ) -> np.ndarray:
        """Slots of all requests (−1: unknown and without tokens), new ones and the pages they need taken."""
        new = [int(i) for i in active if known[i] is None]
        if len(new) > len(self.free_slots):
            raise self._exhausted("requests", len(new), len(self.free_slots))
        slots = np.array([request.slot if request else -1 for request in known], np.int64)
        for i in new:
            slots[i] = self.free_slots.pop()
            held.new_requests[tenant, step.requests[i].id] = Request(int(slots[i]))
        starts = np.array([step.requests[i].start for i in active], np.int64)
        ends = starts + np.diff(step.query_start_loc)[active]
        needs = []
        wanted: dict[int, int] = {}
        for cache in caches:
            more = cache.pages_for(ends // cache.compressor.geometry.ratio) - cache.num_pages[slots[active]]
            needs.append(more)
            wanted[cache.group.index] = wanted.get(cache.group.index, 0) + int(more.sum())
        for index, count in wanted.items():
            group = self.caches.groups[index]
            if count > group.pool.num_free:
                raise self._exhausted(group.label, count, group.pool.num_free)
        for cache, more in zip(caches, needs, strict=True):
            for i in np.flatnonzero(more):
                self._take_pages(cache, int(slots[active[i]]), int(more[i]), held)
        return slots

    def _take_pages(self, cache: CompressorCache, slot: int, count: int, held: _Reservation) -> None:
        before = int(cache.num_pages[slot])
        held.pages.append((cache, slot, before))
        pages = cache.group.pool.take(slot, cache.index, before, count)
        cache.page_table[slot, before : before + count] = pages
        cache.num_pages[slot] = before + count

    def _give_back(self, held: _Reservation) -> None:
        for cache, slot, before in reversed(held.pages):
            self.caches.drop_pages(cache, slot, before)
        self.free_slots.extend(request.slot for request in held.new_requests.values())

    @staticmethod
    def _exhausted(pool: str, needed: int, free: int) -> ServiceError:
        return ServiceError(
            "pool_exhausted",
            f"the step needs {needed} of pool {pool} and {free} are free; release requests or try again later",
            retry_after=1.0,
            pool=pool,
            needed=needed,
            free=free,
        )

    def _plan(self, cache: CompressorCache, step: Step, slots: np.ndarray, active: np.ndarray) -> p.Plan:
        loc = step.query_start_loc
        if len(active) + 1 < len(loc):  # requests without tokens take no part
            loc = np.concatenate((loc[active], loc[-1:]))
        drafts = step.draft_tokens[active]
        geometry = cache.compressor.geometry
        return p.make_plan(
            geometry, cache.state, slots, loc, cache.page_table, cache.page_entries, drafts if drafts.any() else None
        )

    def _check_values(self, work: list[_Work]) -> None:
        for item in work:
            found = self.backend.find_non_finite(item.rows, item.plan.num_tokens)
            if found:
                raise ServiceError(
                    "non_finite",
                    f"the tensor of {item.cache.name} has a value at row {found[0]}, column {found[1]} that is not "
                    "finite (only a score may be −inf)",
                    compressor=item.cache.name,
                    row=found[0],
                    column=found[1],
                )

    def _run(self, work: list[_Work]) -> int:
        try:
            return sum(
                self.backend.compress(
                    torch.from_numpy(item.plan.windows.copy()),
                    torch.from_numpy(item.plan.appends.copy()),
                    item.rows,
                    item.cache.rings,
                    item.cache.group.pages,
                    item.cache.compressor,
                )
                for item in work
            )
        except Exception:
            log.exception("a kernel failed; the step is undone")
            raise ServiceError("step_failed", "a kernel failed; nothing of the step was kept, send it again") from None

    def _count(self, step: Step, work: list[_Work], launches: int, skipped: int) -> None:
        self.totals["steps"] += 1
        self.totals["tokens"] += step.num_tokens
        self.totals["entries"] += sum(item.plan.num_windows for item in work)
        self.totals["launches"] += launches
        self.totals["skipped"] += skipped

    def _parts(self, step: Step, tenant: str, slots: np.ndarray, caches: list[CompressorCache]) -> list[Message]:
        lengths = np.diff(step.query_start_loc).tolist()
        return [
            {
                "id": request.id,
                "compressors": {
                    cache.name: self._part(tenant, slot, cache, request.start, length, step.all_pages)
                    for cache in caches
                },
            }
            for request, slot, length in zip(step.requests, slots.tolist(), lengths, strict=True)
        ]

    def _part(
        self, tenant: str, slot: int, cache: CompressorCache, start: int, length: int, all_pages: bool
    ) -> Message:
        """One request's state in one compressor; entries of [start, start + length) are the new ones."""
        ratio = cache.compressor.geometry.ratio
        committed = start + length
        first, end = start // ratio, committed // ratio
        return {
            "committed": committed,
            "open_tokens": committed % ratio,
            "num_entries": end,
            "new_entries": [first, end],
            "pages": self._handles(tenant, slot, cache, 0 if all_pages else first, end),
        }

    def _handles(self, tenant: str, slot: int, cache: CompressorCache, first: int, end: int) -> list[str]:
        """Handles of the pages that hold entries [first, end) of a request."""
        if first == end:
            return []
        n = cache.page_entries
        pages = cache.page_table[slot, first // n : -(-end // n)].tolist()
        generation, group = cache.group.pool.generation, cache.group.index
        return [self.handles.seal(tenant, PageName(group, page, int(generation[page]))) for page in pages]

    # -- requests ------------------------------------------------------------------------------------------------

    def request(self, request_id: str, tenant: str = "") -> Message:
        """The request's part of a step reply, for all compressors. Raises unknown_request."""
        state = self._known(request_id, tenant)
        return {"version": wire.PROTOCOL_VERSION, "id": request_id, "compressors": self._all_parts(tenant, state.slot)}

    def _all_parts(self, tenant: str, slot: int) -> Message:
        parts = {}
        for cache in self.caches.compressors:
            part = self._part(tenant, slot, cache, 0, cache.committed(slot), all_pages=True)
            del part["new_entries"]
            parts[cache.name] = part
        return parts

    def _known(self, request_id: str, tenant: str) -> Request:
        state = self.requests.get((tenant, request_id))
        if state is None:
            raise ServiceError("unknown_request", "there is no request of this id")
        return state

    def release(self, request_id: str, tenant: str = "") -> None:
        """Forget a request and free its pages; an unknown id is fine."""
        state = self.requests.pop((tenant, request_id), None)
        if state is not None:
            self.caches.release_slot(state.slot)
            self.free_slots.append(state.slot)
            self.totals["released"] += 1

    # -- pages ---------------------------------------------------------------------------------------------------

    def read_pages(self, handles: list[str], tenant: str = "") -> Message:
        """The pages' bytes, zero beyond the valid entries; all or nothing. Raises unknown_handle, stale_handle."""
        found = [self._page(handle, tenant) for handle in handles]
        return {
            "version": wire.PROTOCOL_VERSION,
            "pages": [
                {
                    "handle": handle,
                    "compressor": cache.name,
                    "num_entries": valid,
                    **wire.tensor_map("uint8", [cache.group.layout.page_bytes], self._page_bytes(cache, page, valid)),
                }
                for handle, (cache, page, valid) in zip(handles, found, strict=True)
            ],
        }

    def _page(self, handle: str, tenant: str) -> tuple[CompressorCache, int, int]:
        """Owner, page and number of valid entries of a handle."""
        try:
            name = self.handles.open(tenant, handle)
        except ForgedHandleError:
            raise ServiceError("unknown_handle", "there is no page of this handle") from None
        except StaleEpochError:
            raise _stale() from None
        pool = self.caches.groups[name.group].pool
        if pool.generation[name.page] != name.generation:
            raise _stale()
        cache = self.caches.compressors[pool.owner_compressor[name.page]]
        slot, page_idx = int(pool.owner_slot[name.page]), int(pool.owner_page_idx[name.page])
        valid = cache.num_entries(slot) - page_idx * cache.page_entries
        return cache, name.page, min(valid, cache.page_entries)

    @staticmethod
    def _page_bytes(cache: CompressorCache, page: int, valid: int) -> memoryview:
        layout = cache.group.layout
        data = cache.group.pages[page].cpu().numpy().copy()
        data[valid * layout.format.value_bytes : layout.scale_offset] = 0
        data[layout.scale_offset + valid * layout.format.scale_bytes :] = 0
        return data.data

    # -- health --------------------------------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Slots, rings, pools and page tables agree; raises AssertionError."""
        used = [request.slot for request in self.requests.values()]
        assert sorted([*used, *self.free_slots]) == list(range(self.caches.num_rings)), "a slot is lost or used twice"
        self.caches.check_integrity(set(used))

    def stats(self) -> Message:
        return {
            "backend": self.backend.name,
            "compat": self.compat,
            "epoch": self.epoch.hex(),
            "requests": {"live": len(self.requests), "max": self.caches.num_rings},
            "pools": {
                group.label: {
                    "used": group.pool.num_used,
                    "free": group.pool.num_free,
                    "page_bytes": group.layout.page_bytes,
                }
                for group in self.caches.groups
            },
            "bytes": self.caches.bytes_by_pool(),
            "totals": dict(self.totals),
        }


def _stale() -> ServiceError:
    return ServiceError("stale_handle", "the page of this handle was freed or has changed; ask for the request again")


def _as_torch(tensor: wire.Tensor, device: str) -> torch.Tensor:
    """A view of the tensor's bytes (a copy if they are read-only), on the device."""
    data = tensor.data if not tensor.data.readonly else memoryview(bytearray(tensor.data))
    if not len(data):
        return torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype], device=device)
    return torch.frombuffer(data, dtype=TORCH_DTYPES[tensor.dtype]).view(tensor.shape).to(device)
