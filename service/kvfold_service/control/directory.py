"""Who runs where: what the actors of a Ray cluster report to one of them. Addresses only; no request is known here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

FORGET_S: Final = 60.0
"""A worker that has not been reported for so long has left."""
Table = dict[str, tuple[str, str]]
"""Name → (url, role)."""


class Directory:
    """Kept in memory: if it is lost, the next reports fill it again."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._workers: dict[str, tuple[str, str, float]] = {}

    def report(self, name: str, url: str, role: str) -> Table:
        """A worker is there. Returns all of them."""
        self._workers[name] = url, role, self._clock()
        return self.table()

    def leave(self, name: str) -> None:
        self._workers.pop(name, None)

    def table(self) -> Table:
        oldest = self._clock() - FORGET_S
        return {name: (url, role) for name, (url, role, seen) in sorted(self._workers.items()) if seen >= oldest}
