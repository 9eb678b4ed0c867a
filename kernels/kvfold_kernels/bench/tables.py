"""A result as tables in Markdown, which a terminal shows as well as a README."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from kvfold_kernels import backends
from kvfold_kernels.bench.result import BenchResult, Row, rate

_ORDER = {name: place for place, name in enumerate(backends.NAMES)}
DEVICE = {"cute": "cuda", "triton": "cuda", "cpu": "cpu", "reference": "cpu"}


def markdown(result: BenchResult) -> str:
    """Where and when, the kernels, the plans, and what was left out."""
    parts = [_where(result)]
    if result.rows:
        parts.append(table(*_kernels(result)))
    if result.plans:
        parts.append(table(("plan", "µs", "loop over requests, µs", "times as fast"), list(_plans(result))))
    parts += [f"{name}: {reason}" for name, reason in result.left_out.items()]
    return "\n\n".join(parts) + "\n"


def number(us: float) -> str:
    """Three digits, and no more."""
    return f"{us:.0f}" if us >= 100 else f"{us:.1f}" if us >= 10 else f"{us:.2f}"


def _where(result: BenchResult) -> str:
    """When, on what, and what the columns mean."""
    told = result.environment
    versions = [f"{name} {told['versions'][name]}" for name in ("torch", "numba", "triton") if name in told["versions"]]
    machine = [told["gpu"]] if "gpu" in told else []
    machine += [f"{told['cores']} CPUs ({told['cpu']})", f"Python {told['python']}"]
    rates = [f"{device} {(rate(result, device) or 0) / 1e9:,.1f} GB/s" for device in result.copy_bytes_per_s]
    busy = [f"busy when it began: load {told['load_before']:.1f}"] if told["load_before"] > 0.5 * told["cores"] else []
    return (
        f"{', '.join([told['date'], *machine, *versions, *busy])}. µs a step, medians; floor: what must move, at the "
        f"rate of a copy in this run ({', '.join(rates)}); %: of that rate, above 100 from a cache."
    )


def _kernels(result: BenchResult) -> tuple[list[str], list[list[str]]]:
    names = sorted({name for row in result.rows for name in row.us}, key=lambda name: _ORDER.get(name, len(_ORDER)))
    devices = [device for device in ("cuda", "cpu") if device in result.copy_bytes_per_s]
    floors = [f"floor {device}" if len(devices) > 1 else "floor" for device in devices]
    columns = [cell for name in names for cell in (f"`{name}`", "%")]
    head = ["case", "dtype", "windows", "KiB", *floors, *columns]
    return head, [_row(result, row, names, devices) for row in result.rows]


def _row(result: BenchResult, row: Row, names: Sequence[str], devices: Sequence[str]) -> list[str]:
    floor_us = {device: row.min_bytes / (rate(result, device) or 1.0) * 1e6 for device in devices}
    cells = [row.case, row.dtype, str(row.num_windows), f"{row.min_bytes / 1024:,.0f}"]
    cells += [number(floor_us[device]) for device in devices]
    for name in names:
        if name not in row.us:
            cells += ["–", "–"]
            continue
        median = statistics.median(row.us[name])
        cells += [number(median), f"{100 * floor_us[DEVICE[name]] / median:.0f}"]
    return cells


def _plans(result: BenchResult) -> Iterator[list[str]]:
    for case, times in result.plans.items():
        plan = statistics.median(times["plan"])
        loop = statistics.median(times["loop"]) if "loop" in times else None
        yield [case, number(plan), *(("–", "–") if loop is None else (number(loop), number(loop / plan)))]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Padded, so that it can be read as text; numbers to the right."""
    widths = [max(3, *(len(row[i]) for row in (head, *rows))) for i in range(len(head))]
    lines = [[cell.ljust(width) for cell, width in zip(head, widths, strict=True)]]
    lines.append(["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    for first, *others in rows:
        numbers = (cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True))
        lines.append([first.ljust(widths[0]), *numbers])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
