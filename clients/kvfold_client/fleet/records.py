"""What a fleet did, as values."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from ..replies import Pulled, RequestState


@dataclass(frozen=True, slots=True)
class Moved:
    """A request that went from one worker to another, verified there."""

    request_id: str
    source: str
    target: str
    """Names of the workers."""
    mover: str
    """http or nixl; none if source and target are one."""
    num_entries: int
    entry_bytes: int
    """Entries of closed windows, all compressors together."""
    num_open_rows: int
    open_row_bytes: int
    """The open windows' rows: the only raw state that moves."""
    seconds: float
    """From the call to the verified request."""
    state: RequestState
    """The request at the target."""

    @classmethod
    def of(cls, request_id: str, source: str, target: str, pulled: Pulled, seconds: float) -> Self:
        rows, entries = (pulled.num_open_rows, pulled.open_row_bytes), (pulled.num_entries, pulled.entry_bytes)
        return cls(request_id, source, target, pulled.mover, *entries, *rows, seconds, pulled.state)

    @classmethod
    def nothing(cls, request_id: str, worker: str, state: RequestState) -> Self:
        """It stays where it is."""
        return cls(request_id, worker, worker, "none", 0, 0, 0, 0, 0.0, state)


@dataclass(frozen=True, slots=True)
class Recovered:
    """Where a request goes on, and on which worker.

    committed  compressor → tokens that need not be sent again; a compressor that is absent begins at 0
    source     whose state it was: a worker's name, "kept" (an export), or None: nobody had any
    moved      what came from another worker, None if nothing had to
    """

    request_id: str
    worker: str
    committed: Mapping[str, int]
    source: str | None
    moved: Moved | None

    @property
    def start(self) -> int:
        """The position from which on tokens are to be sent again, the same in all compressors; 0: all of them.

        Raises ValueError if the compressors differ: then each goes on at its own of `committed`.
        """
        starts = set(self.committed.values()) or {0}
        if len(starts) > 1:
            raise ValueError(f"the compressors of {self.request_id} go on at different positions: see committed")
        return starts.pop()
