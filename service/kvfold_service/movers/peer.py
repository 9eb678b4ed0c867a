"""A connection to a peer: calls in the name of our own caller, and one kind of error for whatever goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from functools import cached_property
from typing import Any, Final, Self, TypeVar
from urllib.parse import urlsplit

from kvfold_client import wire
from kvfold_client.wire import Peer
from kvfold_service.errors import ServiceError
from kvfold_service.movers.beat import ANSWER_S, forgotten, renewal, silent, tls

T = TypeVar("T")

_MOST_ERROR_BYTES: Final = 1 << 16
_PASSED_ON: Final = frozenset({"unknown_request", "queue_full", "quota_exceeded"})
"""Refusals of a peer that mean the same to our caller; 429 may be tried again."""


def peer_failed(peer: Peer, reason: str, sentence: str, **details: Any) -> ServiceError:
    """reason: unreachable, died, refused, changed (its request), corrupt (the bytes)."""
    return ServiceError("peer_failed", f"peer {peer.name}: {sentence}", peer=peer.name, reason=reason, **details)


def request_path(request_id: str, suffix: str = "") -> str:
    """The path of a request; dots are escaped, since an id of dots alone would be taken for a folder."""
    return f"/v1/requests/{request_id.replace('.', '%2E')}{suffix}"


def entries_call(request_id: str, compressor: str, first: int, end: int) -> tuple[str, dict[str, Any]]:
    """Path and message of the call for entries [first, end); for none of them, it only renews the lease."""
    message = {"compressor": compressor, "from_entry": first, "to_entry": end}
    return request_path(request_id, "/entries"), {"version": wire.PROTOCOL_VERSION} | message


class PeerLine:
    """One connection to a peer, for one thread at a time; `cut` may come from any. Speaks for our caller.

    As long as it is entered, the peer's lease of the request is renewed, by a call that names one of its compressors.
    `patience` is how many seconds a living peer may be silent, `most_bytes` what a reply of it may have.
    """

    _silent: asyncio.Task[None]
    _forgotten: asyncio.Task[None]

    def __init__(
        self,
        peer: Peer,
        authorization: str | None,
        request_id: str,
        compressor: str,
        *,
        patience: float,
        most_bytes: int,
        threads: Executor,
    ) -> None:
        self.peer, self._patience, self._most_bytes, self._threads = peer, patience, most_bytes, threads
        self._headers = {"Accept": wire.FRAME} | ({"Authorization": authorization} if authorization else {})
        self._renewal = renewal(*entries_call(request_id, compressor, 0, 0), authorization)
        self._is_cut = self._has_met = False

    async def __aenter__(self) -> Self:
        self._silent = asyncio.create_task(silent(self.peer))
        self._forgotten = asyncio.create_task(forgotten(self.peer, self._renewal))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._silent.cancel()
        self._forgotten.cancel()
        self._http.close()

    @cached_property
    def _http(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.peer.url)
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "https":
            return http.client.HTTPSConnection(host, port, timeout=ANSWER_S, context=tls())
        return http.client.HTTPConnection(host, port, timeout=ANSWER_S)

    async def ask(
        self,
        method: str,
        path: str,
        message: Mapping[str, Any] | None = None,
        *,
        view: memoryview | None = None,
        authorization: str | None = None,
    ) -> dict[str, Any]:
        """A call and its message, in our caller's name or another; it lies in `view`, if there is one, and stays there.

        Raises peer_failed, and what it is refused with.
        """
        return await self.while_alive(lambda: self._exchange(method, path, message, view, authorization))

    async def while_alive(self, blocking: Callable[[], T]) -> T:
        """Run it on a thread. If the peer stops answering, or has not the request, the line is cut, which must end it.

        Raises peer_failed, unknown_request.
        """
        loop = asyncio.get_running_loop()
        work = asyncio.ensure_future(loop.run_in_executor(self._threads, blocking))
        try:
            await asyncio.wait({work, self._silent, self._forgotten}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            self.cut()
            await asyncio.wait({work})
            work.exception()
            raise self._lost()
        except asyncio.CancelledError:
            self.cut()
            await asyncio.wait({work})
            raise

    def _lost(self) -> ServiceError:
        if self._silent.done():
            return peer_failed(self.peer, "died", "it does not answer any more")
        sentence = f"peer {self.peer.name}: there is no request of this id, or no more"
        return ServiceError("unknown_request", sentence, peer=self.peer.name)

    @contextlib.contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Around all that takes a reply of the peer apart: what is not as it should be is the peer's fault."""
        try:
            yield
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            why = f"{type(error).__name__}: {error}"[:200]
            raise peer_failed(self.peer, "refused", f"{what} cannot be read ({why})") from None

    def cut(self) -> None:
        """End whatever waits for the peer."""
        self._is_cut = True
        if (connected := self._http.sock) is not None:
            try:
                connected.shutdown(socket.SHUT_RDWR)
            except OSError:  # it was closed from the other side
                return

    @property
    def is_cut(self) -> bool:
        return self._is_cut

    def _exchange(
        self,
        method: str,
        path: str,
        message: Mapping[str, Any] | None,
        view: memoryview | None,
        authorization: str | None,
    ) -> dict[str, Any]:
        body = None if message is None else wire.encode(wire.MSGPACK, message)
        headers = self._headers | ({"Authorization": authorization} if authorization else {})
        headers |= {"Content-Type": wire.MSGPACK} if body is not None else {}
        try:
            response = self._response(method, path, body, headers)
            data = self._read(response, view)
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            raise peer_failed(self.peer, "died", f"the connection broke ({type(error).__name__})") from None
        return self._message(response, data)

    def _response(
        self, method: str, path: str, body: bytes | None, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        """A peer closes connections that nobody uses: then once more on a new one. Every call may be sent twice."""
        if self._http.sock is not None:
            try:
                self._http.request(method, path, body, headers)
                return self._http.getresponse()
            except (ConnectionError, http.client.RemoteDisconnected):
                self._http.close()
        self._connect()
        self._http.request(method, path, body, headers)
        return self._http.getresponse()

    def _connect(self) -> None:
        if self._is_cut:
            raise ConnectionAbortedError
        try:
            self._http.connect()
        except (OSError, UnicodeError) as error:  # UnicodeError: no such host name
            reason = "died" if self._has_met else "unreachable"
            raise peer_failed(self.peer, reason, f"it cannot be reached ({type(error).__name__})") from None
        assert self._http.sock is not None
        self._http.sock.settimeout(self._patience)
        self._has_met = True
        if self._is_cut:  # meanwhile
            raise ConnectionAbortedError

    def _read(self, response: http.client.HTTPResponse, view: memoryview | None) -> memoryview:
        """The body, into `view` if it is a success and there is one."""
        if response.status != http.client.OK:
            view, most = None, _MOST_ERROR_BYTES
        else:
            most = self._most_bytes if view is None else len(view)
        length = response.length
        if length is None or length > most:
            self._http.close()
            says = "does not say its length before it comes" if length is None else f"has {length} bytes"
            raise peer_failed(self.peer, "refused", f"its reply {says}, and {most} bytes at most were expected")
        view, end = memoryview(bytearray(length)) if view is None else view, 0
        while end < length:
            got = response.readinto(view[end:length])
            if not got:
                raise ConnectionResetError
            end += got
        return view[:length]

    def _message(self, response: http.client.HTTPResponse, data: memoryview) -> dict[str, Any]:
        with self.reading(f"its reply of status {response.status}"):
            message = _decoded(response.headers.get("Content-Type", "").partition(";")[0], data)
            if response.status == http.client.OK:
                return message
            code, text = str(message["code"])[:64], str(message["message"])[:300]
        if code in _PASSED_ON:
            retry_after = 1.0 if code in wire.RETRYABLE else None
            raise ServiceError(code, f"peer {self.peer.name}: {text}", retry_after=retry_after, peer=self.peer.name)
        reason = "changed" if code in ("stale_handle", "unknown_handle") else "refused"
        raise peer_failed(self.peer, reason, f"{code}: {text}", refusal=code)


def _decoded(content_type: str, data: memoryview) -> dict[str, Any]:
    """Raises ValueError: no message, or no map."""
    if content_type != "application/json":
        return wire.decode(content_type, data)
    try:
        message = json.loads(bytes(data))
        json.dumps(message, ensure_ascii=False).encode()  # half a character could be told to nobody
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(message, dict):
        raise ValueError("no map")
    return message
