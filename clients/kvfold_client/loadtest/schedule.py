"""When steps are due, in seconds from the beginning. No clock here."""

from __future__ import annotations

import random
from collections.abc import Iterator


def poisson(rate: float, seconds: float, seed: int = 0) -> Iterator[float]:
    """Arrivals of a Poisson process: independent gaps, exponential with mean 1 / rate. The same for the same seed."""
    gaps, at = random.Random(seed), 0.0
    while (at := at + gaps.expovariate(rate)) < seconds:
        yield at


def even(rate: float, seconds: float) -> Iterator[float]:
    """Arrivals 1 / rate apart."""
    step = 0
    while (at := step / rate) < seconds:
        yield at
        step += 1
