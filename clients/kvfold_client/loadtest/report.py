"""What the terminal shows at the end: tables, and what to make of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .options import Options
from .result import Result
from .sample import OK, UNFINISHED
from .summary import PERCENTILES

POINT_HEAD = ("point", "due/s", "done/s", "tokens/s", "p50 ms", "p90", "p99", "p99.9", "good/s", "in SLO", "refused")
_BUSY = 0.8
"""Share of one CPU."""
_LATE_MS = 5.0


def text_report(result: Result, options: Options) -> str:
    """Latencies count from the time at which a step was due."""
    parts = [
        f"\n{result.run}: profile {options.profile if options.trace is None else 'trace'}, SLO {options.slo_ms:g} ms",
        table(POINT_HEAD, [point_row(point) for point in result.points]),
    ]
    phases = phase_rows(result.points)
    if phases:
        parts += ["where the time goes, mean ms of a step", table(("point", *phase_names(result.points)), phases)]
    return "\n\n".join([*parts, *("note: " + remark for remark in remarks(result))])


def point_row(point: dict[str, Any]) -> list[str]:
    latency, share = point["latency_ms"], point["within_slo"]
    return [
        point["name"],
        f"{point['offered_per_s']:.1f}",
        f"{point['throughput_per_s']:.1f}",
        f"{point['tokens_per_s']:,.0f}",
        *(_percentile(latency, name, _counted(point)) for name in PERCENTILES),
        f"{point['goodput_per_s']:.1f}",
        "–" if share is None else f"{share:.1%}",
        _refused(point["outcomes"]) or "none",
    ]


def live_line(cells: Sequence[str]) -> str:
    """A row of a table whose later rows are not known yet."""
    first, *others = cells
    return "".join([first.ljust(10), *(cell.rjust(10) for cell in others)])


def phase_names(points: Sequence[dict[str, Any]]) -> list[str]:
    """Of all points, in the order in which they happen."""
    return list(dict.fromkeys(name for point in points for name in point["phases_us"]))


def phase_rows(points: Sequence[dict[str, Any]]) -> list[list[str]]:
    names = phase_names(points)
    return [
        [point["name"], *(f"{point['phases_us'].get(name, 0.0) / 1e3:.2f}" for name in names)]
        for point in points
        if point["phases_us"]
    ]


def remarks(result: Result) -> list[str]:
    """What a reader must know to believe the figures, or not to."""
    found = []
    if result.stopped:
        found.append(f"stopped before its end: {result.stopped}")
    if any(0 < _counted(point) < 1000 for point in result.points):
        found.append("a percentile in parentheses is the slowest step: there were too few for it")
    if any(point["concurrency"] for point in result.points):
        found.append("a closed loop sends less to a worker that stalls; believe its throughput, not its tail")
    late = [point["name"] for point in result.points if point["outcomes"].get("unfinished")]
    if late:
        found.append(f"unfinished steps count with the time they had waited: {', '.join(late)} is worse than shown")
    busy = [point["name"] for point in result.points if point["sender_busy"] > _BUSY]
    if busy:
        found.append(f"the sender itself was busy at {', '.join(busy)}: part of these latencies is its own")
    late = [point for point in result.points if point["sender_late_ms"].get("p99", 0.0) > _LATE_MS]
    if late:
        worst = max(point["sender_late_ms"]["p99"] for point in late)
        names = ", ".join(point["name"] for point in late)
        found.append(
            f"the sender got no CPU in time at {names} (p99 {worst:.1f} ms late): give it a machine of its own"
        )
    if result.num_shortened:
        found.append(f"{result.num_shortened} requests of the trace were cut to the model's positions")
    if result.not_released:
        reason = next(iter(result.not_released.values()))
        found.append(
            f"{len(result.not_released)} requests were not released ({reason}); their leases end by themselves"
        )
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; the first one to the left, the others to the right."""
    cells = [[str(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    lines = []
    for first, *others in cells:
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append("  ".join(["", first.ljust(widths[0]), *numbers]))
    return "\n".join([lines[0], "  " + "─" * (len(lines[0]) - 2), *lines[1:]])


def _counted(point: dict[str, Any]) -> int:
    """Steps that its percentiles are of."""
    return point["outcomes"].get(OK, 0) + point["outcomes"].get(UNFINISHED, 0)


def _percentile(latency: dict[str, float], name: str, num: int) -> str:
    """In parentheses if there were too few steps for this percentile to differ from the slowest."""
    if name not in latency:
        return "–"
    text = f"{latency[name]:.1f}"
    return f"({text})" if num * (100 - float(name[1:])) < 100 else text


def _refused(outcomes: dict[str, int]) -> str:
    return ", ".join(f"{name} {num}" for name, num in outcomes.items() if name != OK)
