"""The requests that a run has made. None outlives it."""

from __future__ import annotations

import asyncio
import itertools
import uuid

from ..errors import KvfoldError
from .workers import Worker

_AT_ONCE = 16


def new_run() -> str:
    """Begins the ids of one run, and of no other."""
    return f"loadtest-{uuid.uuid4().hex[:12]}"


class Held:
    """Names requests, and remembers on which worker each one may be."""

    def __init__(self) -> None:
        self.run = new_run()
        """Begins every id of this run, and of no other."""
        self.failed: dict[str, str] = {}
        """Requests that could not be released, and why; their leases end by themselves."""
        self._numbers = itertools.count()
        self._workers: dict[str, Worker] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._gate = asyncio.Semaphore(_AT_ONCE)

    def new_id(self) -> str:
        return f"{self.run}-{next(self._numbers)}"

    def hold(self, request_id: str, worker: Worker) -> None:
        """To be called before the request is first sent."""
        self._workers[request_id] = worker

    def __len__(self) -> int:
        return len(self._workers)

    def release_soon(self, *request_ids: str) -> None:
        """Beside the traffic, which does not wait for it."""
        for request_id in request_ids:
            task = asyncio.ensure_future(self._release(request_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def settle(self) -> None:
        """Until nothing is being released any more."""
        while self._tasks:
            await asyncio.gather(*self._tasks)

    async def release_all(self) -> None:
        await self.settle()
        self.release_soon(*self._workers)
        await self.settle()

    async def _release(self, request_id: str) -> None:
        async with self._gate:
            try:
                await self._workers[request_id].retrying.release(request_id)
            except KvfoldError as error:
                self.failed[request_id] = str(error)
        del self._workers[request_id]
