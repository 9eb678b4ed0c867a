"""Workers of one fleet in this process, each on a thread and a port of its own: what the fleet's tests share."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
import uvloop

from kvfold_client import Client
from kvfold_client.errors import (
    PeerFailed,
    PositionConflict,
    PositionGap,
    TransportError,
    Unavailable,
    UnknownRequest,
)
from kvfold_client.fleet import Fleet, NoWorker, Role, StaticPlane, WorkerLost
from kvfold_client.fleet.recovery import committed_of
from kvfold_client.replies import Exported, RequestState
from kvfold_kernels import backends
from kvfold_service import app as apps
from kvfold_service import settings as options
from kvfold_service.auth import Tokens
from kvfold_service.connection import protocol
from kvfold_service.engine import Engine
from kvfold_service.worker import Worker
from tests.service_cases import NAMES, SMALL, alone, make_worker, stream

several_servers = pytest.mark.filterwarnings("ignore:The 'alias' attribute")
"""FastAPI builds a route at its first call, within warnings.catch_warnings, which threads undo for each other."""
LOST = (TransportError, WorkerLost, UnknownRequest, PositionGap, PositionConflict)
"""After these only the fleet knows where a request stands."""
PAGES = ((1, 512), (5, 1520), (2, None))
"""page_entries and page_bytes of the first compressors of a manifest."""


def other_pages(manifest: dict[str, Any] = SMALL, draft_slack: int = 1) -> dict[str, Any]:
    """Of the same compat, with other pages and other rings."""
    parts = [
        part | {"page_entries": pages, "page_bytes": page_bytes}
        for part, (pages, page_bytes) in zip(manifest["compressors"], PAGES, strict=False)
    ]
    return manifest | {"draft_slack": draft_slack, "compressors": parts}


class Local:
    """A worker in this process; `kill` takes its state and its port away at once, `start` begins its next life."""

    def __init__(self, peers: Path, manifest: dict[str, Any] = SMALL, backend: str = "cpu", **limits: Any) -> None:
        flags = [f"--{name.replace('_', '-')}" + f"={value}" * (value is not True) for name, value in limits.items()]
        fixed = ["--manifest=tiny", "--weights=random:1", "--max-body-bytes=4000000", f"--peers-file={peers}"]
        self._settings, self._manifest, self._backend = options.read([*fixed, *flags]), manifest, backends.load(backend)
        self.port = 0
        self._lives: list[tuple[threading.Thread, apps.Service]] = []
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def worker(self) -> Worker:
        return self.service.worker

    def start(self) -> None:
        settings = self._settings
        worker = make_worker(
            self._backend, self._manifest, max_requests=settings.max_requests, pages=min(settings.pages, 64)
        )
        self.service = apps.Service(settings, Engine(worker), Tokens(settings.token_file))
        self.service.not_ready = None
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        http = protocol(settings.receive_timeout, self.service.connections, None)
        config = uvicorn.Config(
            apps.build(self.service), http=http, ws="none", log_config=None, access_log=False, lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(listener,), daemon=True)
        self._thread.start()
        self.lives = True

    def _serve(self, listener: socket.socket) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, listener:
            runner.run(self._server.serve(sockets=[listener]))

    def kill(self) -> None:
        """No call is finished, no connection closed in peace; the dead stay dead."""
        if not self.lives:
            return

        def die() -> None:
            for server in self._server.servers:
                server.close()
            for connection in list(self._server.server_state.connections):
                connection.transport.abort()
            self._server.should_exit = self._server.force_exit = True
            dead.set()

        dead = threading.Event()
        while not self._server.started:
            dead.wait(0.001)
        self._loop.call_soon_threadsafe(die)
        assert dead.wait(30)
        self.lives = False
        self._lives.append((self._thread, self.service))

    def end(self) -> None:
        """All that was ever started here has ended."""
        self.kill()
        for thread, service in self._lives:
            thread.join()
            service.engine.stop()

    def check(self) -> None:
        """Whole, and nothing on its way; between calls."""
        asyncio.run_coroutine_threadsafe(self._check(), self._loop).result(30)

    async def _check(self) -> None:
        await self.service.engine.call(self.worker.check_integrity)
        assert not self.worker.incoming
        assert self.service.admission.places == self.service.staging.num_lent == 0
        assert self.service.sending.num_replies == 0


class Town:
    """A peers file and the workers that it names."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "peers"
        self.workers: dict[str, Local] = {}
        self.roles: dict[str, Role] = {}
        self._left: list[Local] = []
        self.write()

    def add(self, name: str, role: Role = "any", **options: Any) -> Local:
        self.workers[name] = Local(self.file, **options)
        self.roles[name] = role
        self.write()
        return self.workers[name]

    def leave(self, name: str) -> None:
        self._left.append(self.workers.pop(name))
        self._left[-1].kill()
        del self.roles[name]
        self.write()

    def write(self) -> None:
        lines = [f"{name} {worker.url} {self.roles[name]}" for name, worker in self.workers.items()]
        aside = self.file.with_suffix(".new")
        aside.write_text("\n".join(["# the workers of this test", *lines, ""]))
        os.replace(aside, self.file)

    def fleet(self, **options: Any) -> Fleet:
        """Looks at the workers when it is told to, and when a call fails."""
        return Fleet(StaticPlane.from_file(self.file, health_seconds=600), **options)

    def end(self) -> None:
        for worker in self.workers.values():
            if worker.lives:
                worker.check()
        for worker in [*self.workers.values(), *self._left]:
            worker.end()


