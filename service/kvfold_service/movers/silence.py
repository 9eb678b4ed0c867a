"""How a peer's death is told from its slowness.

A process that is gone closes its connections: that is seen at once. One that hangs, or whose machine is gone, does not:
so, as long as an exchange runs, the peer's /livez is asked beside it, which any living worker answers at once, however
busy it is.
"""

from __future__ import annotations

import asyncio
import ssl
from functools import cache
from typing import Final
from urllib.parse import urlsplit

from kvfold_client.wire import Peer

ANSWER_S: Final = 0.7
_PAUSE_S: Final = 0.2
"""A peer that has not answered for both together is dead."""


@cache
def tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def silent(peer: Peer) -> None:
    """Ends when the peer no longer answers."""
    await asyncio.sleep(_PAUSE_S)
    while await _answers(peer):
        await asyncio.sleep(_PAUSE_S)


async def _answers(peer: Peer) -> bool:
    """Whether anything that speaks HTTP answers there, whatever it says."""
    parts = urlsplit(peer.url)
    context = tls() if parts.scheme == "https" else None
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(parts.hostname, parts.port, ssl=context)
            try:
                writer.write(b"GET /livez HTTP/1.1\r\nHost: peer\r\nConnection: close\r\n\r\n")
                return (await reader.readline()).startswith(b"HTTP/")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
