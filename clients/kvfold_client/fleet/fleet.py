"""The fleet's calls, the same on every control plane."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal, Self

from ..client import Client
from ..errors import CompatMismatch, NotReady, PeerFailed, TransportError, UnknownPeer, UnknownRequest
from ..replies import Exported, RequestState
from .connect import Line, connect
from .errors import FleetError, NoWorker, WorkerLost
from .places import Place, Places
from .plane import ControlPlane, Role, WorkerInfo
from .reach import Mover, Reach
from .records import Moved, Recovered
from .recovery import Copy, best_first, committed_of


class Fleet:
    """Requests over several workers. Use it in a `with`; calls may come from several threads.

    A request is placed when it is first asked for, once for each role, and stays there when others join or leave.
    `timeout` (seconds) and `retries` are those of the clients; a call to a worker that the plane finds dead ends then.
    `placed_by` says what of a request's id is hashed. Where a call names no error, it raises what the worker's client
    does.
    """

    def __init__(
        self,
        plane: ControlPlane,
        token: str | None = None,
        *,
        encoding: Literal["frame", "msgpack"] = "frame",
        timeout: float | None = 30.0,
        retries: int = 1,
        placed_by: Callable[[str], str] = str,
    ) -> None:
        self._plane, self._placed_by = plane, placed_by
        self._places = Places()

        def client(url: str, line: Line) -> Client:
            return connect(url, token, encoding=encoding, timeout=timeout, retries=retries, line=line)

        self._reach = Reach(plane, client)
        plane.open(token)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """The plane's members as last seen."""
        return self._plane.workers()

    def look(self) -> None:
        """Look at all workers now, and who they are; the plane does so from time to time."""
        self._plane.look()

    def worker_for(self, request_id: str, role: Role = "any") -> WorkerInfo:
        """Where a request is placed in this role; places it if it is nowhere. Raises NoWorker, WorkerLost."""
        place = self._places.get(request_id, role)
        if place is not None:
            return self._reach.living(request_id, place)
        owner = self._owner(request_id, role)
        self._places.put(request_id, role, owner)
        return owner

    def client_for(self, request_id: str, role: Role = "any") -> Client:
        """The client of `worker_for`; one client a worker, so steps of one worker's requests may go together."""
        return self._reach.client(self.worker_for(request_id, role))

    def client(self, name: str) -> Client:
        """The client of a worker by its name. Raises NoWorker."""
        return self._reach.client(self._reach.seen(name))

    def hand_over(self, request_id: str, to: Role = "decode", *, mover: Mover = "auto", release: bool = True) -> Moved:
        """Move a request from where it is to the owner in role `to`, which pulls and verifies it.

        The source goes on with its other requests meanwhile; with `release=False` it keeps its copy, which `recover`
        may use later. `client_for(request_id, to)` is the target afterwards. If it fails, the source still has
        everything. A source that is the owner in role `to` as well keeps it; in its own role it is moved away.
        Drafts become final. Raises WorkerLost (the source), NoWorker, PeerFailed, UnknownRequest, and what the target
        refuses an import with.
        """
        began, role = time.monotonic(), self._places.role(request_id)
        source = self.worker_for(request_id, role)
        target = self._owner(request_id, to, besides={source.name} if to == role else (), compat=source.compat)
        if target.name == source.name:
            self._places.put(request_id, to, target)
            return Moved.nothing(request_id, source.name, self._ask(source, request_id))
        pulled = self._reach.pull(request_id, source, target, mover)
        if release:
            with suppress(TransportError):  # it is dead: nothing is left to release
                self._reach.client(source).release(request_id)
            self._places.drop(request_id, role)
        self._places.put(request_id, to, target)
        return Moved.of(request_id, source.name, target.name, pulled, time.monotonic() - began)

    def keep(self, request_id: str, role: Role = "any") -> Exported:
        """An export for the caller to keep against a death: give it to `recover`. Costs the bytes of all entries."""
        return self.client_for(request_id, role).export(request_id)

    def recover(self, request_id: str, role: Role = "any", *, kept: Exported | None = None) -> Recovered:
        """After a failed call: find out where the request goes on, and bring there what others still hold of it.

        1. The worker it is placed on lives and knows it: nothing moves, `start` is what it has committed.
        2. Else all living workers are asked. Whoever has the most tokens, `kept` included, gives its state: it goes on
           there if that worker takes this role, else the owner takes it over. `start` is that position.
        3. Else `start` is 0, and the request has to be sent again from its beginning.

        Safe to repeat. Raises NoWorker, Busy and Unavailable (the new owner), TransportError (it died): repeat it then.
        """
        place = self._places.get(request_id, role)
        if place is not None and (found := self._still_there(request_id, place)):
            return found
        for copy in best_first(self.workers(), lambda worker: self._ask(worker, request_id), kept):
            with suppress(FleetError, PeerFailed, UnknownRequest, CompatMismatch, UnknownPeer):  # then the next best
                return self._go_on_from(copy, request_id, role)
        target = self._owner(request_id, role)
        self._reach.call(target, lambda client: client.release(request_id))  # a copy without its first entries
        self._places.put(request_id, role, target)
        return Recovered(request_id, target.name, {}, None, None)

    def release(self, request_id: str) -> None:
        """Free the request wherever it is placed; a dead worker's share is gone already."""
        for place in self._places.pop(request_id):
            with suppress(NoWorker, WorkerLost):
                worker = self._reach.seen(place.worker)
                if not worker.alive:
                    continue
                try:  # whatever its epoch: it may have been started anew unseen, and got the request then
                    self._reach.call(worker, lambda client: client.release(request_id))
                except TransportError:
                    self._reach.living(request_id, place)
                    raise

    def close(self) -> None:
        """Close the clients and the plane. Requests live on until their leases end."""
        self._plane.close()
        self._reach.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def _owner(self, request_id: str, role: Role, **wanted: Any) -> WorkerInfo:
        return self._plane.owner(self._placed_by(request_id), role, **wanted)

    def _ask(self, worker: WorkerInfo, request_id: str) -> RequestState:
        return self._reach.call(worker, lambda client: client.request(request_id))

    def _still_there(self, request_id: str, place: Place) -> Recovered | None:
        """Where the request stands if its worker still has it. Looks at the worker first."""
        with suppress(NoWorker, WorkerLost, TransportError, UnknownRequest, NotReady):
            self._plane.check(place.worker)
            worker = self._reach.living(request_id, place)
            state = self._ask(worker, request_id)
            return Recovered(request_id, worker.name, committed_of(state), worker.name, None)
        return None

    def _go_on_from(self, copy: Copy, request_id: str, role: Role) -> Recovered:
        """Raises NoWorker: none of this role has the copy's compat."""
        holder, moved, source = copy.holder, None, "kept"
        if isinstance(holder, WorkerInfo) and holder.takes(role):
            target = holder
        else:
            target, began = self._owner(request_id, role, compat=copy.compat), time.monotonic()
            self._reach.call(target, lambda client: client.release(request_id))  # it has less
            if isinstance(holder, WorkerInfo):
                pulled = self._reach.pull(request_id, holder, target, "auto")
                moved = Moved.of(request_id, holder.name, target.name, pulled, time.monotonic() - began)
            else:
                self._reach.call(target, lambda client: client.import_(request_id, holder))
        if isinstance(holder, WorkerInfo):
            source = holder.name
        self._places.put(request_id, role, target)
        return Recovered(request_id, target.name, copy.committed, source, moved)
