"""What all calls of one worker share, and whether it takes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

from fastapi import Request, Response

from kvfold_client import wire
from kvfold_service.admission import Admission
from kvfold_service.auth import Caller, Tokens
from kvfold_service.connection import CROWDED, Connections
from kvfold_service.engine import Engine
from kvfold_service.errors import BrokenDeviceError, ServiceError
from kvfold_service.ingest import Body, decode, receive, reply_type_of
from kvfold_service.memory import Encoded, StepMemory
from kvfold_service.metrics import Metrics
from kvfold_service.movers.pull import Pulls
from kvfold_service.sending import Sending
from kvfold_service.settings import Settings
from kvfold_service.staging import Staging

if TYPE_CHECKING:
    from kvfold_service.tracing import Tracing

log = logging.getLogger("kvfold")


SPAN: Final = "kvfold.span"
"""In an ASGI scope: the call's span, if spans are wanted."""


def draining() -> ServiceError:
    return ServiceError("draining", "the worker is about to stop; use another one", retry_after=1.0)


class Service:
    """Event loop only.

    not_ready  the reason why no call is served, or None
    draining   no step and no import is admitted any more
    suspect    set when a step failed: the data path must be proven before it is trusted further
    tracing    where spans go, or None
    """

    def __init__(self, settings: Settings, engine: Engine, tokens: Tokens, tracing: Tracing | None = None) -> None:
        self.settings, self.engine, self.worker, self.tokens = settings, engine, engine.worker, tokens
        self.worker.quotas = tokens.quotas
        self.staging = Staging(settings.staging())
        self.admission = Admission(self.staging, settings.max_body_bytes, settings.max_queue, tokens.quotas)
        self.sending = Sending(settings.max_body_bytes, settings.staging())
        self.memory = StepMemory(settings.remembered_steps)
        self.connections = Connections(settings.max_connections)
        self.metrics = Metrics(engine, self.admission, self.connections)
        self.running: set[asyncio.Task[Encoded]] = set()
        self.not_ready: str | None = "starting"
        self.draining = False
        self.suspect = asyncio.Event()
        self.tracing = tracing
        self.pulls = Pulls(self)

    # -- who is let in -------------------------------------------------------------------------------------------

    def known_caller(self, request: Request, *roles: str) -> Caller:
        """Raises unauthorized, forbidden."""
        given = request.headers.getlist("authorization")
        caller = self.tokens.caller(given[0] if len(given) == 1 else None)
        if roles:
            caller.expect(*roles)
        return caller

    def trusted_caller(self, request: Request, *roles: str) -> Caller:
        """Raises unauthorized, forbidden, not_ready."""
        caller = self.known_caller(request, *roles)
        if self.not_ready:
            raise ServiceError("not_ready", f"the worker is not ready: {self.not_ready}", retry_after=1.0)
        return caller

    def caller(self, request: Request, *roles: str) -> Caller:
        """For calls about what is there. Raises unauthorized, forbidden, not_ready, queue_full."""
        caller = self.trusted_caller(request, *roles)
        self._expect_room(request)
        return caller

    def admitted(self, request: Request, *roles: str) -> Caller:
        """For calls that bring something new. Raises unauthorized, forbidden, not_ready, draining, queue_full."""
        caller = self.trusted_caller(request, *roles)
        if self.draining:
            raise draining()
        self._expect_room(request)
        return caller

    def _expect_room(self, request: Request) -> None:
        if request.scope.get("state", {}).get(CROWDED):
            raise ServiceError(
                "queue_full",
                "too many connections are busy; try again later",
                retry_after=1.0,
                max_connections=self.connections.most,
            )

    async def receive(self, request: Request, caller: Caller) -> Body:
        """The body in staging; whoever asked for it leaves its place."""
        body = await receive(request, self.admission, caller.tenant, self.settings.receive_timeout)
        self.metrics.bytes_in.inc(len(body.view))
        return body

    @contextlib.asynccontextmanager
    async def received(self, request: Request, caller: Caller) -> AsyncIterator[Body]:
        """A body that lies in staging until the context ends."""
        body = await self.receive(request, caller)
        try:
            yield body
        finally:
            body.place.leave()

    @contextlib.asynccontextmanager
    async def message(self, request: Request, caller: Caller) -> AsyncIterator[dict[str, Any]]:
        """A received and decoded body; what it holds lies in staging until the context ends."""
        async with self.received(request, caller) as body:
            yield await decode(body)

    def reply(
        self, request: Request, message: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
    ) -> Response:
        """In the encoding that the request asks for."""
        media_type = reply_type_of(request)
        data = wire.encode_plain(media_type, message)
        self.metrics.bytes_out.inc(len(data))
        return Response(data, status, headers, media_type)

    # -- how it is -----------------------------------------------------------------------------------------------

    @property
    def unready(self) -> str | None:
        """Why no step would be admitted."""
        return self.not_ready or ("draining" if self.draining else None)

    def distrust(self, reason: str) -> None:
        """Serve nothing from now on: a wrong byte is worse than none."""
        if not self.not_ready:
            log.error("the worker is not ready any more: %s", reason)
            self.not_ready = reason

    def failed(self, error: BaseException) -> None:
        """A step or call failed inside the worker."""
        if isinstance(error, BrokenDeviceError):
            self.distrust(error.reason)
        elif not isinstance(error, ServiceError) or error.code == "step_failed":
            self.suspect.set()

    def ran(self, step: asyncio.Task[Encoded]) -> None:
        self.running.discard(step)
        if not step.cancelled():
            step.exception()  # its client may have left

    def check_integrity(self) -> None:
        """Nothing is lost, lent twice or lent to nobody; raises AssertionError. On the event loop."""
        self.admission.check_integrity()
