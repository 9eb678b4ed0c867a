"""What a step needs before it may run: its requests, their ring slots, pages. All of it or nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvfold_kernels import plan as p
from kvfold_service import quotas
from kvfold_service.caches import CompressorCache, Reservation
from kvfold_service.errors import ServiceError
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
class Prepared:
    """A step with its slots and pages reserved.

    known, requests  its requests before and after; None: unknown, and without tokens so that it stays so
    slots            int64 `[num_requests]` ring slots, −1 for those
    active           int64, requests that have tokens
    caches, numbers  the compressors that it carries, in the order of its tensors, and their int64 numbers
    """

    wanted: Wanted
    known: list[Request | None]
    requests: list[Request | None]
    slots: I64
    active: I64
    caches: list[CompressorCache]
    numbers: I64
    held: Reservation

    @property
    def step(self) -> Step:
        return self.wanted.step

    def undo(self, worker: Worker) -> None:
        self.held.give_back()
        for request, old in zip(self.requests, self.known, strict=True):
            if request and not old:
                worker.give_slot(request.slot, self.wanted.tenant)


def prepare(worker: Worker, wanted: Wanted) -> Prepared:
    """Check a step against the state and reserve what it needs. Raises ServiceError; then nothing is held."""
    step = wanted.step
    known = [worker.requests.get((wanted.tenant, request.id)) for request in step.requests]
    caches = [worker.caches.by_name[name] for name in step.tensors]
    numbers = np.array([cache.index for cache in caches], np.int64)
    _check_starts(worker, step, known, caches, numbers)
    active = np.flatnonzero(np.diff(step.query_start_loc))
    requests = _find_slots(worker, wanted, known, active)
    slots = np.array([request.slot if request else -1 for request in requests], np.int64)
    prepared = Prepared(wanted, known, requests, slots, active, caches, numbers, Reservation())
    try:
        _reserve_pages(worker, prepared)
    except BaseException:
        prepared.undo(worker)
        raise
    return prepared


def _check_starts(
    worker: Worker, step: Step, known: list[Request | None], caches: list[CompressorCache], numbers: I64
) -> None:
    """Raises position_conflict, position_gap: of the first request, and of its compressors the first."""
    slots = np.array([request.slot if request else -1 for request in known], np.int64)
    starts = np.array([request.start for request in step.requests], np.int64)
    committed = worker.caches.tables.states[numbers[:, None], p.COMMITTED, slots]
    expected = np.where(slots < 0, 0, committed)
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


def _reserve_pages(worker: Worker, prepared: Prepared) -> None:
    """Take the pages that the step's entries need: first counted in all pools, then taken."""
    step, active, numbers = prepared.step, prepared.active, prepared.numbers
    tables, slots = worker.caches.tables, prepared.slots[active]
    starts = np.array([request.start for request in step.requests], np.int64)[active]
    ends = starts + np.diff(step.query_start_loc)[active]
    num_entries = ends // tables.ratios[numbers, None]
    needs = -(-num_entries // tables.page_entries[numbers, None]) - tables.num_pages[numbers[:, None], slots]
    quotas.expect_pages(worker, prepared.wanted.tenant, int(needs.sum()))
    counts: dict[int, int] = {}
    for group, count in zip(tables.groups[numbers].tolist(), needs.sum(axis=1).tolist(), strict=True):
        counts[group] = counts.get(group, 0) + count
    for index, count in counts.items():
        group = worker.caches.groups[index]
        if count > group.pool.num_free:
            raise exhausted(group.label, count, group.pool.num_free)
    for j, i in np.argwhere(needs).tolist():
        prepared.held.take(prepared.caches[j], int(slots[i]), int(needs[j, i]))
