"""Clients of many workers: they share the certificates that they trust, which are dear to read, and can be cut off."""

import functools
import socket
import ssl
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import httpx

from ..client import Client

CONNECT_S = 3.0
"""A connection to a worker is there in this time, or is tried again: no socket can be shut down before it is made."""
_OPENED = ("connection.connect_tcp.complete", "connection.start_tls.complete")  # httpcore's names


@functools.cache
def _tls() -> ssl.SSLContext:
    """Reading the authorities takes some 30 ms, for each client anew."""
    return httpx.create_ssl_context()


class Line(httpx.BaseTransport):
    """The connections to one worker. `cut` ends whatever waits on them; until `mend` nothing is sent. Threads share it.

    A shut socket wakes who reads from it, which closing it does not.
    """

    def __init__(self) -> None:
        self._http = httpx.HTTPTransport(verify=_tls())
        self._lock = threading.Lock()
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._is_cut = False

    def cut(self) -> None:
        with self._lock:
            self._is_cut = True
            for connected in self._sockets:
                _shut(connected)

    def mend(self) -> None:
        with self._lock:
            self._is_cut = False

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if self._is_cut:
            raise httpx.ConnectError("the worker was found dead", request=request)
        timeout = request.extensions.get("timeout", {})
        request.extensions["timeout"] = {**timeout, "connect": min(timeout.get("connect") or CONNECT_S, CONNECT_S)}
        request.extensions["trace"] = self._note
        return self._http.handle_request(request)

    def close(self) -> None:
        self._http.close()

    def _note(self, event: str, info: Mapping[str, Any]) -> None:
        if event in _OPENED:
            connected = info["return_value"].get_extra_info("socket")
            with self._lock:
                self._sockets.add(connected)
                if self._is_cut:
                    _shut(connected)


def _shut(connected: socket.socket) -> None:
    with suppress(OSError):  # it is closed
        socket.socket.shutdown(connected, socket.SHUT_RDWR)  # an SSLSocket's own would drop its keys under the reader


def connect(
    url: str,
    token: str | None,
    *,
    encoding: Literal["frame", "msgpack"] = "frame",
    timeout: float | None = 30.0,
    retries: int = 3,
    line: Line | None = None,
) -> Client:
    transport = httpx.HTTPTransport(verify=_tls()) if line is None else line
    return Client(url, token, encoding=encoding, timeout=timeout, retries=retries, transport=transport)
