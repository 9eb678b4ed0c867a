"""What runs beside a pull: whether the peer lives, told from its slowness, and its lease of the request kept up.

A process that is gone closes its connections: that is seen at once. One that hangs, or whose machine is gone, does not:
so its /livez is asked, which any living worker answers at once, however busy it is. The lease is renewed on connections
of its own too, and at a fixed rate, so that no answer that is slow to come lets it end.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from functools import cache
from typing import Any, Final
from urllib.parse import urlsplit

from kvfold_client import wire
from kvfold_client.wire import Peer

ANSWER_S: Final = 0.7
_PAUSE_S: Final = 0.2
"""A peer that has not answered for both together is dead."""
_RENEW_S: Final = 0.3
"""Between two renewals: three in the shortest lease that is of use, a second."""
_LIVEZ: Final = b"GET /livez HTTP/1.1\r\nHost: peer\r\nConnection: close\r\n\r\n"
_UNKNOWN: Final = b"unknown_request"


@cache
def tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def silent(peer: Peer) -> None:
    """Ends when the peer no longer answers: when nothing that speaks HTTP does, whatever it says."""
    await asyncio.sleep(_PAUSE_S)
    while await _reply(peer, _LIVEZ, b"HTTP/"):
        await asyncio.sleep(_PAUSE_S)


async def forgotten(peer: Peer, renewal: bytes) -> None:
    """Ends when the peer says that it has no such request; until then it keeps the one it has."""
    asked: set[asyncio.Task[bytes]] = set()
    try:
        while not any(task.done() and task.result().startswith(b"HTTP/1.1 404 ") for task in asked):
            asked = {task for task in asked if not task.done()}
            asked.add(asyncio.create_task(_reply(peer, renewal, _UNKNOWN)))
            await asyncio.sleep(_RENEW_S)
    finally:
        for task in asked:
            task.cancel()


def renewal(path: str, message: Mapping[str, Any], authorization: str | None) -> bytes:
    """The call that renews, as it is sent."""
    body = wire.encode(wire.MSGPACK, message)
    head = [f"POST {path} HTTP/1.1", "Host: peer", "Connection: close"]
    head += [f"Content-Type: {wire.MSGPACK}", f"Content-Length: {len(body)}"]
    head += [f"Authorization: {authorization}"] if authorization else []
    return "\r\n".join([*head, "", ""]).encode("latin-1") + body


async def _reply(peer: Peer, call: bytes, mark: bytes) -> bytes:
    """What comes up to these bytes, in time; nothing if they do not come."""
    parts = urlsplit(peer.url)
    context = tls() if parts.scheme == "https" else None
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=context)
            try:
                writer.write(call)
                return await reader.readuntil(mark)
            finally:
                writer.close()
    except (OSError, UnicodeError, EOFError, asyncio.LimitOverrunError):  # UnicodeError: no such host name
        return b""
