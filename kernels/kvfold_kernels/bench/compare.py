"""What differs between two results, and what is noise.

A ratio's bounds come from both medians' intervals. Two runs on one machine are further apart than two rounds of one
run, so they are widened by as much as the copy rate of their device differs between the two results.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvfold_kernels.bench.result import BenchResult, interval, rate
from kvfold_kernels.bench.tables import DEVICE, number, table


@dataclass(frozen=True, slots=True)
class Difference:
    case: str
    what: str
    """Backend and dtype, or plan."""
    before_us: float
    after_us: float
    ratio: float
    """after / before: above 1 is slower."""
    least: float
    most: float

    @property
    def verdict(self) -> str:
        if self.least > 1:
            return "slower"
        return "faster" if self.most < 1 else "same"


def differences(before: BenchResult, after: BenchResult) -> Iterator[Difference]:
    """Of all that is in both."""
    for row in after.rows:
        old = before.row(row.case, row.dtype)
        for name in row.us.keys() & (old.us.keys() if old else set()):
            assert old is not None, "it has no backend otherwise"
            drift = _drift(before, after, DEVICE.get(name, "cpu"))
            yield _difference(row.case, f"{name} {row.dtype}", old.us[name], row.us[name], drift)
    for case in after.plans.keys() & before.plans.keys():
        drift = _drift(before, after, "cpu")
        yield _difference(case, "plan", before.plans[case]["plan"], after.plans[case]["plan"], drift)


def comparison(before: BenchResult, after: BenchResult) -> tuple[str, bool]:
    """A table with what changed first, and whether anything is slower."""
    found = sorted(differences(before, after), key=lambda d: (d.verdict == "same", -d.ratio, d.case, d.what))
    head = ("case", "what", "before µs", "after µs", "after / before", "bounds", "")
    rows = [_cells(d) for d in found]
    counts = {verdict: sum(d.verdict == verdict for d in found) for verdict in ("slower", "same", "faster")}
    told = ", ".join(f"{num} {verdict}" for verdict, num in counts.items())
    return "\n\n".join([table(head, rows), *_warnings(before, after), told]) + "\n", counts["slower"] > 0


def _cells(d: Difference) -> tuple[str, ...]:
    bounds = f"{d.least:.2f}–{d.most:.2f}"
    return d.case, d.what, number(d.before_us), number(d.after_us), f"{d.ratio:.2f}", bounds, d.verdict


def _difference(case: str, what: str, before: Sequence[float], after: Sequence[float], drift: float) -> Difference:
    old, new = interval(before), interval(after)
    medians = statistics.median(before), statistics.median(after)
    least, most = new[0] / old[1] / drift, new[1] / old[0] * drift
    return Difference(case, what, *medians, medians[1] / medians[0], least, most)


def _drift(before: BenchResult, after: BenchResult, device: str) -> float:
    """By how much the faster of the two runs copies faster: at least 1."""
    rates = rate(before, device), rate(after, device)
    return max(rates[0] / rates[1], rates[1] / rates[0]) if rates[0] and rates[1] else 1.0


def _warnings(before: BenchResult, after: BenchResult) -> Iterator[str]:
    for name in ("cpu", "gpu", "cores", "python"):
        ours, theirs = (result.environment.get(name) for result in (before, after))
        if ours != theirs:
            yield f"not the same {name}: {ours} and {theirs}"
    for name, version in after.environment["versions"].items():
        if before.environment["versions"].get(name, version) != version:
            yield f"not the same {name}: {before.environment['versions'][name]} and {version}"
    for device in after.copy_bytes_per_s:
        drift = _drift(before, after, device)
        if drift > 1.1:
            yield f"this machine's {device} ran at another speed: its copy rates differ by a factor of {drift:.2f}"
