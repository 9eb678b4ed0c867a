"""The command: options, the loop, Ctrl-C, and what is printed and written."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from . import options as command_line
from .options import Options
from .perform import perform
from .progress import display
from .record import StepFile, write_files
from .report import text_report
from .result import LoadtestError, Result, Stop
from .traffic import precise_loop
from .workers import Place, Transport, Workers

_INTERRUPTED = 130


def run(argv: list[str]) -> int:
    """Send steps to a worker at a rate of their own, and say what its callers would have waited."""
    options = command_line.read(argv)
    folder = options.out or Path(f"kvfold-loadtest-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with asyncio.Runner(loop_factory=precise_loop) as runner:
            result = runner.run(measure(options, folder))
        print(text_report(result, options))
        for path in write_files(result, options, folder):
            print(path)
    except (LoadtestError, OSError) as error:
        print(f"kvfold loadtest: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvfold loadtest: ended at once, without a report", file=sys.stderr)
        return _INTERRUPTED
    if result.stopped == _CTRL_C:
        return _INTERRUPTED
    return 0 if any(point["throughput_per_s"] for point in result.points) else 1


async def measure(options: Options, folder: Path, transport: Transport | None = None) -> Result:
    """The test, with its display, and every step into the folder as it ends. Raises LoadtestError, OSError."""
    stop = Stop()
    with contextlib.ExitStack() as stack:
        stack.enter_context(_interruptible(stop))
        urls, place = stack.enter_context(_members(options))
        steps = stack.enter_context(StepFile(folder))
        watcher = stack.enter_context(display(options, steps))
        async with Workers(
            urls,
            place,
            token=options.token,
            encoding=options.encoding,
            timeout=options.timeout,
            connections=options.in_flight,
            transport=transport,
        ) as workers:
            return await perform(options, workers, watcher, stop)


_CTRL_C = "it was interrupted"


@contextlib.contextmanager
def _interruptible(stop: Stop) -> Iterator[None]:
    """The first Ctrl-C stops the test, which still releases and reports; a second one ends the process."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        print("stopping: waiting for answers, releasing (Ctrl-C again: end at once)", file=sys.stderr)
        stop(_CTRL_C)
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    before = signal.getsignal(signal.SIGINT)
    try:
        loop.add_signal_handler(signal.SIGINT, interrupted)
    except (RuntimeError, ValueError):  # not in the main thread: whoever runs it there has other ways to stop it
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _members(options: Options) -> Iterator[tuple[tuple[str, ...], Place | None]]:
    """The addresses, and for a fleet, who a request belongs to."""
    if options.peers is None:
        yield options.urls, None
        return
    from ..fleet import StaticPlane

    role = "prefill" if options.profile == "prefill" else "decode"
    try:
        plane = StaticPlane.from_file(options.peers)
    except (OSError, ValueError) as error:
        raise LoadtestError(f"--peers: {error}") from None
    plane.open(options.token)
    try:
        urls = tuple(member.url for member in plane.workers() if member.accepting)
        if not urls:
            raise LoadtestError("--peers: no worker of this file takes requests")
        yield urls, lambda id: plane.owner(id, role).url
    finally:
        plane.close()
