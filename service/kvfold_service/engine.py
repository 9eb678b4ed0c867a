"""The engine thread: the only one that touches the worker's state.

Calls of one tenant run in the order in which they arrive; tenants take turns. Steps that wait at the head of the queues
are run as one batch as far as they name different requests (see `execute.can_join`).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from kvfold_service import execute
from kvfold_service.reserve import Wanted
from kvfold_service.step import Step
from kvfold_service.worker import Message, Worker

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class _Job:
    """A call that waits: `call`, or a step. Its future is told the outcome and the µs that it waited."""

    call: Callable[[], Any] | None
    step: Wanted | None
    future: asyncio.Future[tuple[Any, int]]
    arrived_ns: int = field(default_factory=time.perf_counter_ns)


class Engine:
    """A worker on its own thread; `depth` calls wait or run."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.depth = 0
        self._queues: OrderedDict[str, deque[_Job]] = OrderedDict()
        self._changed = threading.Condition()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvfold-engine", daemon=True)
        self._thread.start()

    async def step(self, step: Step, tenant: str) -> tuple[Message, int]:
        """The reply of a step, and the µs that it waited. No lease of its requests ends meanwhile.

        Not to be cancelled: the step runs all the same, and its rows must live until then.
        """
        named = [key for request in step.requests if self.worker.can_keep(key := (tenant, request.id))]
        self.worker.queued.update(named)
        try:
            return await self._submit(tenant, None, Wanted(step, tenant))
        finally:
            queued = self.worker.queued
            for key in named:
                if queued[key] > 1:
                    queued[key] -= 1
                else:
                    del queued[key]

    async def call(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a method of the worker that is no tenant's."""
        return await self.call_for("", call, *args, **kwargs)

    async def call_for(self, tenant: str, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a method of the worker in a tenant's turn, behind what that tenant has sent before.

        If cancelled, waits for it first, since it may still read its arguments.
        """
        future = self._submit(tenant, lambda: call(*args, **kwargs), None)
        try:
            result, _ = await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise
        return result

    def stop(self) -> None:
        """Finish what was submitted."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join()

    def _submit(
        self, tenant: str, call: Callable[[], Any] | None, step: Wanted | None
    ) -> asyncio.Future[tuple[Any, int]]:
        job = _Job(call, step, asyncio.get_running_loop().create_future())
        self.depth += 1
        with self._changed:
            assert not self._stopping
            self._queues.setdefault(tenant, deque()).append(job)
            self._changed.notify()
        return job.future

    def _run(self) -> None:
        while jobs := self._take():
            begun = time.perf_counter_ns()
            if jobs[0].call is not None:
                outcomes = [_outcome(jobs[0].call)]
            else:
                wanted = [job.step for job in jobs if job.step is not None]
                outcomes = _outcome(lambda wanted=wanted: execute.steps(self.worker, wanted))
                if isinstance(outcomes, BaseException):
                    outcomes = [outcomes] * len(jobs)
            self._tell(jobs, begun, outcomes)

    def _tell(self, jobs: list[_Job], begun_ns: int, outcomes: list[Any]) -> None:
        """Wake the event loop, once for all of them."""
        loop = jobs[0].future.get_loop()
        try:
            loop.call_soon_threadsafe(self._settle, jobs, begun_ns, outcomes)
        except RuntimeError:
            if not loop.is_closed():  # else nobody waits any more
                raise

    def _settle(self, jobs: list[_Job], begun_ns: int, outcomes: list[Any]) -> None:
        self.depth -= len(jobs)
        for job, outcome in zip(jobs, outcomes, strict=True):
            if job.future.cancelled():
                continue
            if isinstance(outcome, BaseException):
                job.future.set_exception(outcome)
            else:
                job.future.set_result((outcome, (begun_ns - job.arrived_ns) // 1000))

    def _take(self) -> list[_Job]:
        """The next call, or the next steps that can run as one batch; empty when it is time to stop."""
        with self._changed:
            while not self._queues:
                if self._stopping:
                    return []
                self._changed.wait()
            tenant, queue = self._queues.popitem(last=False)
            jobs = [queue.popleft()]
            if queue:
                self._queues[tenant] = queue  # behind the other tenants
            if jobs[0].step is not None:
                for tenant in list(self._queues):
                    self._join(tenant, jobs)
            return jobs

    def _join(self, tenant: str, jobs: list[_Job]) -> None:
        """Move steps from the head of a tenant's queue to the batch, until one has to wait."""
        queue = self._queues[tenant]
        batch = [job.step for job in jobs if job.step is not None]
        while queue and (step := queue[0].step) and execute.can_join(self.worker, batch, step):
            jobs.append(queue.popleft())
            batch.append(step)
        if not queue:
            del self._queues[tenant]


def _outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except BaseException as error:
        return error
