"""The peers of a worker, as a file names them. A worker takes requests from these addresses and from no other."""

from __future__ import annotations

import logging
from pathlib import Path

from kvfold_client.wire import Peer, PeersError, parse_peers
from kvfold_service.errors import ServiceError, StartError

log = logging.getLogger("kvfold")


class Peers:
    """Peers of --peers-file, or none. The file is read again when it has changed; a bad one changes nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._peers: dict[str, Peer] = {}
        if path is not None:
            try:
                self._read(path)
            except (OSError, UnicodeDecodeError) as error:
                raise StartError(f"--peers-file cannot be read: {type(error).__name__}") from None
            except PeersError as error:
                raise StartError(f"--peers-file {path.name}: {error}") from None

    def find(self, name: str) -> Peer:
        """Raises unknown_peer."""
        if self._path is not None:
            try:
                self._read(self._path)
            except (OSError, UnicodeDecodeError, PeersError) as error:
                log.warning("--peers-file is left as it was: %s", error)
        peer = self._peers.get(name)
        if peer is None:
            raise ServiceError("unknown_peer", "the peers file of this worker names no such worker", peer=name)
        return peer

    def _read(self, path: Path) -> None:
        found = path.stat()
        seen = found.st_mtime_ns, found.st_size, found.st_ino
        if seen != self._seen:
            self._peers = parse_peers(path.read_text(encoding="utf-8"))
            self._seen = seen
