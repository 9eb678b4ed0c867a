"""Whether a worker's memory is flat."""

from __future__ import annotations

import statistics

WARM_S = 60.0
"""Of a worker's life, before its memory is looked at."""
MOST_GROWTH_MIB = 8.0
"""Between the second quarter of its last life and the last."""


def growth_mib(series: list[tuple[float, float]]) -> float | None:
    """Median of the last quarter of a life, once warm, less that of the second; None: it was too short."""
    warm = [mib for second, mib in series if second > WARM_S]
    quarter = len(warm) // 4
    if quarter < 3:
        return None
    return round(statistics.median(warm[-quarter:]) - statistics.median(warm[quarter : 2 * quarter]), 1)
