"""Sends steps when they are due (open loop), or when there is an answer (closed loop), and keeps what came of them.

    traffic = Traffic()
    await traffic.open_loop(poisson(rate=50, seconds=10, seed=0), send)
    summarise(traffic.samples, 0, 10, slo_ms=50)

`send(sample)` sends one step: `sample.begin()` when it goes out, `sample.end(outcome)` when the answer is there.

In the open loop nothing that the worker does changes when the next step is due. If it stalls, the steps that fall due
meanwhile are late, and each one's latency counts from its own due time. A closed loop sends less to a worker that
stalls, so that its percentiles leave out what callers would have waited.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import selectors
import time
from collections.abc import Awaitable, Callable, Iterable

from .sample import OK, UNFINISHED, Sample

Send = Callable[[Sample], Awaitable[None]]

_LONGEST_SLEEP_S = 0.05
"""How soon a stop is noticed."""
_PAUSE_S = 0.05


class Traffic:
    """The samples of one stretch of traffic: of one loop, whose beginning is 0 on the clock of all times."""

    def __init__(self, stop: asyncio.Event | None = None, on_end: Callable[[Sample], None] | None = None) -> None:
        self.samples: list[Sample] = []
        self.num_in_flight = 0
        self.sent_until_s = 0.0
        """When the last step had become due, or a stop came; after that there were only answers to wait for."""
        self.woke_late_s: list[float] = []
        """For each arrival how late this process noticed it: what the sender itself adds to latencies."""
        self._stop = stop or asyncio.Event()
        self._on_end = on_end
        self._time, self._began = time.monotonic, time.monotonic()

    def now(self) -> float:
        """Seconds since the traffic began."""
        return self._time() - self._began

    def due(self, scheduled_s: float | None = None, op: str = "step") -> Sample:
        """A step that is due at this time, or now."""
        sample = Sample(self, len(self.samples), self.now() if scheduled_s is None else scheduled_s, op)
        self.samples.append(sample)
        return sample

    def on_end(self, sample: Sample) -> None:
        if self._on_end is not None:
            self._on_end(sample)

    async def open_loop(
        self, arrivals: Iterable[float], send: Send, *, max_in_flight: int = 256, drain_s: float = 10.0
    ) -> None:
        """A step at each of these times. More than `max_in_flight` wait here, and their latency counts all the same.

        Steps without an answer `drain_s` behind the last arrival are given up: unfinished.
        """
        gate = asyncio.Semaphore(max_in_flight)
        self._begin()
        async with asyncio.TaskGroup() as group:
            tasks: set[asyncio.Task[None]] = set()
            for at in arrivals:
                if not await self.reached(at):
                    break
                self.woke_late_s.append(self.now() - at)
                task = group.create_task(self._one(send, self.due(at), gate))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            await self._drain(tasks, drain_s)

    async def closed_loop(
        self, concurrency: int, seconds: float, send: Send, *, max_steps: float = math.inf, drain_s: float = 10.0
    ) -> None:
        """So many lanes, each sending its next step when its last one was answered; 50 ms later if it was refused."""

        async def lane() -> None:
            while self.now() < seconds and not self._stop.is_set() and len(self.samples) < max_steps:
                sample = self.due()
                await self._one(send, sample, contextlib.nullcontext())
                await asyncio.sleep(0 if sample.outcome == OK else _PAUSE_S)

        self._begin()
        async with asyncio.TaskGroup() as group:
            tasks = {group.create_task(lane()) for _ in range(concurrency)}
            while self.now() < seconds and not self._stop.is_set() and not all(task.done() for task in tasks):
                await asyncio.sleep(_LONGEST_SLEEP_S)
            await self._drain(tasks, drain_s)

    def _begin(self) -> None:
        """Now is 0, on the event loop's clock."""
        self._time = asyncio.get_running_loop().time
        self._began = self._time()

    async def _one(self, send: Send, sample: Sample, gate: contextlib.AbstractAsyncContextManager[object]) -> None:
        try:
            async with gate:
                self.num_in_flight += 1
                try:
                    await send(sample)
                finally:
                    self.num_in_flight -= 1
        finally:
            if math.isnan(sample.done_s):
                sample.end(UNFINISHED)

    async def reached(self, at: float) -> bool:
        """Waits for a time; False if there is a stop before."""
        while (left := at - self.now()) > 0 and not self._stop.is_set():
            await asyncio.sleep(min(left, _LONGEST_SLEEP_S))
        await asyncio.sleep(0)
        return not self._stop.is_set()

    async def _drain(self, tasks: set[asyncio.Task[None]], drain_s: float) -> None:
        self.sent_until_s = self.now()
        if tasks:
            _, late = await asyncio.wait(set(tasks), timeout=drain_s)
            for task in late:
                task.cancel()


def precise_loop() -> asyncio.AbstractEventLoop:
    """An event loop that wakes within tens of µs: select takes them, while epoll rounds its timeouts up to 1 ms, and
    every latency would carry that. It watches up to 1024 descriptors, which bounds the steps in flight."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())
