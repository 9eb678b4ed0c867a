"""Workers on a Ray cluster (extra `ray`): one actor for each GPU or slot, which runs a worker process and watches it.

    kvfold.directory     who runs where
    kvfold.worker.NAME   starts the worker, starts it again when it ends (its state is lost, its epoch is new), reports
                         it once a second, and writes the peers file that the worker takes requests by

Ray places the actors, and starts one again that dies, or whose node does. Entries, rows and requests never go through
Ray: its messages are names and addresses.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayError

from kvfold_service.control.directory import Directory, Table
from kvfold_service.control.keeper import Keeper

log = logging.getLogger("kvfold")
NAMESPACE: Final = "kvfold"
DIRECTORY: Final = "kvfold.directory"
WORKER: Final = "kvfold.worker."
_remote: Any = ray.remote
_get: Any = ray.get
_REPORT_S: Final = 1.0
_ANSWER_S: Final = 10.0
_STOP_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one worker goes: what its actor takes of the cluster, in Ray's words."""

    name: str
    role: str = "any"
    num_gpus: float = 0
    num_cpus: float = 1
    resources: dict[str, float] = field(default_factory=dict)


class RayWorker:
    """The actor of a slot. `host`: what the worker listens on; None: the node's address."""

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
        self._keeper.start()
        threading.Thread(target=self._report_forever, name="kvfold-report", daemon=True).start()

    def describe(self) -> dict[str, Any]:
        """Its address, process and number of starts."""
        process = self._keeper.process
        return {"url": self._keeper.url, "pid": process and process.pid, "starts": self._keeper.starts}

    def stop(self) -> int | None:
        """Drain the worker and end it; its exit code."""
        self._over.set()
        status = self._keeper.stop(_STOP_S)
        _get(self._directory.leave.remote(self._name), timeout=_ANSWER_S)
        self._folder.cleanup()
        return status

    def _report_forever(self) -> None:
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


def start_workers(
    slots: Iterable[Slot], argv: Sequence[str], *, namespace: str = NAMESPACE, host: str | None = None
) -> dict[str, str]:
    """Start a worker in each slot, with these options of `kvfold serve`; their addresses when all are ready.

    Needs a connected `ray`. The workers outlive this process: `stop_workers` ends them. Raises ray.exceptions.RayError.
    """
    kept: dict[str, Any] = {"namespace": namespace, "lifetime": "detached", "max_restarts": -1, "max_concurrency": 4}
    directory = _remote(Directory).options(name=DIRECTORY, get_if_exists=True, num_cpus=0, **kept).remote()
    actors = {}
    for slot in slots:
        share = {"num_cpus": slot.num_cpus, "num_gpus": slot.num_gpus, "resources": slot.resources}
        actor = _remote(RayWorker).options(name=WORKER + slot.name, **share, **kept)
        actors[slot.name] = actor.remote(directory, slot.name, slot.role, list(argv), host)
    return {name: _get(actor.describe.remote())["url"] for name, actor in actors.items()}


def worker_names(namespace: str = NAMESPACE) -> list[str]:
    """Workers whose actors live."""
    named: Any = ray.util.list_named_actors(all_namespaces=True)
    own = [actor["name"] for actor in named if actor["namespace"] == namespace]
    return sorted(name.removeprefix(WORKER) for name in own if name.startswith(WORKER))


def describe(name: str, namespace: str = NAMESPACE) -> dict[str, Any]:
    """See `RayWorker.describe`. Raises ValueError if there is no such worker."""
    return _get(ray.get_actor(WORKER + name, namespace).describe.remote(), timeout=_ANSWER_S)


def stop_workers(names: Iterable[str] | None = None, namespace: str = NAMESPACE) -> dict[str, int | None]:
    """Drain and end these workers, or all and the directory; their exit codes."""
    chosen = worker_names(namespace) if names is None else list(names)
    actors = {name: ray.get_actor(WORKER + name, namespace) for name in chosen}
    ended = {name: actor.stop.remote() for name, actor in actors.items()}
    codes = {name: _get(code) for name, code in ended.items()}
    for actor in actors.values():
        ray.kill(actor)
    if names is None:
        ray.kill(ray.get_actor(DIRECTORY, namespace))
    return codes
