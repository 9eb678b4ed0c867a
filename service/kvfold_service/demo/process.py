"""A worker as a child process, from its start to its exit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import IO

# `kvfold serve`, whose script may not be on PATH; a small one: the demo has one request at a time.
SERVE = (sys.executable, "-m", "kvfold_service", "--host", "127.0.0.1", "--port", "0")
LIMITS = ("--max-requests", "4", "--pages", "256", "--max-step-tokens", "8192", "--max-body-bytes", str(128 << 20))
STOP_SECONDS = 10


class WorkerError(RuntimeError):
    """The worker did not become ready; the text says what it last wrote."""


@contextmanager
def worker(manifest: Path, weights: Path, backend: str, timeout_s: float) -> Iterator[str]:
    """Start `kvfold serve` on a free loopback port, give its ready line, stop it at the end.

    Raises:
        WorkerError: it ended before it was ready, or was not ready within `timeout_s` seconds.
    """
    command = [*SERVE, *LIMITS, "--manifest", str(manifest), "--weights", str(weights), "--backend", backend]
    # The options above are the worker's whole configuration; a variable meant for another one must not change it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVFOLD_")}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment, text=True)
        try:
            yield _ready_line(process, log, time.monotonic() + timeout_s)
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _ready_line(process: subprocess.Popen[str], log: IO[bytes], deadline: float) -> str:
    lines: Queue[str | None] = Queue()
    assert process.stdout is not None
    Thread(target=_drain, args=(process.stdout, lines), daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=max(deadline - time.monotonic(), 0))
        except Empty:
            raise WorkerError(f"the worker was not ready in time{_last_words(log)}") from None
        if line is None:
            raise WorkerError(f"the worker ended with status {process.wait()} before it was ready{_last_words(log)}")
        if line.startswith("ready "):
            return line.strip()


def _drain(stream: IO[str], lines: Queue[str | None]) -> None:
    """Read to the end, so that the worker never waits for a reader."""
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)


def _last_words(log: IO[bytes], num_lines: int = 5) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()[-num_lines:]
    return "; it said:\n" + "\n".join(lines) if lines else ""
