"""How entries come from one worker's pages to another's: `pull` asks, a BlockMover brings, `verify` compares.

http    ranges of page-free rows over HTTP, to any page size
nixl    out of the peer's registered pages into our own (RDMA, NVLink, shared memory: what UCX finds)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from kvfold_service.arrivals import Incoming
from kvfold_service.caches import CompressorCache
from kvfold_service.movers.peer import PeerLine

NAMES: Final = ("http", "nixl")


@dataclass(frozen=True, slots=True)
class Span:
    """Entries [first, end) of one compressor, and the handles of the peer's pages that hold them, in order."""

    cache: CompressorCache
    first: int
    end: int
    handles: tuple[str, ...]

    @property
    def num_bytes(self) -> int:
        return (self.end - self.first) * self.cache.group.layout.format.entry_bytes


@dataclass(frozen=True, slots=True)
class Move:
    """What a mover is to do: bring these spans of a peer's request into the pages of one that is on its way in."""

    line: PeerLine
    incoming: Incoming
    spans: Sequence[Span]
    peer_epoch: str
    peer_limit: int
    """Bytes that a reply of the peer may have."""


class BlockMover(Protocol):
    name: str

    async def meet(self, line: PeerLine, peer_epoch: str) -> None:
        """Whatever both sides need before anything can move. Raises peer_failed."""
        ...

    async def move(self, move: Move) -> None:
        """Ends when every entry is in place. Raises ServiceError: peer_failed, and what the peer refuses with.

        After an error nothing writes to our pages any more.
        """
        ...
