"""The files of a run: every step as it ends, and what all of them amount to."""

from __future__ import annotations

import dataclasses
import datetime
import importlib.util
import json
import os
import platform
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import numpy as np

from .. import __version__
from .options import Options
from .points import Point
from .result import Result
from .sample import Sample

_LEFT_OUT = ("token", "out", "quiet")


class StepFile:
    """steps.jsonl: a line for each step, truncates too, written when it ends."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "steps.jsonl").open("w", encoding="utf-8")

    def add(self, point: Point, sample: Sample) -> None:
        self._file.write(json.dumps({"point": point.name, **sample.to_json()}) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def summary_of(result: Result, options: Options) -> dict[str, Any]:
    """summary.json: all that is needed to repeat the run and to compare it; no token, and of files only their names."""
    given = {name: value for name, value in dataclasses.asdict(options).items() if name not in _LEFT_OUT}
    return {
        "run": result.run,
        "environment": environment(),
        "options": json.loads(json.dumps(given, default=lambda path: path.name)),
        "stopped": result.stopped,
        "trace_requests_shortened": result.num_shortened,
        "not_released": result.not_released,
        "points": result.points,
        "workers": [_brief(worker) for worker in result.workers],
        "workers_after": [worker.get("stats") for worker in result.after],
    }


def environment() -> dict[str, Any]:
    """Of the sender; where the worker runs elsewhere, of that it says nothing."""
    return {
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "kvfold": __version__,
        "python": platform.python_version(),
        "httpx": httpx.__version__,
        "numpy": np.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
    }


def write_files(result: Result, options: Options, folder: Path) -> list[Path]:
    """summary.json, and with matplotlib the plots and the page; the paths of all files of the run."""
    summary = summary_of(result, options)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    paths = [folder / "steps.jsonl", folder / "summary.json"]
    if importlib.util.find_spec("matplotlib") is None:
        print("no plots: matplotlib is missing; pip install 'kvfold[load]'")
        return paths
    from .page import write_page
    from .plots import draw

    plots = draw(result, options.slo_ms)
    for name, figure in plots.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=150)
    paths.append(folder / "report.html")
    write_page(paths[-1], result, summary, plots)
    return paths


def _brief(worker: dict[str, Any]) -> dict[str, Any]:
    """A worker's description without the length of its list of compressors."""
    manifest = worker["manifest"]
    brief = {"url": worker["url"], "model": manifest.get("model"), "compat": manifest.get("compat")}
    brief |= {"compressors": len(manifest["compressors"]), "backend": worker.get("stats", {}).get("backend")}
    return brief | {"stats_before": worker.get("stats")}
