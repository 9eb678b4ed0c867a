"""The points of a load test, one after another, within its bounds."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from .options import Options
from .points import CAPACITY_LANES, Point, capacity_point, given_points, points_around
from .result import Result, Stop, Watcher
from .sample import OK, Sample
from .summary import percentiles_ms, summarise
from .traffic import Send, Traffic

_PRIMING_STEPS = 4 * CAPACITY_LANES
_PRIMING_SECONDS = 60.0


class Sweep:
    """Fills `result.points` and `result.samples`."""

    def __init__(
        self, options: Options, result: Result, watcher: Watcher, stop: Stop, settle: Callable[[], Awaitable[None]]
    ) -> None:
        """`settle` waits until what a point leaves behind is gone, so that the next one does not pay for it."""
        self._options, self._result, self._watcher, self._stop, self._settle = options, result, watcher, stop, settle
        self._steps_left = options.max_steps

    async def points(self, send: Send) -> None:
        """Those that were asked for; or, if none were, the capacity and points around it."""
        await self._prime(send)
        points = given_points(self._options)
        if not points:
            capacity = await self._point(capacity_point(self._options), send)
            points = points_around(self._options, capacity["throughput_per_s"])
        if not points:
            self._stop("no step was answered while the capacity was measured")
        for point in points:
            if self._stop.reason is not None:
                return
            await self._point(point, send)

    async def _prime(self, send: Send) -> None:
        """A few steps before any clock runs: the first ones of a worker may compile its kernels, for many seconds."""
        self._watcher.note("first steps, which may compile kernels")
        traffic = Traffic(self._stop.event)
        num_steps = min(_PRIMING_STEPS, self._steps_left // 10)
        await traffic.closed_loop(CAPACITY_LANES, _PRIMING_SECONDS, send, max_steps=num_steps, drain_s=_PRIMING_SECONDS)
        self._steps_left -= len(traffic.samples)
        await self._settle()

    async def trace(self, at_s: list[float], send: Send) -> None:
        """A request at each of these times."""
        point = Point(0.0, max(at_s[-1], 1e-3))
        await self._measure(point, lambda traffic: self._open(traffic, at_s, send))

    async def _point(self, point: Point, send: Send) -> dict[str, Any]:
        lanes, options = point.concurrency, self._options
        if lanes is None:
            return await self._measure(point, lambda traffic: self._open(traffic, point.arrivals(), send))
        return await self._measure(
            point,
            lambda traffic: traffic.closed_loop(
                lanes, point.end_s, send, max_steps=self._steps_left, drain_s=options.drain
            ),
        )

    async def _open(self, traffic: Traffic, arrivals: Iterable[float], send: Send) -> None:
        options = self._options
        within = itertools.islice(arrivals, self._steps_left)
        await traffic.open_loop(within, send, max_in_flight=options.in_flight, drain_s=options.drain)

    async def _measure(self, point: Point, drive: Callable[[Traffic], Awaitable[None]]) -> dict[str, Any]:
        def ended(sample: Sample) -> None:
            self._watcher.step(point, sample)
            if len(traffic.samples) >= self._steps_left:
                self._stop("--max-steps were sent")

        traffic = Traffic(self._stop.event, ended)
        self._watcher.began(point, traffic)
        busy = await _busy(drive(traffic))
        self._steps_left -= len(traffic.samples)
        cut = self._stop.event.is_set()
        summary = _summary(point, traffic, self._options.slo_ms, cut) | {"sender_busy": round(busy, 3)}
        self._result.points.append(summary)
        self._result.samples.append(traffic.samples)
        self._watcher.ended(point, summary)
        await self._settle()
        return summary


async def _busy(traffic: Awaitable[None]) -> float:
    """How much of one CPU this process used meanwhile."""
    gc.collect()
    gc.freeze()  # what is alive now stays so; looking through it again would stop the clock for everyone
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    try:
        await traffic
    finally:
        gc.unfreeze()
    return (time.process_time() - cpu_s) / (time.perf_counter() - wall_s)


def _summary(point: Point, traffic: Traffic, slo_ms: float, cut: bool) -> dict[str, Any]:
    """What is measured ends when the point does; if it was cut short, then; if it is a trace, with the last answer."""
    begin_s, end_s = point.warmup_s, point.end_s
    if point.is_trace:
        end_s = max((s.done_s for s in traffic.samples), default=0.0) + 1e-6
    elif cut:
        end_s = min(end_s, traffic.sent_until_s) + 1e-6
        begin_s = min(begin_s, end_s / 2)
    summary: dict[str, Any] = {"name": point.name, "rate": point.rate, "concurrency": point.concurrency}
    summary |= summarise(traffic.samples, begin_s, end_s, slo_ms)
    summary["sender_late_ms"] = percentiles_ms(traffic.woke_late_s)
    truncates = [s.call_s for s in traffic.samples if s.op == "truncate" and s.outcome == OK]
    if truncates:
        summary["truncates"] = {"num": len(truncates), "call_ms": percentiles_ms(truncates)}
    return summary
