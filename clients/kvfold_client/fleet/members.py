"""What every plane keeps: its members as they were last seen, a thread that looks at them, who owns what."""

import hashlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Self

from ..client import Client
from ..errors import ApiError, KvfoldError, ReplyError
from ..peers import Peer
from .connect import connect
from .errors import NoWorker
from .plane import Role, WorkerInfo

ANSWER_S = 1.0
"""A worker that does not answer in this time, asked twice, is dead."""
LOOKS_AT_A_TIME = 16


def rendezvous(names: Iterable[str], request_id: str) -> str:
    """The name of the greatest BLAKE2b-64(name, 0, request id). Raises ValueError without names."""
    return max(names, key=lambda name: hashlib.blake2b(f"{name}\0{request_id}".encode(), digest_size=8).digest())


class Members(ABC):
    """A control plane but for who its members are: `find` tells. See `ControlPlane` for the calls."""

    def __init__(self, health_seconds: float) -> None:
        if not health_seconds > 0:
            raise ValueError(f"health_seconds must be above 0, not {health_seconds}")
        self._pause = health_seconds
        self._token: str | None = None
        self._seen: dict[str, WorkerInfo] = {}
        self._clients: dict[str, Client] = {}
        self._watchers: list[Callable[[WorkerInfo], None]] = []
        self._lock, self._telling = threading.RLock(), threading.RLock()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @abstractmethod
    def find(self) -> Mapping[str, Peer]:
        """The members now, by name. On the plane's thread, and in `open`."""

    def open(self, token: str | None) -> None:
        self._token = token
        self.look()
        self._thread = threading.Thread(target=self._run, name="kvfold-health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        for client in self._clients.values():
            client.close()

    def __enter__(self) -> Self:
        self.open(None)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def workers(self) -> tuple[WorkerInfo, ...]:
        with self._lock:
            return tuple(self._seen[name] for name in sorted(self._seen))

    def owner(
        self, request_id: str, role: Role = "any", *, besides: Collection[str] = (), compat: str | None = None
    ) -> WorkerInfo:
        able = {
            worker.name: worker
            for worker in self.workers()
            if worker.takes(role) and worker.name not in besides and compat in (None, worker.compat)
        }
        if not able:
            raise NoWorker(f"no living worker takes requests in role {role}" + (f" of compat {compat}" * bool(compat)))
        return able[rendezvous(able, request_id)]

    def look(self) -> None:
        members = self.find()
        with self._lock:
            gone = [name for name in self._seen if name not in members]
            left = [replace(self._seen.pop(name), alive=False, accepting=False) for name in gone]
        if members:
            with ThreadPoolExecutor(min(LOOKS_AT_A_TIME, len(members))) as threads:
                list(threads.map(self._look, members.values()))
        for worker in left:
            self._tell(worker)

    def check(self, name: str) -> WorkerInfo:
        with self._lock:
            known = self._seen.get(name)
        if known is None:
            raise NoWorker(f"there is no worker {name} in this fleet")
        return self._look(Peer(known.name, known.url, known.role))

    def watch(self, changed: Callable[[WorkerInfo], None]) -> None:
        with self._lock:
            self._watchers.append(changed)

    def _run(self) -> None:
        while not self._over.wait(self._pause):
            self.look()

    def _look(self, peer: Peer) -> WorkerInfo:
        """Ask a worker who it is."""
        with self._lock:
            before = self._seen.get(peer.name)
        now = self._ask(peer, before)
        with self._lock:
            changed = now != self._seen.get(peer.name)
            self._seen[peer.name] = now
        if changed:
            self._tell(now)
        return now

    def _ask(self, peer: Peer, before: WorkerInfo | None) -> WorkerInfo:
        unknown = WorkerInfo(peer.name, peer.url, _role(peer.role), alive=False)
        before = replace(before, url=peer.url, role=unknown.role) if before else unknown
        try:
            state = self._client(peer.url).worker()
        except (ApiError, ReplyError):  # our token is not good there: it lives, and is of no use to us
            return replace(before, alive=True, accepting=False)
        except KvfoldError:
            return replace(before, alive=False, accepting=False)
        return WorkerInfo(peer.name, peer.url, unknown.role, True, state.status == "ok", state.epoch, state.compat)

    def _client(self, url: str) -> Client:
        with self._lock:
            if url not in self._clients:
                self._clients[url] = connect(url, self._token, timeout=ANSWER_S, retries=1)
            return self._clients[url]

    def _tell(self, changed: WorkerInfo) -> None:
        """What is known of it by now: two looks at once may end in any order, and the newest is told last."""
        with self._telling:
            with self._lock:
                newest, watchers = self._seen.get(changed.name, changed), list(self._watchers)
            for watcher in watchers:
                watcher(newest)


def _role(text: str) -> Role:
    assert text in ("prefill", "decode", "any"), text
    return text
