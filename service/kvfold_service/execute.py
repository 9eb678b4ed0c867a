"""A step: find requests → check starts → reserve slots and pages → plan → run → commit.

Until the commit nothing that a reader can see has changed; a failure gives back what was reserved.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvfold_client import wire
from kvfold_kernels import plan as p
from kvfold_service.caches import CompressorCache, Reservation
from kvfold_service.errors import ServiceError
from kvfold_service.runner import Work
from kvfold_service.step import Step

if TYPE_CHECKING:
    from kvfold_service.worker import Request, Worker

I64 = NDArray[np.int64]


def step(worker: Worker, step: Step, tenant: str) -> dict[str, Any]:
    """The step's reply. Raises ServiceError; then nothing has changed."""
    began = time.perf_counter_ns()
    worker.reap()
    known = [worker.requests.get((tenant, request.id)) for request in step.requests]
    caches = [worker.caches.by_name[name] for name in step.tensors]
    _check_starts(step, known, caches)
    active = np.flatnonzero(np.diff(step.query_start_loc))
    held = Reservation()
    requests: list[Request | None] = []
    try:
        requests = _find_slots(worker, step, known, active)
        slots = np.array([request.slot if request else -1 for request in requests], np.int64)
        _reserve_pages(worker, step, slots[active], caches, active, held)
        plans = [_plan(cache, step, slots[active], active) for cache in caches]
        planned = time.perf_counter_ns()
        work = [Work(*item) for item in zip(caches, step.tensors.values(), plans, strict=True)]
        ran = worker.runner.run(work)
    except BaseException:
        held.give_back()
        worker.free_slots.extend(new.slot for new, old in zip(requests, known, strict=False) if new and not old)
        raise
    _commit(worker, step, tenant, known, requests, work, active)
    skipped = [item.cache.name for item in work if not item.plan.boundary]
    _count(worker, step, work, ran.launches, len(skipped))
    return {
        "version": wire.PROTOCOL_VERSION,
        "step_id": step.step_id,
        "epoch": worker.epoch.hex(),
        "compat": worker.compat,
        "launches": ran.launches,
        "skipped": skipped,
        "requests": _parts(worker, step, tenant, slots, caches),
        "timings_us": {"plan": (planned - began) // 1000, "copy": ran.copy_us, "kernel": ran.kernel_us},
    }


def _check_starts(step: Step, known: list[Request | None], caches: list[CompressorCache]) -> None:
    """Raises position_conflict, position_gap: of the first request, and of its compressors the first."""
    slots = np.array([request.slot if request else -1 for request in known], np.int64)
    starts = np.array([request.start for request in step.requests], np.int64)
    expected = np.array([np.where(slots < 0, 0, cache.state[p.COMMITTED, slots]) for cache in caches])
    wrong = np.argwhere((expected != starts).T)
    if not len(wrong):
        return
    i, j = wrong[0]
    request, cache, have = step.requests[i], caches[j], int(expected[j, i])
    raise ServiceError(
        "position_conflict" if request.start < have else "position_gap",
        f"request {request.id} has {have} tokens in {cache.name}, so the step must start there, not at {request.start}",
        request=request.id,
        compressor=cache.name,
        expected=have,
    )


def _find_slots(worker: Worker, step: Step, known: list[Request | None], active: I64) -> list[Request | None]:
    """The requests, new ones with a slot; None: unknown and without tokens, so that it stays unknown."""
    new = [int(i) for i in active if known[i] is None]
    if len(new) > len(worker.free_slots):
        raise exhausted("requests", len(new), len(worker.free_slots))
    requests = list(known)
    for i in new:
        requests[i] = worker.take_slot()
    return requests


def exhausted(pool: str, needed: int, free: int) -> ServiceError:
    return ServiceError(
        "pool_exhausted",
        f"this needs {needed} of pool {pool} and {free} are free; release requests or try again later",
        retry_after=1.0,
        pool=pool,
        needed=needed,
        free=free,
    )


def _reserve_pages(
    worker: Worker, step: Step, slots: I64, caches: list[CompressorCache], active: I64, held: Reservation
) -> None:
    """Take the pages that the step's entries need: first counted in all pools, then taken."""
    starts = np.array([step.requests[i].start for i in active], np.int64)
    ends = starts + np.diff(step.query_start_loc)[active]
    needs = [cache.pages_for(ends // cache.compressor.geometry.ratio) - cache.num_pages[slots] for cache in caches]
    wanted: dict[int, int] = {}
    for cache, need in zip(caches, needs, strict=True):
        wanted[cache.group.index] = wanted.get(cache.group.index, 0) + int(need.sum())
    for index, count in wanted.items():
        group = worker.caches.groups[index]
        if count > group.pool.num_free:
            raise exhausted(group.label, count, group.pool.num_free)
    for cache, need in zip(caches, needs, strict=True):
        for i in np.flatnonzero(need):
            held.take(cache, int(slots[i]), int(need[i]))


def _plan(cache: CompressorCache, step: Step, slots: I64, active: I64) -> p.Plan:
    loc = step.query_start_loc
    if len(active) + 1 < len(loc):  # requests without tokens take no part
        loc = np.concatenate((loc[active], loc[-1:]))
    drafts = step.draft_tokens[active]
    geometry = cache.compressor.geometry
    return p.make_plan(
        geometry, cache.state, slots, loc, cache.page_table, cache.page_entries, drafts if drafts.any() else None
    )


def _commit(
    worker: Worker,
    step: Step,
    tenant: str,
    known: list[Request | None],
    requests: list[Request | None],
    work: list[Work],
    active: I64,
) -> None:
    for item in work:
        item.plan.commit(item.cache.state)
        item.cache.drafts[item.plan.slots] = step.draft_tokens[active]
    carried_with = dict.fromkeys(step.tensors, tuple(step.tensors))
    for named, old, request in zip(step.requests, known, requests, strict=True):
        if request is None:
            continue
        if named.num_tokens:
            request.carried_with.update(carried_with)
        if old is None:
            worker.add((tenant, named.id), request)
        else:
            worker.renew(request)


def _count(worker: Worker, step: Step, work: list[Work], launches: int, skipped: int) -> None:
    worker.totals["steps"] += 1
    worker.totals["tokens"] += step.num_tokens
    worker.totals["entries"] += sum(item.plan.num_windows for item in work)
    worker.totals["launches"] += launches
    worker.totals["skipped"] += skipped


def _parts(worker: Worker, step: Step, tenant: str, slots: I64, caches: list[CompressorCache]) -> list[dict[str, Any]]:
    return [
        {
            "id": request.id,
            "compressors": {
                cache.name: worker.part(tenant, slot, cache, request.start, request.num_tokens, step.all_pages)
                for cache in caches
            },
        }
        for request, slot in zip(step.requests, slots.tolist(), strict=True)
    ]
