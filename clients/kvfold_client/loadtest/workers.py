"""Where steps go: one worker, several in turn, or the workers of a fleet. Nothing is sent anywhere else."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import httpx

from ..client import AsyncClient
from ..errors import AccessDenied

_KEPT_SECONDS = 2.0
"""An idle connection is not used after so long: the worker is about to close it."""

Transport = Callable[[], httpx.AsyncBaseTransport]
Place = Callable[[str], str]
"""Request id → URL of the worker that it belongs to."""


@dataclass(frozen=True, slots=True)
class Worker:
    url: str
    client: AsyncClient
    """Sends what is measured: every call once."""
    retrying: AsyncClient
    """Sends the rest, again if need be."""


class Workers:
    """All that may be sent to. Use it in an `async with`."""

    def __init__(
        self,
        urls: Sequence[str],
        place: Place | None = None,
        *,
        token: str | None = None,
        encoding: Literal["frame", "msgpack"] = "frame",
        timeout: float = 30.0,
        connections: int = 256,
        transport: Transport | None = None,
    ) -> None:
        """`place` None: in turn. `transport` in place of the network, for tests."""
        limits = httpx.Limits(
            max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=_KEPT_SECONDS
        )
        self._transport = transport or (lambda: httpx.AsyncHTTPTransport(limits=limits))
        self._token, self._timeout = token, timeout
        self._encoding: Literal["frame", "msgpack"] = encoding
        self._members = {url: self._connect(url) for url in urls}
        self._turns = itertools.cycle(self._members.values())
        self._place = place

    def _connect(self, url: str) -> Worker:
        def client(retries: int) -> AsyncClient:
            return AsyncClient(
                url,
                self._token,
                encoding=self._encoding,
                timeout=self._timeout,
                retries=retries,
                transport=self._transport(),
            )

        return Worker(url, client(0), client(3))

    def place(self, request_id: str) -> Worker:
        """The worker of a new request. Raises KvfoldError if a fleet has none for it."""
        if self._place is None:
            return next(self._turns)
        url = self._place(request_id)
        if url not in self._members:  # it has joined the fleet since
            self._members[url] = self._connect(url)
        return self._members[url]

    async def describe(self) -> list[dict[str, Any]]:
        """Manifest and, where the token may see them, statistics of every worker. Raises KvfoldError."""
        return [await _describe(worker) for worker in self._members.values()]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for worker in self._members.values():
            await worker.client.aclose()
            await worker.retrying.aclose()


async def _describe(worker: Worker) -> dict[str, Any]:
    described: dict[str, Any] = {"url": worker.url, "manifest": await worker.retrying.manifest()}
    with contextlib.suppress(AccessDenied):  # statistics are for admins; without them there is less to tell
        described["stats"] = await worker.retrying.stats()
    return described
