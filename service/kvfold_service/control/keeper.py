"""A worker process that is started again whenever it ends, until it is told to stop."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Final

log = logging.getLogger("kvfold")
_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_SOON_S: Final = 10.0
"""A worker that ends so soon after its start will do so again: the pause before the next start is doubled."""


class WorkerNotReadyError(RuntimeError):
    """The worker ended before it was ready; what it says of it is in its log."""


class Keeper:
    """`kvfold serve` with these options. `url` is None while no worker is ready.

    The thread that starts a worker waits for its end: the kernel ties the two together.
    """

    def __init__(
        self, argv: list[str], changed: Callable[[], None], module: str = "kvfold_service.control.tied"
    ) -> None:
        self._command, self._changed = [sys.executable, "-m", module, str(os.getpid()), *argv], changed
        self.url: str | None = None
        self.process: subprocess.Popen[str] | None = None
        self.starts = 0
        self._stopping = threading.Event()
        self._settled = threading.Event()
        self._failed: int | None = None
        self._thread = threading.Thread(target=self._keep, name="kvfold-keeper", daemon=True)

    def start(self) -> None:
        """Returns when the first worker is ready. Raises WorkerNotReadyError: it will not be started again."""
        self._thread.start()
        self._settled.wait()
        if self._failed is not None:
            raise WorkerNotReadyError(f"kvfold serve ended with status {self._failed} before it was ready; see its log")

    def stop(self, seconds: float) -> int | None:
        """Let the worker drain, then end it; its exit code."""
        self._stopping.set()
        process = self.process
        if process is None:
            return None
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
        self._thread.join()
        return process.returncode

    def _keep(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._stopping.is_set():
            ended_soon = threading.Event()
            timer = threading.Timer(_SOON_S, ended_soon.set)
            timer.daemon = True
            timer.start()
            status = self._run()
            timer.cancel()
            if not self._settled.is_set():
                self._failed = status
                self._settled.set()
                return
            pause = _FIRST_PAUSE_S if ended_soon.is_set() else min(2 * pause, _LONGEST_PAUSE_S)
            if not self._stopping.is_set():
                log.warning("the worker ended with status %s and is started again in %g s", status, pause)
            self._stopping.wait(pause)

    def _run(self) -> int:
        """One life of the worker; its exit code."""
        with subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True) as self.process:
            assert self.process.stdout is not None
            self.starts += 1
            words = self.process.stdout.readline().split()
            if words[:1] == ["ready"]:
                self.url = words[1]
                self._settled.set()
                self._changed()
            status = self.process.wait()
        self.url = None
        self._changed()
        return status
