"""One HTTP connection: uvicorn's protocol, with bounds on what may come around a body.

uvicorn and its parser bound neither the head of a request nor its trailers and chunk extensions, and let a client take
any time for its head, and for what it still sends after it was answered.
"""

from __future__ import annotations

import asyncio
from asyncio.events import TimerHandle
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_BYTES: Final = 64 << 10
_CHUNK_OVERHEAD: Final = 8
"""Bytes around each byte of a body that may come on top: `1\\r\\nx\\r\\n` has 5."""


class Connection(HttpToolsProtocol):
    patience: float = 30.0
    """Seconds for a head, and for the rest of a body whose call is already answered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._beside_body = 0
        self._timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
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
        if self.cycle.more_body:
            self._start_timer()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self.patience, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def patient(seconds: float) -> type[Connection]:
    """The class of connections with this patience."""
    return type("Connection", (Connection,), {"patience": seconds})
