"""The points of a sweep: how steps are due at each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .options import Options
from .schedule import even, poisson

CAPACITY_LANES = 8
CAPACITY_SHARES = (0.25, 0.5, 0.75, 0.9, 1.1)
_CAPACITY_SECONDS = 3.0


@dataclass(frozen=True, slots=True)
class Point:
    """Either a rate, or a number of lanes, or neither: a trace."""

    warmup_s: float
    seconds: float
    """That are measured, behind the warm-up."""
    rate: float | None = None
    concurrency: int | None = None
    spacing: str = "poisson"
    seed: int = 0

    @property
    def is_trace(self) -> bool:
        return self.rate is None and self.concurrency is None

    @property
    def name(self) -> str:
        if self.rate is not None:
            return f"{self.rate:.4g}/s"
        return "trace" if self.is_trace else f"closed {self.concurrency}"

    @property
    def end_s(self) -> float:
        return self.warmup_s + self.seconds

    def arrivals(self) -> Iterator[float]:
        """When its steps are due, warm-up included."""
        assert self.rate is not None, "only an open loop has arrivals of its own"
        if self.spacing == "even":
            return even(self.rate, self.end_s)
        return poisson(self.rate, self.end_s, self.seed)


def given_points(options: Options) -> list[Point]:
    """What the command line asks for; none: the capacity has to be found first."""
    by_rate = [_open(options, rate) for rate in options.rates]
    return by_rate + [Point(options.warmup, options.seconds, concurrency=n) for n in options.concurrencies]


def capacity_point(options: Options) -> Point:
    """A short closed loop; how many steps a second it does is called the capacity."""
    return Point(options.warmup, min(_CAPACITY_SECONDS, options.seconds), concurrency=CAPACITY_LANES)


def points_around(options: Options, capacity: float) -> list[Point]:
    """Open loops below, at and above it; none if there is no capacity."""
    if not capacity:
        return []
    return [_open(options, share * capacity) for share in CAPACITY_SHARES]


def _open(options: Options, rate: float) -> Point:
    return Point(options.warmup, options.seconds, rate=rate, spacing=options.arrivals, seed=options.seed)
