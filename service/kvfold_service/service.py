"""What all calls of one worker share, and whether it takes them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request

from kvfold_service.admission import Admission
from kvfold_service.auth import Caller, Tokens
from kvfold_service.engine import Engine
from kvfold_service.errors import BrokenDeviceError, ServiceError
from kvfold_service.ingest import Body, decode, receive
from kvfold_service.memory import Encoded, StepMemory
from kvfold_service.metrics import Metrics
from kvfold_service.sending import Sending
from kvfold_service.settings import Settings
from kvfold_service.staging import Staging

log = logging.getLogger("kvfold")


class Service:
    """Event loop only.

    not_ready  the reason why no call is served, or None
    draining   no step and no import is admitted any more
    suspect    set when a step failed: the data path must be proven before it is trusted further
    """

    def __init__(self, settings: Settings, engine: Engine, tokens: Tokens) -> None:
        self.settings, self.engine, self.worker, self.tokens = settings, engine, engine.worker, tokens
        self.worker.quotas = tokens.quotas
        self.staging = Staging(settings.staging())
        self.admission = Admission(self.staging, settings.max_body_bytes, settings.max_queue, tokens.quotas)
        self.sending = Sending(settings.max_body_bytes, settings.staging())
        self.memory = StepMemory(settings.remembered_steps)
        self.metrics = Metrics(engine, self.admission)
        self.running: set[asyncio.Task[Encoded]] = set()
        self.last_step = 0.0
        self.not_ready: str | None = "starting"
        self.draining = False
        self.suspect = asyncio.Event()

    # -- who is let in -------------------------------------------------------------------------------------------

    def known_caller(self, request: Request, *roles: str) -> Caller:
        """Raises unauthorized, forbidden."""
        caller = self.tokens.caller(request.headers.get("authorization"))
        if roles:
            caller.expect(*roles)
        return caller

    def caller(self, request: Request, *roles: str) -> Caller:
        """For calls about what is there. Raises unauthorized, forbidden, not_ready."""
        caller = self.known_caller(request, *roles)
        if self.not_ready:
            raise ServiceError("not_ready", f"the worker is not ready: {self.not_ready}", retry_after=1.0)
        return caller

    def admitted(self, request: Request, *roles: str) -> Caller:
        """For calls that bring something new. Raises unauthorized, forbidden, not_ready, draining."""
        caller = self.caller(request, *roles)
        if self.draining:
            raise ServiceError("draining", "the worker is about to stop; use another one", retry_after=1.0)
        return caller

    async def receive(self, request: Request, caller: Caller) -> Body:
        """The body in staging; whoever asked for it leaves its place."""
        body = await receive(request, self.admission, caller.tenant, self.settings.receive_timeout)
        self.metrics.bytes_in.inc(len(body.view))
        return body

    @contextlib.asynccontextmanager
    async def message(self, request: Request, caller: Caller) -> AsyncIterator[dict[str, Any]]:
        """A received and decoded body; what it holds lies in staging until the context ends."""
        body = await self.receive(request, caller)
        try:
            yield await decode(body)
        finally:
            body.place.leave()

    # -- how it is -----------------------------------------------------------------------------------------------

    @property
    def unready(self) -> str | None:
        """Why no step would be admitted."""
        return self.not_ready or ("draining" if self.draining else None)

    @property
    def idle(self) -> bool:
        return not self.engine.depth and time.monotonic() - self.last_step > 1

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
        self.last_step = time.monotonic()
        if not step.cancelled():
            step.exception()  # its client may have left

    def check_integrity(self) -> None:
        """Nothing is lost, lent twice or lent to nobody; raises AssertionError. On the event loop."""
        self.admission.check_integrity()
