"""What every control plane can say: which workers there are, and which of them a request belongs to."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, Protocol

Role = Literal["prefill", "decode", "any"]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker as it was last seen."""

    name: str
    url: str
    role: Role
    """What it is for; `any` is both."""
    alive: bool
    """Its process answers."""
    accepting: bool = False
    """It takes steps of new requests: alive, ready and not draining."""
    epoch: str | None = None
    """16 hex digits, new at every start; None: not seen yet."""
    compat: str | None = None
    """What must agree before a request moves; None: not seen yet."""

    def takes(self, role: Role) -> bool:
        """Whether a request may be placed there in this role."""
        return self.accepting and (role == "any" or self.role in (role, "any"))


class ControlPlane(Protocol):
    """Membership and placement. No tensor, entry or row goes through it."""

    def open(self, token: str | None) -> None:
        """Begin to look after the workers, with this bearer token; returns when each was looked at once."""
        ...

    def close(self) -> None:
        """Stop looking; the workers stay as they are."""
        ...

    def workers(self) -> tuple[WorkerInfo, ...]:
        """All members by name, dead ones too, as they were last seen."""
        ...

    def owner(
        self, request_id: str, role: Role = "any", *, besides: Collection[str] = (), compat: str | None = None
    ) -> WorkerInfo:
        """Whom a request belongs to, among accepting workers of this role, without those named in `besides`.

        Rendezvous hashing: the worker of the greatest hash of (worker, request). One that joins takes requests for
        itself only, one that leaves gives up its own only; the others stay where they are. Raises NoWorker.
        """
        ...

    def look(self) -> None:
        """Look at all of them now, and who they are."""
        ...

    def check(self, name: str) -> WorkerInfo:
        """Look at one worker now. Raises NoWorker if it is no member."""
        ...

    def watch(self, changed: Callable[[WorkerInfo], None]) -> None:
        """From now on call `changed` (on the plane's thread) whenever a worker joins, dies, returns or leaves."""
        ...
