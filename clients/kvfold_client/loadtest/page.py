"""report.html: one file with everything in it, no link to anywhere."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from .report import POINT_HEAD, phase_names, phase_rows, point_row, remarks
from .result import Result

TITLES = {
    "latency_over_time": "Latency over time",
    "latency_by_rate": "Latency and throughput against rate",
    "latency_by_percentile": "Latency by percentile",
    "where_the_time_goes": "Where the time goes",
}
_EXPLAINED = {
    "latency_over_time": "Every step at the time at which it was due. Latency counts from there, sent or not.",
    "latency_by_rate": "Where the lines bend is what the worker can do.",
    "latency_by_percentile": "The distribution as a whole; a step in it is a stall.",
    "where_the_time_goes": "wait: due, but not sent yet. recv to reply: what the worker says of itself. rest: HTTP, "
    "the network, and the Python of both sides.",
}

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$title</title><style>
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1080px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1.1em; margin-top: 2em }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums }
th, td { padding: .25em .7em; text-align: right; border-bottom: 1px solid #e4e4e4; white-space: nowrap }
th:first-child, td:first-child { text-align: left }
.wide { overflow-x: auto } svg { width: 100%; height: auto } p.small, dl { color: #666; font-size: 13px }
li { margin: .2em 0 } dt { float: left; clear: left; width: 9em } dd { margin-left: 9em; overflow-wrap: anywhere }
</style></head><body>
<h1>$title</h1>
<div class="wide">$points</div>
$remarks
$plots
<h2>The parts, mean ms of a step</h2>
<div class="wide">$phases</div>
<h2>How it was run</h2>
<dl>$facts</dl>
</body></html>
""")


def write_page(path: Path, result: Result, summary: Mapping[str, Any], plots: Mapping[str, Figure]) -> None:
    told = remarks(result)
    page = _PAGE.substitute(
        title=html.escape(f"{result.run}: {summary['options']['profile']}"),
        points=_table(POINT_HEAD, [point_row(point) for point in result.points]),
        remarks="<ul>" + "".join(f"<li>{html.escape(remark)}</li>" for remark in told) + "</ul>" if told else "",
        plots="".join(_section(name, figure) for name, figure in plots.items()),
        phases=_table(("point", *phase_names(result.points)), phase_rows(result.points)),
        facts="".join(
            f"<dt>{html.escape(name)}</dt><dd>{html.escape(str(value))}</dd>" for name, value in _facts(summary)
        ),
    )
    path.write_text(page, encoding="utf-8")


def _section(name: str, figure: Figure) -> str:
    return f'<h2>{TITLES[name]}</h2><p class="small">{_EXPLAINED[name]}</p>{_svg(figure, name)}'


def _svg(figure: Figure, name: str) -> str:
    """Inline; text stays text, and marks are named by the plot, so that two in one page do not clash."""
    file = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", dpi=150, metadata={"Date": None})
    return file.getvalue().partition("<svg")[1] + file.getvalue().partition("<svg")[2]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["".join(f"<th>{html.escape(cell)}</th>" for cell in head)]
    lines += ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, Any]]:
    workers = [f"{w['url']}: {w['model']}, {w['backend'] or 'backend not told'}" for w in summary["workers"]]
    given = {name: value for name, value in summary["options"].items() if value not in (None, [], False)}
    return [
        ("date", summary["environment"]["date"]),
        ("workers", "; ".join(workers)),
        ("sender", ", ".join(f"{name} {value}" for name, value in summary["environment"].items() if name != "date")),
        ("options", ", ".join(f"{name} {value}" for name, value in given.items())),
    ]
