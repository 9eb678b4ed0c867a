"""The actor of a worker on a Ray cluster: it keeps the worker's process, reports it, and writes its peers file."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayError

from kvfold_service.control.directory import Table
from kvfold_service.control.keeper import Keeper, WorkerNotReadyError

log = logging.getLogger("kvfold")
STOP_S: Final = 30.0
"""A worker drains within this time, or is killed."""
_get: Any = ray.get
_REPORT_S: Final = 1.0
_ANSWER_S: Final = 10.0


class RayWorker:
    """The actor of a slot; it answers as soon as it has its place. `host`: what the worker listens on; None: the
    node's address."""

    def __init__(self, directory: Any, name: str, role: str, argv: list[str], host: str | None) -> None:
        self._directory, self._name, self._role = directory, name, role
        self._folder = tempfile.TemporaryDirectory(prefix="kvfold-")
        self._peers = Path(self._folder.name) / "peers"
        self._peers.write_text("")
        self._table: Table = {}
        self._wake, self._over = threading.Event(), threading.Event()
        host = host or ray.util.get_node_ip_address()
        fixed = ["--host", host, "--port", "0", "--peers-file", str(self._peers), "--worker-id", name]
        self._keeper = Keeper([*argv, *fixed], self._wake.set)
        self._failed: str | None = None
        threading.Thread(target=self._report_forever, name="kvfold-report", daemon=True).start()

    def describe(self) -> dict[str, Any]:
        """Its address (None: it is starting), process and number of starts, and why it could not start."""
        keeper, process = self._keeper, self._keeper.process
        pid = process and process.pid
        return {"url": keeper.url, "pid": pid, "starts": keeper.starts, "failed": self._failed}

    def stop(self) -> int | None:
        """Drain the worker and end it; its exit code."""
        self._over.set()
        status = self._keeper.stop(STOP_S)
        with suppress(RayError):  # the directory will forget it
            _get(self._directory.leave.remote(self._name), timeout=_ANSWER_S)
        self._folder.cleanup()
        return status

    def _report_forever(self) -> None:
        try:
            self._keeper.start()
        except WorkerNotReadyError as error:
            self._failed = str(error)
            return
        while not self._over.is_set():
            try:
                self._report()
            except (OSError, RayError) as error:  # the directory is being started again
                log.warning("worker %s could not be reported: %s", self._name, type(error).__name__)
            self._wake.wait(_REPORT_S)
            self._wake.clear()

    def _report(self) -> None:
        url = self._keeper.url
        if url is not None:
            table = _get(self._directory.report.remote(self._name, url, self._role), timeout=_ANSWER_S)
            if table != self._table:
                _write(self._peers, table)
                self._table = table


def _write(peers: Path, table: Table) -> None:
    """At once: the worker may read it at any time."""
    aside = peers.with_suffix(".new")
    aside.write_text("".join(f"{name} {url} {role}\n" for name, (url, role) in table.items()))
    os.replace(aside, peers)
