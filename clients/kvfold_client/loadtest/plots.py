"""The plots of a run, by matplotlib (extra `load`): latency over time, by rate, by percentile, and where time goes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from .report import phase_names
from .result import Result
from .sample import OK, UNFINISHED, Sample
from .summary import PERCENTILES

_COLOURS = {"p50": "#4c9f70", "p90": "#3a7ca5", "p99": "#d17a22", "p99.9": "#b23a48"}
_OUTCOMES = {"in time": "#4c9f70", "too late": "#d17a22", "refused": "#b23a48", "unfinished": "#6b4e8f"}
_PHASES = ("#9a9a9a", "#8ecae6", "#219ebc", "#126782", "#ffb703", "#fb8500", "#8f5b34", "#d9cfc0", "#5e548e")
_GREY = "#666666"
_LEAST_MS = 0.01
_GAP_S = 0.4
"""Between two points of a sweep on the axis of time."""

Point = dict[str, Any]


def draw(result: Result, slo_ms: float) -> dict[str, Figure]:
    """File stem → figure. A plot that would be empty is left out."""
    plots = {}
    if any(s.op == "step" for samples in result.samples for s in samples):
        plots["latency_over_time"] = over_time(result, slo_ms)
    answered = [point for point in result.points if point["latency_ms"]]
    rates = [point for point in answered if point["rate"]]
    lanes = [point for point in answered if point["concurrency"]]
    if max(len(rates), len(lanes)) > 1:
        plots["latency_by_rate"] = by_rate(rates if len(rates) > 1 else lanes, slo_ms)
    if answered:
        plots["latency_by_percentile"] = by_percentile(result, slo_ms)
    timed = [point for point in result.points if point["phases_us"]]
    if timed:
        plots["where_the_time_goes"] = where_the_time_goes(timed)
    return plots


def over_time(result: Result, slo_ms: float) -> Figure:
    """Every step at its due time, the points of a sweep one behind another, each one's warm-up in grey."""
    figure, (ax,) = _axes(4.6)
    begin, seen = 0.0, {}
    for point, samples in zip(result.points, result.samples, strict=True):
        steps = [s for s in samples if s.op == "step"]
        for s in steps:
            seen.setdefault(_kind(s, slo_ms), []).append((begin + s.scheduled_s, max(s.latency_s * 1e3, _LEAST_MS)))
        end = begin + max((s.scheduled_s for s in steps), default=1.0)
        ax.axvspan(begin, min(end, begin + point["begin_s"]), color="#f1f1f1", zorder=0)
        _above(ax, (begin + end) / 2, point["name"])
        begin = end + _GAP_S
    for kind in (kind for kind in _OUTCOMES if kind in seen):
        xs, ys = zip(*seen[kind], strict=True)
        label = f"{kind} ({len(xs):,})"
        ax.scatter(xs, ys, 6, _OUTCOMES[kind], alpha=0.6, linewidths=0, label=label, rasterized=True)
    _log_ms(ax)
    _slo_line(ax, slo_ms)
    ax.set_xlim(0, max(begin - _GAP_S, 0.1))
    ax.set_xlabel("due at, s (grey: warm-up)")
    ax.set_ylabel("latency, ms")
    _legend(figure, ax, markerscale=2.5)
    return figure


def by_rate(points: Sequence[Point], slo_ms: float) -> Figure:
    """Latency and throughput against what was asked for: a rate, or a number of callers that wait."""
    figure, (left, right) = _axes(4.2, columns=2)
    opened = points[0]["rate"] is not None
    points = sorted(points, key=lambda point: point["rate"] or point["concurrency"])
    asked = [point["rate"] or point["concurrency"] for point in points]
    for name, colour in _COLOURS.items():
        left.plot(asked, [p["latency_ms"][name] for p in points], "o-", color=colour, markersize=4, label=name)
    _log_ms(left)
    _slo_line(left, slo_ms)
    left.set_ylabel("latency, ms")
    if opened:
        right.plot(asked, asked, color="#c4c4c4", linewidth=1, linestyle=":", label="asked for")
    done, good = ([p[name] for p in points] for name in ("throughput_per_s", "goodput_per_s"))
    right.plot(asked, done, "o-", color=_COLOURS["p90"], markersize=4, label="answered")
    right.plot(asked, good, "o-", color=_COLOURS["p50"], markersize=4, label=f"within {slo_ms:g} ms")
    right.set_ylabel("steps a second")
    right.set_ylim(bottom=0)
    for ax in (left, right):
        ax.set_xlabel("steps due a second" if opened else "callers, each waiting for its answer")
        ax.set_xlim(left=0)
        ax.legend(loc="upper left", fontsize=8, framealpha=0.85, edgecolor="none")
    return figure


