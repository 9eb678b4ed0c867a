"""Batches of requests that decode together. They exist before the clock runs, and are replaced beside the traffic."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import deque
from dataclasses import dataclass

from ..errors import Busy, KvfoldError
from .held import Held
from .rows import Rows
from .workers import Worker, Workers


@dataclass(slots=True)
class Session:
    """Requests of one worker, a step's worth."""

    worker: Worker
    ids: list[str]
    committed: list[int]
    """Tokens of each."""
    most_tokens: int
    """It ends before one of them would have more."""


@dataclass(frozen=True, slots=True)
class Life:
    """How the requests of a session begin and end."""

    num_requests: int
    context_tokens: int
    """At most so many before the first decode step, of each request a random number."""
    most_tokens: int
    """That a request ever has. Sessions end at different lengths, lest all be replaced at once."""
    lease_seconds: float


class Sessions:
    """`most` sessions at most; who wants one waits until one is free."""

    def __init__(self, workers: Workers, held: Held, rows: Rows, life: Life, most: int, seed: int) -> None:
        self._workers, self._held, self._rows, self._life = workers, held, rows, life
        self._chance = random.Random(seed)
        self._free: deque[Session] = deque()
        self._waiting: deque[asyncio.Future[Session]] = deque()
        self._missing = most
        """Sessions that do not exist, and that nobody is making."""
        self._replacing: set[asyncio.Task[None]] = set()

    async def fill(self) -> None:
        """Makes as many as may be, or as the workers have room for. Raises KvfoldError if that is none."""
        while self._missing:
            self._missing -= 1
            try:
                self._offer(await self._make())
            except Busy:
                if not self._free:
                    raise
                self._missing = 0

    async def take(self) -> Session:
        """A free session, the one that has been free for longest; whoever has waited for longest gets it.

        Raises KvfoldError if one must be made and cannot.
        """
        if self._free:
            return self._free.popleft()
        if self._missing:
            self._missing -= 1
            return await self._make()
        waiter: asyncio.Future[Session] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._offer(waiter.result())
            raise

    def give_back(self, session: Session, num_tokens: int) -> None:
        """It may be taken again, unless it has no room for another step of so many tokens a request."""
        if max(session.committed) + num_tokens > session.most_tokens:
            self.discard(session)
        else:
            self._offer(session)

    def discard(self, session: Session) -> None:
        """It ended, or nobody knows where it stands: its requests are released, and another one is made."""
        self._held.release_soon(*session.ids)
        task = asyncio.ensure_future(self._replace())
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def end(self) -> None:
        """Stops replacing."""
        for task in set(self._replacing):
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)

    async def _replace(self) -> None:
        with contextlib.suppress(KvfoldError):  # whoever wants a session next tries again, and is told why not
            self._offer(await self._make())

    def _offer(self, session: Session) -> None:
        """Straight to who waits: from a pile that all may take from, late comers would take it first."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(session)
                return
        self._free.append(session)

    async def _make(self) -> Session:
        try:
            return await self._prefilled()
        except BaseException:
            self._missing += 1
            raise

    async def _prefilled(self) -> Session:
        life = self._life
        ids = [self._held.new_id() for _ in range(life.num_requests)]
        worker = self._workers.place(ids[0])
        for request_id in ids:
            self._held.hold(request_id, worker)
        lengths = [self._chance.randint(1, life.context_tokens) for _ in ids]
        requests = [(request_id, 0, length) for request_id, length in zip(ids, lengths, strict=True)]
        try:
            await worker.retrying.step(requests, self._rows.take(sum(lengths)), step_id=self._held.new_id())
            await asyncio.gather(*(worker.retrying.lease(request_id, life.lease_seconds) for request_id in ids))
        except BaseException:
            self._held.release_soon(*ids)
            raise
        most_tokens = self._chance.randint((life.context_tokens + life.most_tokens) // 2, life.most_tokens)
        return Session(worker, ids, lengths, most_tokens)
