"""The control plane of a peers file: who is in it, who of them answers, whom a request belongs to."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self

from ..peers import Peer, PeersError, parse_peers
from .members import Members


class StaticPlane(Members):
    """Members are those of the file; they are asked every `health_seconds`. Editing the file changes the members.

    A file that cannot be read any more leaves them as they are. Raises OSError, PeersError if it never could.
    """

    def __init__(self, path: Path, *, health_seconds: float = 1.0) -> None:
        super().__init__(health_seconds)
        self._path = path
        self._peers = parse_peers(path.read_text(encoding="utf-8"))

    @classmethod
    def from_file(cls, path: str | Path, *, health_seconds: float = 1.0) -> Self:
        """One worker a line, `NAME URL [ROLE]` (prefill, decode or any); # starts a comment."""
        return cls(Path(path), health_seconds=health_seconds)

    def find(self) -> Mapping[str, Peer]:
        try:
            self._peers = parse_peers(self._path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, PeersError):  # being edited; the next look is soon
            return self._peers
        return self._peers