def by_percentile(result: Result, slo_ms: float) -> Figure:
    """How slow the slowest share of the steps is: each decade to the right is ten times rarer."""
    figure, (ax,) = _axes(4.2)
    shades = _shades(len(result.points))
    for point, samples, colour in zip(result.points, result.samples, shades, strict=True):
        end = point["begin_s"] + point["seconds"]
        steps = [s for s in samples if s.op == "step" and point["begin_s"] <= s.scheduled_s < end]
        ordered = np.sort([s.latency_s * 1e3 for s in steps if s.outcome in (OK, UNFINISHED)])
        if len(ordered):
            rarity = len(ordered) / (len(ordered) - np.arange(len(ordered)))
            ax.plot(rarity, ordered, drawstyle="steps-post", color=colour, linewidth=1.5, label=point["name"])
    ax.set_xscale("log")
    _log_ms(ax)
    _slo_line(ax, slo_ms)
    marks = {1 / (1 - share): name for name, share in PERCENTILES.items()}
    ax.set_xticks(list(marks), list(marks.values()))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.minorticks_off()
    ax.set_xlim(1, 1.3 * max(marks))
    ax.set_xlabel("percentile")
    ax.set_ylabel("latency, ms")
    _legend(figure, ax)
    return figure


def where_the_time_goes(points: Sequence[Point]) -> Figure:
    """Mean parts of a step's latency: in milliseconds, and as shares."""
    figure, axes = _axes(1.6 + 0.4 * len(points), columns=2)
    names = [point["name"] for point in points]
    for ax, shares in zip(axes, (False, True), strict=True):
        left = np.zeros(len(points))
        total = np.array([sum(point["phases_us"].values()) for point in points])
        for phase, colour in zip(phase_names(points), _PHASES, strict=False):
            width = np.array([max(point["phases_us"].get(phase, 0.0), 0.0) for point in points])
            width = 100 * width / total if shares else width / 1e3
            ax.barh(names, width, left=left, color=colour, height=0.65, label=phase)
            left += width
        ax.invert_yaxis()
        ax.grid(False, axis="y")
        ax.set_xlabel("share of a step's latency, %" if shares else "mean of a step's latency, ms")
    axes[1].tick_params(labelleft=False)
    axes[1].set_xlim(0, 100)
    _legend(figure, axes[0])
    return figure


def _axes(height: float, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(10, height), layout="constrained")
    axes = [figure.add_subplot(1, columns, i + 1) for i in range(columns)]
    for ax in axes:
        ax.grid(True, which="major", color="#e4e4e4", linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _log_ms(ax: Axes) -> None:
    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _slo_line(ax: Axes, slo_ms: float) -> None:
    ax.axhline(slo_ms, color=_GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    place = {"xycoords": ("axes fraction", "data"), "xytext": (-2, 3), "textcoords": "offset points"}
    ax.annotate(f"SLO {slo_ms:g} ms", (1.0, slo_ms), ha="right", fontsize=8, color=_GREY, **place).set_path_effects(
        [withStroke(linewidth=3, foreground="white")]
    )


def _above(ax: Axes, x: float, text: str) -> None:
    place = {"xycoords": ("data", "axes fraction"), "xytext": (0, 4), "textcoords": "offset points"}
    ax.annotate(text, (x, 1.0), ha="center", fontsize=8, color=_GREY, **place)


def _legend(figure: Figure, ax: Axes, **options: Any) -> None:
    """Below, where it hides nothing."""
    handles, labels = ax.get_legend_handles_labels()
    place = {"loc": "outside lower center", "ncols": min(len(labels), 9), "frameon": False, "fontsize": 8}
    figure.legend(handles, labels, **place, **options)


def _kind(sample: Sample, slo_ms: float) -> str:
    if sample.outcome == UNFINISHED:
        return "unfinished"
    if sample.outcome != OK:
        return "refused"
    return "in time" if sample.latency_s * 1e3 <= slo_ms else "too late"


def _shades(num: int) -> list[tuple[float, float, float, float]]:
    """From calm to hot, as the points of a sweep are."""
    from matplotlib import colormaps

    return [colormaps["viridis"](0.9 * i / max(num - 1, 1)) for i in range(num)]
