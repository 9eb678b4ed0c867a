"""How far a benchmark is: a bar with rich (extra `load`) on a terminal, else a line every few seconds, on stderr."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from collections.abc import Iterator

from kvfold_kernels.bench.measured import Told

_SECONDS_BETWEEN_LINES = 5.0


@contextlib.contextmanager
def shown(num_parts: int) -> Iterator[Told]:
    """Gives what to call as parts are done. Nothing is drawn amid a measurement, only between two."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield _lines(num_parts)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bars:
        task = bars.add_task("", total=num_parts)
        yield lambda done, what: bars.update(task, completed=done, description=what, refresh=True)


def _lines(num_parts: int) -> Told:
    due = time.monotonic() + _SECONDS_BETWEEN_LINES

    def told(done: int, what: str) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + _SECONDS_BETWEEN_LINES
            print(f"{done} of {num_parts}: {what}", file=sys.stderr, flush=True)

    return told
