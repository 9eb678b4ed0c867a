"""Steps: prepare → plan → run → commit.

Until the commit nothing that a reader can see has changed; a failure gives back what was reserved.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvfold_service import works
from kvfold_service.committed import commit
from kvfold_service.reserve import Prepared, Wanted, prepare
from kvfold_service.runner import NonFiniteError, Ran, Work
from kvfold_service.step import Step

if TYPE_CHECKING:
    from kvfold_service.worker import Worker


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
    prepared: dict[int, Prepared] = {}
    for i, wanted in enumerate(batch):
        try:
            prepared[i] = prepare(worker, wanted)
        except Exception as error:
            outcomes[i] = error
    while prepared:
        members = list(prepared.values())
        try:
            replies = _run(worker, members, began)
        except NonFiniteError as error:
            i = list(prepared)[error.member]
            outcomes[i] = error.refusal
            prepared.pop(i).undo(worker)
            continue
        except BaseException as error:
            for member in members:
                member.undo(worker)
            if len(members) == 1:
                outcomes[next(iter(prepared))] = error
            else:
                for i in prepared:
                    (outcomes[i],) = steps(worker, [batch[i]])
            break
        outcomes.update(zip(prepared, replies, strict=True))
        break
    return [outcomes[i] for i in range(len(batch))]


def _run(worker: Worker, members: list[Prepared], began: int) -> list[dict[str, Any]]:
    """Plan and run the members as one batch, and commit. Raises NonFiniteError, ServiceError."""
    work = works.works(worker.caches, members)
    planned = time.perf_counter_ns()
    ran = worker.runner.run(work)
    works.commit(worker.caches, work)
    timings = {"plan": (planned - began) // 1000, "copy": ran.copy_us, "kernel": ran.kernel_us}
    _count(worker, members, work, ran)
    return [commit(worker, member, ran, timings) for member in members]


def _count(worker: Worker, members: list[Prepared], work: list[Work], ran: Ran) -> None:
    worker.totals["steps"] += len(members)
    worker.totals["batches"] += 1
    worker.totals["tokens"] += sum(member.step.num_tokens for member in members)
    worker.totals["entries"] += sum(item.plan.num_windows for item in work)
    worker.totals["launches"] += ran.launches
    for item, launches in zip(work, ran.launches_of, strict=True):
        kind, skipped = item.cache.part.kind, ran.graph_mode == "none" and not item.plan.boundary
        worker.by_kind["launches", kind] += launches
        worker.by_kind["skipped", kind] += skipped
        worker.totals["skipped"] += skipped
