"""Where each request is placed, in each role: the worker, and which of its lives."""

import threading
from dataclasses import dataclass

from .plane import Role, WorkerInfo


@dataclass(frozen=True, slots=True)
class Place:
    """A worker in one of its lives; epoch None: it was not seen then."""

    worker: str
    epoch: str | None

    def is_in(self, info: WorkerInfo) -> bool:
        """Whether the worker still has what was put there."""
        return info.alive and self.epoch in (None, info.epoch)


class Places:
    """Of a fleet's requests; threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of: dict[str, dict[Role, Place]] = {}
        self._role: dict[str, Role] = {}

    def role(self, request_id: str) -> Role:
        """The role in which the request was last placed or asked for."""
        with self._lock:
            return self._role.get(request_id, "any")

    def get(self, request_id: str, role: Role) -> Place | None:
        with self._lock:
            place = self._of.get(request_id, {}).get(role)
            if place is not None:
                self._role[request_id] = role
            return place

    def put(self, request_id: str, role: Role, worker: WorkerInfo) -> None:
        with self._lock:
            self._of.setdefault(request_id, {})[role] = Place(worker.name, worker.epoch)
            self._role[request_id] = role

    def drop(self, request_id: str, role: Role) -> None:
        with self._lock:
            self._of.get(request_id, {}).pop(role, None)

    def pop(self, request_id: str) -> set[Place]:
        """All places of a request, which is nowhere afterwards."""
        with self._lock:
            self._role.pop(request_id, None)
            return set(self._of.pop(request_id, {}).values())
