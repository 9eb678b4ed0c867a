"""Steps: find requests → check starts → reserve slots and pages → plan → run → commit.

Until the commit nothing that a reader can see has changed; a failure gives back what was reserved.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvfold_client import wire
from kvfold_kernels import plan as p
from kvfold_service import quotas
from kvfold_service.caches import CompressorCache, Reservation
from kvfold_service.errors import ServiceError
from kvfold_service.runner import NonFiniteError, Part, Ran, Work
from kvfold_service.step import Step

if TYPE_CHECKING:
    from kvfold_service.worker import Request, Worker

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class Wanted:
    """A step that somebody waits for."""

    step: Step
    tenant: str

    @property
    def keys(self) -> set[tuple[str, str]]:
        return {(self.tenant, request.id) for request in self.step.requests}


@dataclass(frozen=True)
class _Prepared:
    """A step with its slots and pages reserved.

    known, requests  its requests before and after; None: unknown, and without tokens so that it stays so
    slots            int64 `[num_requests]` ring slots, −1 for those
    active           int64, requests that have tokens
    """

    wanted: Wanted
    known: list[Request | None]
    requests: list[Request | None]
    slots: I64
    active: I64
    held: Reservation

    @property
    def step(self) -> Step:
        return self.wanted.step


def step(worker: Worker, step: Step, tenant: str) -> dict[str, Any]:
    """One step alone. Raises ServiceError; then nothing has changed."""
    (outcome,) = steps(worker, [Wanted(step, tenant)])
    if isinstance(outcome, BaseException):
        raise outcome
    return outcome


def can_join(worker: Worker, batch: list[Wanted], other: Wanted) -> bool:
    """Whether a step may run with these: other requests, the same dtypes, and few enough rows to bring together."""
    rows = sum(wanted.step.num_tokens for wanted in batch) + other.step.num_tokens
    if rows > worker.runner.most_merged_rows:
        return False
    dtypes = {name: tensor.dtype for wanted in batch for name, tensor in wanted.step.tensors.items()}
    if any(dtypes.get(name, tensor.dtype) != tensor.dtype for name, tensor in other.step.tensors.items()):
        return False
    return all(other.keys.isdisjoint(wanted.keys) for wanted in batch)


def steps(worker: Worker, batch: Sequence[Wanted]) -> list[dict[str, Any] | BaseException]:
    """Run steps of different requests as one batch; the reply of each, or why it was refused.

    A step that is refused changes nothing and does not touch the others: they run without it. If the kernels fail, the
    steps are run one at a time, so that only those fail that must.
    """
    began = time.perf_counter_ns()
    worker.reap()
    outcomes: dict[int, dict[str, Any] | BaseException] = {}
    prepared: dict[int, _Prepared] = {}
    for i, wanted in enumerate(batch):
        try:
            prepared[i] = _prepare(worker, wanted)
        except Exception as error:
            outcomes[i] = error
    while prepared:
        members = list(prepared.values())
        try:
            replies = _run(worker, members, began)
        except NonFiniteError as error:
            i = list(prepared)[error.member]
            outcomes[i] = error.refusal
            _undo(worker, prepared.pop(i))
            continue
        except BaseException as error:
            for member in members:
                _undo(worker, member)
            if len(members) == 1:
                outcomes[next(iter(prepared))] = error
            else:
                for i in prepared:
                    (outcomes[i],) = steps(worker, [batch[i]])
            break
        outcomes.update(zip(prepared, replies, strict=True))
        break
    return [outcomes[i] for i in range(len(batch))]


def _prepare(worker: Worker, wanted: Wanted) -> _Prepared:
    """Check a step against the state and reserve what it needs. Raises ServiceError; then nothing is held."""
    step = wanted.step
    known = [worker.requests.get((wanted.tenant, request.id)) for request in step.requests]
    caches = [worker.caches.by_name[name] for name in step.tensors]
    _check_starts(step, known, caches)
    active = np.flatnonzero(np.diff(step.query_start_loc))
    requests = _find_slots(worker, wanted, known, active)
    slots = np.array([request.slot if request else -1 for request in requests], np.int64)
    prepared = _Prepared(wanted, known, requests, slots, active, Reservation())
    try:
        _reserve_pages(worker, wanted, slots[active], caches, active, prepared.held)
    except BaseException:
        _undo(worker, prepared)
        raise
    return prepared


def _undo(worker: Worker, prepared: _Prepared) -> None:
    prepared.held.give_back()
    for request, old in zip(prepared.requests, prepared.known, strict=True):
        if request and not old:
            worker.give_slot(request.slot, prepared.wanted.tenant)


def _run(worker: Worker, members: list[_Prepared], began: int) -> list[dict[str, Any]]:
    """Plan and run the members as one batch, and commit. Raises NonFiniteError, ServiceError."""
    names = dict.fromkeys(name for member in members for name in member.step.tensors)
    work = [_work(worker.caches.by_name[name], members) for name in names]
    planned = time.perf_counter_ns()
    ran = worker.runner.run(work)
    for item in work:
        item.plan.commit(item.cache.state)
    timings = {"plan": (planned - began) // 1000, "copy": ran.copy_us, "kernel": ran.kernel_us}
    _count(worker, members, work, ran)
    return [_committed(worker, member, ran.launches, timings) for member in members]


def _work(cache: CompressorCache, members: list[_Prepared]) -> Work:
    """The part of a batch that is one compressor's."""
    carrying = [(i, member) for i, member in enumerate(members) if cache.name in member.step.tensors]
    slots = np.concatenate([member.slots[member.active] for _, member in carrying])
    lengths = np.concatenate([np.diff(member.step.query_start_loc)[member.active] for _, member in carrying])
    drafts = np.concatenate([member.step.draft_tokens[member.active] for _, member in carrying])
    loc = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=loc[1:])
    plan = p.make_plan(
        cache.compressor.geometry,
        cache.state,
        slots,
        loc,
        cache.page_table,
        cache.page_entries,
        drafts if drafts.any() else None,
    )
    parts = tuple(Part(i, member.step.tensors[cache.name], member.step.num_tokens) for i, member in carrying)
    return Work(cache, parts, plan)


