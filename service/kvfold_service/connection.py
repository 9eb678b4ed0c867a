"""One HTTP connection: uvicorn's protocol, with bounds on what may come around a body, and on how many there are.

uvicorn and its parser bound neither the head of a request nor its trailers and chunk extensions, nor how many calls
wait behind one that runs, and let a client take any time for its head, and for what it still sends after it was
answered. Nor may those that only wait, for the end of a TLS handshake too, use up all connections that the worker can
have.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
from asyncio.events import TimerHandle
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES: Final = 64 << 10
CROWDED: Final = "kvfold.crowded"
"""In a request's state: there are too many connections, and this one came last."""
OTHER_FILES: Final = 256
"""What a process may have open beside its connections: devices, libraries, connections that are just refused."""
MOST_BEHIND: Final = 16
"""Calls of one connection that may wait behind the one that runs."""
_CHUNK_OVERHEAD: Final = 8
"""Bytes around each byte of a body that may come on top: `1\\r\\nx\\r\\n` has 5."""


class Connections:
    """At most `most` at a time, as far as possible: who comes takes the place of the one that has waited longest.

    A connection waits while no call of it runs: in its handshake, before its first head is whole, and after each reply.
    If all are busy the newcomer's calls are refused, unless another has ended by then.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._open: set[Connection | Handshake] = set()
        self._waiting: dict[Connection | Handshake, None] = {}

    @property
    def num_open(self) -> int:
        return len(self._open)

    def enter(self, connection: Connection | Handshake) -> bool:
        """Whether there was room."""
        while len(self._open) >= self.most and self._waiting:
            oldest = next(iter(self._waiting))
            self.leave(oldest)
            oldest.transport.abort()
        self._open.add(connection)
        self.wait(connection)
        return len(self._open) <= self.most

    def wait(self, connection: Connection | Handshake) -> None:
        if connection in self._open:
            self._waiting[connection] = None

    def work(self, connection: Connection | Handshake) -> None:
        self._waiting.pop(connection, None)

    def leave(self, connection: Connection | Handshake) -> None:
        self._open.discard(connection)
        self._waiting.pop(connection, None)


class Parser(httptools.HttpRequestParser):
    """Whoever asks for another protocol beside (HTTP/2: Java's and curl's clients do) goes on without it.

    httptools takes what follows such a head for the other protocol, so the head is parsed again without the question.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._connection = connection

    def feed_data(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while not self._connection.transport.is_closing():
            try:
                super().feed_data(rest)
                return
            except httptools.HttpParserUpgrade as asked:
                if self.get_method() == b"CONNECT":
                    raise httptools.HttpParserError("nothing is connected here") from None
                super().feed_data(self._connection.head_without_upgrade(self.get_method()))
                rest = rest[asked.args[0] :]


class Connection(HttpToolsProtocol):
    patience: float
    """Seconds for a handshake, for a head, and for the rest of a body whose call is already answered."""
    crowd: Connections
    handshake: Handshake | None = None
    """What counts for it until it is made."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = Parser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
        self._head = self._beside_body = 0
        self._timer: TimerHandle | None = None
        self._had_room = False

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if self.handshake is not None:
            self.crowd.leave(self.handshake)
        self._had_room = self.crowd.enter(self)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        self.crowd.leave(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._beside_body += len(data)
        super().data_received(data)
        if self._beside_body > HEAD_BYTES:
            self._refuse_head()

    def eof_received(self) -> bool:
        """Whether the transport stays: who has sent a whole call and says that it sends no more still gets the reply.

        Not with TLS, whose transports are closed all the same.
        """
        if self.scheme == "https" or self.cycle is None or self.cycle.response_complete or self.cycle.more_body:
            return False
        self.cycle.keep_alive = False
        return True

    def on_message_begin(self) -> None:
        self._head = 0
        self._start_timer()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count_head(len(name) + len(value))

    def on_headers_complete(self) -> None:
        if self.transport.is_closing() or self.parser.should_upgrade():
            return
        if len(self.pipeline) >= MOST_BEHIND:
            self.transport.abort()
            return
        self._stop_timer()
        self.crowd.work(self)
        self._had_room = self._had_room or self.crowd.num_open <= self.crowd.most
        self.scope.setdefault("state", {})[CROWDED] = not self._had_room
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._beside_body = max(0, self._beside_body - (1 + _CHUNK_OVERHEAD) * len(body))
        if not self.transport.is_closing():
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.transport.is_closing() or self.parser.should_upgrade():
            return
        self._beside_body = 0
        self._stop_timer()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # no pipelined call of it runs
            self.crowd.wait(self)
        if self.cycle.more_body:
            self._start_timer()

    def head_without_upgrade(self, method: bytes) -> bytes:
        """The head that was just parsed, but for its Upgrade and what that says of the connection."""
        lines = [method + b" " + self.url + b" HTTP/1.1"]
        for name, value in self.headers:
            if name == b"connection":
                value = b"close" if b"close" in value.lower() else b"keep-alive"
            if name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join([*lines, b"", b""])

    def _count_head(self, num_bytes: int) -> None:
        self._head += num_bytes
        if self._head > HEAD_BYTES:
            self._refuse_head()

    def _refuse_head(self) -> None:
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self.send_400_response("The head of the request is too large.")
        else:
            self.transport.abort()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.patience, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class Handshake(SSLProtocol):
    """TLS around a connection, and what is counted until there is one.

    asyncio's own, which tells of a socket before anything has come; uvloop's would tell when the handshake is over.
    """

    transport: asyncio.Transport

    def __init__(self, context: ssl.SSLContext, connection: Connection) -> None:
        loop, patience = asyncio.get_running_loop(), connection.patience
        super().__init__(loop, connection, context, None, server_side=True, ssl_handshake_timeout=patience)  # type: ignore[arg-type]
        self._crowd = connection.crowd
        connection.handshake = self

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._crowd.enter(self)
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._crowd.leave(self)
        super().connection_lost(exc)


def allow_files(connections: int) -> int:
    """Raise this process's limit of open files for so many connections; returns how many it allows."""
    wanted = connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return connections if soft == resource.RLIM_INFINITY else max(1, min(connections, soft - OTHER_FILES))


def protocol(
    patience: float, connections: Connections, tls: ssl.SSLContext | None
) -> Callable[..., asyncio.BaseProtocol]:
    """What makes connections of this patience, counted among these."""
    made = type("Connection", (Connection,), {"patience": patience, "crowd": connections})
    return made if tls is None else lambda **given: Handshake(tls, made(**given))
