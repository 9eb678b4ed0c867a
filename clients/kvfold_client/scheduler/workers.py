"""Where requests run: one worker, a fleet, or on paper. The simulation sees the same calls in all three."""

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from ..client import Client
from ..errors import KvfoldError, TransportError, Unavailable, UnknownRequest
from ..fleet import Fleet, NoWorker, Role, WorkerLost
from ..fleet.members import rendezvous
from .request import Request
from .rows import shapes_of

RECOVERY_S = 30.0
"""How long a lost request may look for a worker."""
_PAUSE_S = 0.2


class SimulationError(KvfoldError):
    """The simulation cannot go on; str() says why and what to do."""


@dataclass(frozen=True, slots=True)
class Handed:
    """A hand-over: to whom, and what went there."""

    target: str
    entry_bytes: int
    open_row_bytes: int
    seconds: float


class Workers(Protocol):
    def roles(self) -> Mapping[str, Role]:
        """Workers by name that take requests, and what each is for."""
        ...

    def place(self, request: Request, role: Role) -> str:
        """The worker that a request begins at."""
        ...

    def client(self, name: str) -> Client | None:
        """None: there is no worker, steps are made on paper."""
        ...

    def hand_over(self, request: Request, role: Role, *, keep: bool) -> Handed:
        """Move a request to its worker in another role or, in its own, to another worker; the old one may `keep` it."""
        ...

    def recover(self, request: Request, role: Role) -> tuple[str, int]:
        """After a failed call: the worker to go on with, and how many tokens it has."""
        ...

    def release(self, request: Request) -> None: ...


class OneWorker:
    """A single worker, under the name `worker`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def roles(self) -> Mapping[str, Role]:
        return {"worker": "any"}

    def place(self, request: Request, role: Role) -> str:
        return "worker"

    def client(self, name: str) -> Client | None:
        return self._client

    def hand_over(self, request: Request, role: Role, *, keep: bool) -> Handed:
        raise AssertionError("there is no other worker")

    def recover(self, request: Request, role: Role) -> tuple[str, int]:
        """The worker may have been started anew: then it has nothing."""
        for _ in _tries():
            with suppress(TransportError, Unavailable):
                try:
                    state = self._client.request(request.id)
                except UnknownRequest:
                    return "worker", 0
                return "worker", min(part.committed for part in state.values())
        raise SimulationError(f"the only worker has not answered for {RECOVERY_S:.0f} s")

    def release(self, request: Request) -> None:
        self._client.release(request.id)


def place_in_trace(request_id: str) -> str:
    """What a fleet places a request RUN.NUMBER by: its number. Runs keep out of each other's ids, and place alike."""
    return request_id.rpartition(".")[2]


class FleetWorkers:
    """A fleet's workers. `keep_copies`: a prefill worker keeps what it handed over; a death costs what was decoded."""

    def __init__(self, fleet: Fleet, keep_copies: bool = False) -> None:
        self._fleet = fleet
        self._keep_copies = keep_copies

    def roles(self) -> Mapping[str, Role]:
        return {worker.name: worker.role for worker in self._fleet.workers() if worker.accepting}

    def place(self, request: Request, role: Role) -> str:
        for _ in _tries():
            with suppress(NoWorker):
                try:
                    return self._fleet.worker_for(request.id, role).name
                except WorkerLost:
                    return self._fleet.recover(request.id, role).worker
        raise SimulationError(f"no worker took request {request.id} within {RECOVERY_S:.0f} s")

    def client(self, name: str) -> Client | None:
        return self._fleet.client(name)

    def hand_over(self, request: Request, role: Role, *, keep: bool) -> Handed:
        for _ in _tries():
            with suppress(NoWorker):
                moved = self._fleet.hand_over(request.id, role, release=not (keep and self._keep_copies))
                return Handed(moved.target, moved.entry_bytes, moved.open_row_bytes, moved.seconds)
        raise SimulationError(f"no worker took request {request.id} over within {RECOVERY_S:.0f} s")

    def recover(self, request: Request, role: Role) -> tuple[str, int]:
        for _ in _tries():
            with suppress(TransportError, Unavailable, NoWorker, WorkerLost):
                found = self._fleet.recover(request.id, role)
                return found.worker, found.start
        raise SimulationError(f"no worker took request {request.id} within {RECOVERY_S:.0f} s")

    def release(self, request: Request) -> None:
        self._fleet.release(request.id)


class OnPaper:
    """No worker: steps end as planned. `described` is what `kvfold_service.expected.sizes` gives."""

    def __init__(self, roles: Mapping[str, Role], described: Mapping[str, Any]) -> None:
        self._roles = dict(roles)
        self._shapes = shapes_of(described["manifest"])
        self._sizes: Mapping[str, Mapping[str, int]] = described["sizes"]

    def roles(self) -> Mapping[str, Role]:
        return self._roles

    def place(self, request: Request, role: Role) -> str:
        """As a fleet places it, by its number in the trace."""
        return rendezvous(
            [name for name, its in self._roles.items() if "any" in (role, its) or its == role], str(request.idx)
        )

    def client(self, name: str) -> Client | None:
        return None

    def hand_over(self, request: Request, role: Role, *, keep: bool) -> Handed:
        entries = rows = 0
        for shape in self._shapes:
            sizes = self._sizes[shape.name]
            entries += request.committed // shape.ratio * sizes["entry_bytes"]
            rows += shape.num_open(request.committed) * sizes["row_width"] * sizes["ring_item_bytes"]
        return Handed(self.place(request, role), entries, rows, 0.0)

    def recover(self, request: Request, role: Role) -> tuple[str, int]:
        raise AssertionError("paper does not fail")

    def release(self, request: Request) -> None:
        pass


def _tries() -> Iterator[None]:
    """Again and again for RECOVERY_S."""
    end = time.monotonic() + RECOVERY_S
    while time.monotonic() < end:
        yield
        time.sleep(_PAUSE_S)