def _committed(worker: Worker, member: _Prepared, launches: int, timings: dict[str, int]) -> dict[str, Any]:
    """Make a step's requests known, and say what came of it."""
    step, tenant, active = member.step, member.wanted.tenant, member.active
    caches = [worker.caches.by_name[name] for name in step.tensors]
    for cache in caches:
        cache.drafts[member.slots[active]] = step.draft_tokens[active]
    carried_with = dict.fromkeys(step.tensors, tuple(step.tensors))
    for named, old, request in zip(step.requests, member.known, member.requests, strict=True):
        if request is None:
            continue
        if named.num_tokens:
            request.carried_with.update(carried_with)
        if old is None:
            worker.add((tenant, named.id), request)
        else:
            worker.renew(request)
    return {
        "version": wire.PROTOCOL_VERSION,
        "step_id": step.step_id,
        "epoch": worker.epoch.hex(),
        "compat": worker.compat,
        "launches": launches,
        "skipped": [cache.name for cache in caches if not _closes(step, cache)],
        "requests": _parts(worker, step, tenant, member.slots, caches),
        "timings_us": dict(timings),
    }


def _closes(step: Step, cache: CompressorCache) -> bool:
    """Whether the step closes a window of this compressor."""
    starts = np.array([request.start for request in step.requests], np.int64)
    return bool(p.has_boundary(starts, step.query_start_loc, cache.compressor.geometry.ratio))


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


def _find_slots(worker: Worker, wanted: Wanted, known: list[Request | None], active: I64) -> list[Request | None]:
    """The requests, new ones with a slot; None: unknown and without tokens, so that it stays unknown."""
    new = [int(i) for i in active if known[i] is None]
    quotas.expect_requests(worker, wanted.tenant, len(new))
    if len(new) > len(worker.free_slots):
        raise exhausted("requests", len(new), len(worker.free_slots))
    requests = list(known)
    for i in new:
        requests[i] = worker.take_slot(wanted.tenant)
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
    worker: Worker, wanted: Wanted, slots: I64, caches: list[CompressorCache], active: I64, held: Reservation
) -> None:
    """Take the pages that the step's entries need: first counted in all pools, then taken."""
    starts = np.array([wanted.step.requests[i].start for i in active], np.int64)
    ends = starts + np.diff(wanted.step.query_start_loc)[active]
    needs = [cache.pages_for(ends // cache.compressor.geometry.ratio) - cache.num_pages[slots] for cache in caches]
    counts: dict[int, int] = {}
    for cache, need in zip(caches, needs, strict=True):
        counts[cache.group.index] = counts.get(cache.group.index, 0) + int(need.sum())
    quotas.expect_pages(worker, wanted.tenant, sum(counts.values()))
    for index, count in counts.items():
        group = worker.caches.groups[index]
        if count > group.pool.num_free:
            raise exhausted(group.label, count, group.pool.num_free)
    for cache, need in zip(caches, needs, strict=True):
        for i in np.flatnonzero(need):
            held.take(cache, int(slots[i]), int(need[i]))


def _count(worker: Worker, members: list[_Prepared], work: list[Work], ran: Ran) -> None:
    worker.totals["steps"] += len(members)
    worker.totals["batches"] += 1
    worker.totals["tokens"] += sum(member.step.num_tokens for member in members)
    worker.totals["entries"] += sum(item.plan.num_windows for item in work)
    worker.totals["launches"] += ran.launches
    worker.totals["skipped"] += sum(not item.plan.boundary for item in work)
    for item, launches in zip(work, ran.launches_of, strict=True):
        kind = item.cache.part.kind
        worker.by_kind["launches", kind] += launches
        worker.by_kind["skipped", kind] += not item.plan.boundary


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
