"""The HTTP server of a worker: says when it is ready, drains on the first signal, ends at once on the second."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from kvfold_service import logs
from kvfold_service.app import build, build_metrics
from kvfold_service.connection import protocol
from kvfold_service.drain import drain
from kvfold_service.service import Service

log = logging.getLogger("kvfold")
CUT_OFF: Final = 1
"""Exit code when something still ran at the end."""
_KEEP_SECONDS: Final = 60
"""For a connection between two calls: longer than clients keep theirs, lest a call meet its connection's end."""
_CLOSE_SECONDS: Final = 3.0
"""For an event loop or a device that hangs behind --drain-seconds, before it is cut off."""


def _by_port(service: Service, metrics: socket.socket | None) -> ASGIApp:
    """The app of the calls; on the port of the metrics, theirs."""
    calls: ASGIApp = build(service)
    if service.tracing is not None:
        calls = service.tracing.around(calls)
    if metrics is None:
        return calls
    beside, port = build_metrics(service), metrics.getsockname()[1]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        on_metrics = scope["type"] == "http" and scope["server"][1] == port
        await (beside if on_metrics else calls)(scope, receive, send)

    return app


class Server(uvicorn.Server):
    """Prints the ready line when the sockets are served; drains on the first signal, ends at once on the second."""

    def __init__(self, service: Service, listeners: list[socket.socket], tls: ssl.SSLContext | None) -> None:
        settings = service.settings
        super().__init__(
            uvicorn.Config(
                _by_port(service, listeners[1] if len(listeners) > 1 else None),
                http=protocol(settings.receive_timeout, service.connections, tls),  # type: ignore[arg-type]
                ws="none",
                loop="uvloop",
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="on",
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=_KEEP_SECONDS,
            )
        )
        self._service = service
        self._urls = [f"{'https' if tls else 'http'}://{_address(listener)}" for listener in listeners]
        self._draining: asyncio.Task[None] | None = None

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the server, and then the process with code 0."""
        loop = asyncio.get_running_loop()
        received: list[int] = []

        def end(number: int, _: FrameType | None) -> None:
            received.append(number)
            if len(received) > 1:
                os._exit(CUT_OFF)
            loop.call_soon_threadsafe(self._begin_drain)

        before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _begin_drain(self) -> None:
        seconds = self._service.settings.drain_seconds
        last = threading.Timer(seconds + _CLOSE_SECONDS, _cut_off)
        last.daemon = True
        last.start()
        self._draining = asyncio.get_running_loop().create_task(self._drain(seconds))

    async def _drain(self, seconds: float) -> None:
        try:
            seconds = await drain(self._service, seconds)
        finally:
            self.should_exit = True
        await asyncio.sleep(seconds)  # for calls that came meanwhile; without them the loop ends earlier
        if self.server_state.tasks or self._service.running or self._service.sending.num_replies:
            _cut_off()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # what is there now stays: no later collection looks at it again, which takes a quarter of a second
        self._service.not_ready = None
        worker = self._service.worker
        metrics = f" metrics={self._urls[1]}" if len(self._urls) > 1 else ""
        with contextlib.suppress(OSError):  # nobody reads it, or its disk is full: no reason not to serve
            print(f"ready {self._urls[0]} backend={worker.backend.name} compat={worker.compat}{metrics}", flush=True)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _cut_off() -> None:
    log.error("something still runs behind the end of --drain-seconds and is cut off")
    logs.flush()
    os._exit(CUT_OFF)
