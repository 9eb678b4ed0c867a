"""Who still has how much of a request: copies on living workers, and one that the caller kept."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ..errors import KvfoldError
from ..replies import Exported, RequestState
from .plane import WorkerInfo

_ASKED_AT_A_TIME = 16


@dataclass(frozen=True, slots=True)
class Copy:
    """Entries from the first on and open rows at a position, on a worker or in the caller's hands."""

    holder: WorkerInfo | Exported
    compat: str | None
    committed: Mapping[str, int]
    """By compressor, those with tokens."""

    @property
    def rank(self) -> tuple[int, int, bool]:
        """More tokens are better; of equals, those on a worker, which need not come over the network from here."""
        tokens = self.committed.values()
        return min(tokens, default=0), sum(tokens), isinstance(self.holder, WorkerInfo)


def best_first(
    workers: Iterable[WorkerInfo], ask: Callable[[WorkerInfo], RequestState], kept: Exported | None
) -> list[Copy]:
    """Every copy that somebody has of a request, the one with the most tokens first. Asks all living workers."""
    living = [worker for worker in workers if worker.alive]
    with ThreadPoolExecutor(min(_ASKED_AT_A_TIME, len(living) or 1)) as threads:
        found = threads.map(lambda worker: _copy(worker, ask), living)
        copies = [copy for copy in found if copy is not None]
    if kept is not None and not any(part.first_entry or part.entries is None for part in kept.compressors.values()):
        copies.append(Copy(kept, kept.compat, {name: part.committed for name, part in kept.compressors.items()}))
    return sorted(copies, key=lambda copy: copy.rank, reverse=True)


def _copy(worker: WorkerInfo, ask: Callable[[WorkerInfo], RequestState]) -> Copy | None:
    try:
        state = ask(worker)
    except KvfoldError:  # it has none, or cannot tell: not a copy to rely on
        return None
    committed = committed_of(state)
    if not committed or any(part.first_entry for part in state.values()):
        return None
    return Copy(worker, worker.compat, committed)


def committed_of(state: RequestState) -> dict[str, int]:
    """Tokens by compressor, of those that have any."""
    return {name: part.committed for name, part in state.items() if part.committed}


def is_ahead(state: RequestState, other: RequestState) -> bool:
    """Whether any compressor has more tokens than in the other."""
    committed, theirs = committed_of(state), committed_of(other)
    return any(num_tokens > theirs.get(name, 0) for name, num_tokens in committed.items())
