"""The engine thread: the only one that touches the worker's state. Calls run one at a time, as they arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from kvfold_service.step import Step
from kvfold_service.worker import Message, Worker

P = ParamSpec("P")
R = TypeVar("R")


class Engine:
    """A worker on its own thread; `depth` calls wait or run."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.depth = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvfold-engine")

    def submit(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[tuple[R, int]]:
        """Run a method of the worker; the future gives its result and the µs that it waited. Event loop only.

        The call runs even if nobody waits for it any more: what it reads must live until the future is done.
        """
        arrived = time.perf_counter_ns()

        def timed() -> tuple[R, int]:
            waited_us = (time.perf_counter_ns() - arrived) // 1000
            return call(*args, **kwargs), waited_us

        loop = asyncio.get_running_loop()
        self.depth += 1
        future = self._thread.submit(timed)
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._done))
        return future

    def _done(self) -> None:
        self.depth -= 1

    async def step(self, step: Step, tenant: str) -> tuple[Message, int]:
        """The reply of a step, and the µs that it waited. No lease of its requests ends meanwhile."""
        named = [(tenant, request.id) for request in step.requests]
        self.worker.queued.update(named)
        try:
            return await asyncio.wrap_future(self.submit(self.worker.step, step, tenant))
        finally:
            self.worker.queued.subtract(named)
            for key in named:
                if not self.worker.queued[key]:
                    del self.worker.queued[key]

    async def call(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """`submit`, and wait for the result; also when cancelled, since the call may still read its arguments."""
        future = asyncio.wrap_future(self.submit(call, *args, **kwargs))
        try:
            result, _ = await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise
        return result

    def stop(self) -> None:
        """Finish what was submitted."""
        self._thread.shutdown(wait=True)
