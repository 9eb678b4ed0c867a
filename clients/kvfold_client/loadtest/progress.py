"""What is shown while a test runs. It runs beside the traffic in one process, so it does little and seldom."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from collections.abc import Iterator
from typing import Any, TextIO

from .options import Options
from .points import Point
from .record import StepFile
from .report import POINT_HEAD, live_line, point_row
from .result import Watcher
from .sample import OK, Sample
from .summary import percentiles_ms
from .traffic import Traffic

_REFRESH_SECONDS = 1.0
_LATEST = 1000
"""Steps that the display's percentiles are of."""
_SWITCH_SECONDS = 2e-4
"""How long the display may keep the traffic from running."""


class Progress:
    """The point that runs now, and how it goes."""

    def __init__(self) -> None:
        self.text = "asking the worker what it serves"
        self.point: Point | None = None
        self.traffic: Traffic | None = None
        self.num_ok = self.num_refused = 0

    def note(self, text: str) -> None:
        self.text, self.point = text, None

    def began(self, point: Point, traffic: Traffic) -> None:
        self.point, self.traffic, self.num_ok, self.num_refused = point, traffic, 0, 0

    def step(self, sample: Sample) -> None:
        self.num_ok += sample.outcome == OK
        self.num_refused += sample.outcome != OK

    @property
    def share(self) -> float | None:
        """Of the point's time that has passed."""
        if self.point is None or self.traffic is None:
            return None
        return min(1.0, self.traffic.now() / self.point.end_s)

    def line(self) -> str:
        if self.point is None or self.traffic is None:
            return self.text
        latest = [s.latency_s for s in self.traffic.samples[-_LATEST:] if s.outcome == OK]
        found = percentiles_ms(latest)
        latency = f"p50 {found['p50']:.1f} ms, p99 {found['p99']:.1f} ms, " if found else ""
        warm = "warm-up, " if self.traffic.now() < self.point.warmup_s else ""
        return (
            f"{self.point.name}: {warm}{latency}{self.num_ok} done, {self.num_refused} not, "
            f"{self.traffic.num_in_flight} on their way"
        )


@contextlib.contextmanager
def display(options: Options, steps: StepFile) -> Iterator[Watcher]:
    """A watcher that writes every step to its file, and shows what goes on unless it must be quiet."""
    progress = Progress()

    def step(point: Point, sample: Sample) -> None:
        steps.add(point, sample)
        progress.step(sample)

    watcher = Watcher(note=progress.note, began=progress.began, step=step)
    if options.quiet:
        yield watcher
        return
    fancy = sys.stderr.isatty() and importlib.util.find_spec("rich") is not None
    with _rich(progress, watcher) if fancy else _plain(progress, watcher, sys.stderr):
        yield watcher


@contextlib.contextmanager
def _plain(progress: Progress, watcher: Watcher, file: TextIO) -> Iterator[None]:
    """A line for every point that ends, for logs and pipes."""

    def note(text: str) -> None:
        progress.note(text)
        print(text, file=file, flush=True)

    def ended(point: Point, summary: dict[str, Any]) -> None:
        print(live_line(point_row(summary)), file=file, flush=True)

    print(live_line(POINT_HEAD), file=file, flush=True)
    watcher.note, watcher.ended = note, ended
    yield


@contextlib.contextmanager
def _rich(progress: Progress, watcher: Watcher) -> Iterator[None]:
    """A bar for the point that runs, above it the points that ended."""
    from rich.console import Console
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bars

    console = Console(stderr=True, highlight=False)
    console.print(live_line(POINT_HEAD), style="dim")
    columns = SpinnerColumn(), TimeElapsedColumn(), BarColumn(bar_width=24), TextColumn("{task.description}")
    bars = Bars(*columns, console=console, auto_refresh=False, transient=True)
    task = bars.add_task(progress.line(), total=None)
    over = threading.Event()

    def refresh() -> None:
        while not over.wait(_REFRESH_SECONDS):
            share = progress.share
            bars.update(task, description=progress.line(), total=None if share is None else 1.0, completed=share or 0.0)
            bars.refresh()

    def ended(point: Point, summary: dict[str, Any]) -> None:
        console.print(live_line(point_row(summary)))

    watcher.ended = ended
    thread = threading.Thread(target=refresh, name="kvfold-loadtest-display", daemon=True)
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        with bars:
            thread.start()
            yield
            over.set()
            thread.join()
    finally:
        over.set()
        sys.setswitchinterval(before)
