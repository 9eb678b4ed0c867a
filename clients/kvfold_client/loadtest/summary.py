"""What a stretch of traffic amounts to: percentiles of all samples, throughput, goodput, refusals, time by part."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from .sample import OK, UNFINISHED, Sample

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}
PHASES = ("recv", "queue", "plan", "copy", "kernel", "reply")
"""Of the worker, in the order in which they happen."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least value that a share of all values does not exceed (nearest rank). Of ascending values, at least one."""
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def percentiles_ms(seconds: Iterable[float]) -> dict[str, float]:
    """p50, p90, p99, p99.9, mean and max in ms; nothing of nothing."""
    ordered = sorted(seconds)
    if not ordered:
        return {}
    found = {name: percentile(ordered, share) for name, share in PERCENTILES.items()}
    found |= {"mean": statistics.fmean(ordered), "max": ordered[-1]}
    return {name: round(value * 1e3, 3) for name, value in found.items()}


def summarise(samples: Iterable[Sample], begin_s: float, end_s: float, slo_ms: float | None = None) -> dict[str, Any]:
    """Of the steps due in [begin_s, end_s); those before are warm-up.

    latency_ms   from the scheduled time, of the steps that were answered with success or not at all (these with the
                 time until they were given up: a lower bound)
    call_ms      the same from the sending: what a client that waits for each answer would report
    throughput   steps and tokens answered with success within [begin_s, end_s), a second
    goodput      steps due there, answered with success in slo_ms, a second
    """
    every = [s for s in samples if s.op == "step"]
    steps = [s for s in every if begin_s <= s.scheduled_s < end_s]
    done = [s for s in steps if s.outcome == OK]
    counted = [s for s in steps if s.outcome in (OK, UNFINISHED)]
    seconds = end_s - begin_s
    in_time = [s for s in every if s.outcome == OK and begin_s <= s.done_s < end_s]
    result: dict[str, Any] = {
        "begin_s": begin_s,
        "seconds": seconds,
        "due": len(steps),
        "outcomes": dict(Counter(s.outcome for s in steps).most_common()),
        "offered_per_s": len(steps) / seconds,
        "throughput_per_s": len(in_time) / seconds,
        "tokens_per_s": sum(s.num_tokens for s in in_time) / seconds,
        "row_bytes_per_s": sum(s.row_bytes for s in in_time) / seconds,
        "latency_ms": percentiles_ms(s.latency_s for s in counted),
        "call_ms": percentiles_ms(s.call_s for s in done),
        "late_ms": percentiles_ms(s.sent_s - s.scheduled_s for s in done),
        "phases_us": phases_us(done),
    }
    if slo_ms is not None:
        good = [s for s in done if s.latency_s * 1e3 <= slo_ms]
        result["goodput_per_s"] = len(good) / seconds
        result["slo_ms"] = slo_ms
        result["within_slo"] = len(good) / len(steps) if steps else None
    return result


def phases_us(done: Sequence[Sample]) -> dict[str, float]:
    """Mean µs of a step's parts, which add up to its mean latency.

    wait   from the scheduled time to the sending
    …      the worker's phases
    rest   of the call: HTTP, the network, and both sides' Python
    """
    if not done:
        return {}
    parts = {"wait": statistics.fmean(s.sent_s - s.scheduled_s for s in done) * 1e6}
    named = {phase for s in done for phase in s.timings_us}
    for phase in [*PHASES, *sorted(named.difference(PHASES))]:
        if phase in named:
            parts[phase] = statistics.fmean(s.timings_us.get(phase, 0.0) for s in done)
    parts["rest"] = statistics.fmean(s.call_s * 1e6 - sum(s.timings_us.values()) for s in done)
    return {name: round(value, 1) for name, value in parts.items()}
