"""How far a simulation is: a bar with rich (extra `load`) on a terminal, else a line on stderr every few seconds."""

import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .lane import Tally

SECONDS_BETWEEN_LINES = 2.0

OnProgress = Callable[[int, Tally, float], None]
"""(finished requests, what was done, µs on the simulation's clock)"""


@contextmanager
def shown(title: str, num_requests: int) -> Iterator[OnProgress]:
    """Gives what to call as the simulation goes on."""
    if sys.stderr.isatty() and importlib.util.find_spec("rich") is not None:
        with _bar(title, num_requests) as update:
            yield update
    else:
        yield _lines(title, num_requests)


def _text(tally: Tally, now_us: float) -> str:
    refused = sum(tally.refusals.values())
    return f"{tally.steps} steps, {tally.rows} rows, {now_us / 1e6:.1f} s" + (f", {refused} refused" if refused else "")


def _lines(title: str, num_requests: int) -> OnProgress:
    """Nothing at all if it takes no longer than one interval."""
    due = time.monotonic() + SECONDS_BETWEEN_LINES

    def update(num_finished: int, tally: Tally, now_us: float) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + SECONDS_BETWEEN_LINES
            print(f"{title}: {num_finished} of {num_requests} requests, {_text(tally, now_us)}", file=sys.stderr)

    return update


@contextmanager
def _bar(title: str, num_requests: int) -> Iterator[OnProgress]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("", total=num_requests)

        def update(num_finished: int, tally: Tally, now_us: float) -> None:
            bars.update(task, completed=num_finished, description=_text(tally, now_us))

        yield update
