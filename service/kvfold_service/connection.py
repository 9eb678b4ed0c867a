"""One HTTP connection: uvicorn's protocol, with bounds on what may come around a body, and on how many there are.

uvicorn and its parser bound neither the head of a request nor its trailers and chunk extensions, and let a client take
any time for its head, and for what it still sends after it was answered. Nor may those that only wait use up all
connections that the worker can have.
"""

from __future__ import annotations

import asyncio
import resource
from asyncio.events import TimerHandle
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES: Final = 64 << 10
CROWDED: Final = "kvfold.crowded"
"""In a request's state: there are too many connections, and this one came last."""
OTHER_FILES: Final = 256
"""What a process may have open beside its connections: devices, libraries, connections that still shake hands."""
_CHUNK_OVERHEAD: Final = 8
"""Bytes around each byte of a body that may come on top: `1\\r\\nx\\r\\n` has 5."""


class Connections:
    """At most `most` at a time, as far as possible: who comes takes the place of the one that has waited longest.

    A connection waits while no call of it runs: before its first head is whole, and after each reply. If all are busy
    the newcomer's calls are refused, unless another has ended by then.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: set[Connection] = set()
        self._waiting: dict[Connection, None] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def enter(self, connection: Connection) -> bool:
        """Whether there was room."""
        while len(self._open) >= self.most and self._waiting:
            oldest = next(iter(self._waiting))
            self.leave(oldest)
            oldest.transport.abort()
        self._open.add(connection)
        self.wait(connection)
        return len(self._open) <= self.most

    def wait(self, connection: Connection) -> None:
        if connection in self._open:
            self._waiting[connection] = None

    def work(self, connection: Connection) -> None:
        self._waiting.pop(connection, None)

    def leave(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)


class Connection(HttpToolsProtocol):
    patience: float
    """Seconds for a head, and for the rest of a body whose call is already answered."""
    crowd: Connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._beside_body = 0
        self._timer: TimerHandle | None = None
        self._had_room = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._had_room = self.crowd.enter(self)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.crowd.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._beside_body += len(data)
        super().data_received(data)
        if self._beside_body > HEAD_BYTES and not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.send_400_response("The head of the request is too large.")
            else:
                self.transport.abort()

    def on_message_begin(self) -> None:
        self._start_timer()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self.crowd.work(self)
        self._had_room = self._had_room or self.crowd.num_open <= self.crowd.most
        self.scope.setdefault("state", {})[CROWDED] = not self._had_room
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._beside_body = max(0, self._beside_body - (1 + _CHUNK_OVERHEAD) * len(body))
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._beside_body = 0
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # no pipelined call of it runs
            self.crowd.wait(self)
        if self.cycle.more_body:
            self._start_timer()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.patience, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def allow_files(connections: int) -> int:
    """Raise this process's limit of open files for so many connections; returns how many it allows."""
    wanted = connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else max(1, min(connections, soft - OTHER_FILES))


def protocol(patience: float, connections: Connections) -> type[Connection]:
    """The class of connections with this patience, counted among these."""
    return type("Connection", (Connection,), {"patience": patience, "crowd": connections})