def towns(tmp_path: Path) -> Iterator[Town]:
    """For `pytest.fixture`: a town without workers; at the end those that live are whole."""
    town = Town(tmp_path)
    yield town
    town.end()


town = pytest.fixture(towns)


def feed(client: Client, id: str, start: int, end: int, names: Iterable[str] = NAMES, **options: Any) -> RequestState:
    """Tokens [start, end) of a request's streams."""
    rows = {name: stream(name, id)[start:end] for name in names}
    return client.step([(id, start, end - start)], rows, **options).requests[id]


class Sequence:
    """A request that a scheduler takes through a fleet, whatever happens to its workers."""

    def __init__(self, fleet: Fleet, id: str, role: Role = "prefill", names: tuple[str, ...] = NAMES) -> None:
        self.fleet, self.id, self.role, self.names, self.at = fleet, id, role, names, 0
        self.kept: Exported | None = None
        self.sent = self.recovered = 0

    def advance(self, end: int, chunk: int) -> None:
        """Send tokens until `end` are committed, again from where the fleet says after a death."""
        while self.at < end:
            stop = min(self.at + chunk, end)
            try:
                feed(self.fleet.client_for(self.id, self.role), self.id, self.at, stop, self.names)
            except Unavailable:
                self.fleet.hand_over(self.id, self.role)
            except LOST:
                self.recover()
            else:
                self.sent += stop - self.at
                self.at = stop

    def recover(self) -> None:
        wanted = self.most(self)
        while True:
            try:
                found = self.fleet.recover(self.id, self.role, kept=self.kept)
            except (TransportError, NoWorker):  # the new owner died too, or has just come
                self.fleet.look()
                continue
            assert wanted in (None, found.start), (wanted, found)
            self.at, self.recovered = found.start, self.recovered + 1
            return

    def most(self, sequence: Sequence) -> int | None:
        """Tokens that somebody still has of a request, where a test knows it."""
        return None

    def hand_over(self, to: Role, release: bool = True) -> None:
        """If it fails, the request is where it was."""
        try:
            self.fleet.hand_over(self.id, to, release=release)
        except (NoWorker, PeerFailed):  # on a machine that is too busy a peer may look dead for a moment
            return
        except LOST:
            self.recover()
        else:
            self.role = to

    def check(self) -> None:
        """What the worker holds is what one that was alone with the request would hold."""
        client = self.fleet.client_for(self.id, self.role)
        exported = client.export(self.id)
        assert committed_of(client.request(self.id)) == dict.fromkeys(self.names, self.at)
        for name, part in exported.compressors.items():
            expected = alone(backends.load("cpu"), self.id, name)
            assert part.first_entry == 0
            np.testing.assert_array_equal(part.entries, expected[: len(part.entries)], strict=True)
            np.testing.assert_array_equal(part.open_rows, stream(name, self.id)[part.open_positions])
