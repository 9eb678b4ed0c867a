"""The workers of a plane, with a client for each, and what a failed call to one says about it."""

import threading
import time
from collections.abc import Callable
from typing import Literal, TypeVar

from ..client import Client
from ..errors import PeerFailed, RequestExists, TransportError, UnknownPeer
from ..replies import Pulled
from .connect import Line
from .errors import NoWorker, WorkerLost
from .places import Place
from .plane import ControlPlane, WorkerInfo
from .recovery import is_ahead

T = TypeVar("T")
Mover = Literal["auto", "http", "nixl"]
HEARSAY_S = 3.0
_PAUSE_S = 0.1


class Reach:
    """`connect` makes the client of an address. A worker that the plane finds dead is cut off. Threads may share it."""

    def __init__(self, plane: ControlPlane, connect: Callable[[str, Line], Client]) -> None:
        self.plane, self._connect = plane, connect
        self._lock = threading.Lock()
        self._clients: dict[str, Client] = {}
        self._lines: dict[str, Line] = {}
        self._seen: dict[str, WorkerInfo] = {}
        plane.watch(self._changed)

    def seen(self, name: str) -> WorkerInfo:
        """A worker as the plane last saw it. Raises NoWorker."""
        info = self._seen.get(name)
        if info is None:
            raise NoWorker(f"there is no worker {name} in this fleet")
        return info

    def living(self, request_id: str, place: Place) -> WorkerInfo:
        """The worker of a place. Raises WorkerLost."""
        info = self._seen.get(place.worker)
        if info is None or not place.is_in(info):
            raise WorkerLost(place.worker, request_id)
        return info

    def client(self, worker: WorkerInfo) -> Client:
        with self._lock:
            if worker.url not in self._clients:
                line = self._lines[worker.url] = Line()
                self._clients[worker.url] = self._connect(worker.url, line)
                if not self._seen.get(worker.name, worker).alive:
                    line.cut()
            return self._clients[worker.url]

    def call(self, worker: WorkerInfo, call: Callable[[Client], T]) -> T:
        """The call's result. If it does not arrive, the plane looks at the worker before the error is raised."""
        try:
            return call(self.client(worker))
        except TransportError:
            self.plane.check(worker.name)
            raise

    def pull(self, request_id: str, source: WorkerInfo, target: WorkerInfo, mover: Mover) -> Pulled:
        """The target takes a request over. Raises WorkerLost if the source is what failed, else what the client does.

        A target hears of a new worker, or of its new address, a little later than we do: that is waited for.
        """
        end = time.monotonic() + HEARSAY_S
        while True:
            try:
                return self.call(target, lambda client: self._pull(client, request_id, source, mover))
            except (PeerFailed, UnknownPeer) as error:
                self.plane.check(source.name)
                self.living(request_id, Place(source.name, source.epoch))
                if error.details.get("refusal") == "not_ready":  # it does not trust its own state any more
                    raise WorkerLost(source.name, request_id) from error
                unheard = isinstance(error, UnknownPeer) or error.details.get("reason") == "unreachable"
                if not unheard or time.monotonic() > end:
                    raise
            time.sleep(_PAUSE_S)

    def _pull(self, target: Client, request_id: str, source: WorkerInfo, mover: Mover) -> Pulled:
        """What the target has of an earlier attempt, or of before, gives way, unless it has more than the source."""
        try:
            try:
                return target.pull(request_id, source.name, mover)
            except TransportError:  # perhaps it closed a connection that nobody used, or it has the request by now
                return target.pull(request_id, source.name, mover)
        except RequestExists:
            ours = self.call(source, lambda client: client.request(request_id))
            if is_ahead(target.request(request_id), ours):
                raise
            target.release(request_id)
            return target.pull(request_id, source.name, mover)

    def close(self) -> None:
        for client in self._clients.values():
            client.close()

    def _changed(self, worker: WorkerInfo) -> None:
        """One that has left is not cut off: it may be ending what it has."""
        is_member = worker.name in {member.name for member in self.plane.workers()}
        with self._lock:
            before, self._seen[worker.name] = self._seen.get(worker.name), worker
            if before is not None and before.url != worker.url and before.url in self._lines:
                self._lines[before.url].cut()
            line = self._lines.get(worker.url)
            if line is not None and worker.alive:
                line.mend()
            elif line is not None and is_member:
                line.cut()
