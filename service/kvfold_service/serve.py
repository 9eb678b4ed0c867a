"""`kvfold serve`: settings → worker → canary → listen → drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final

import torch
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from kvfold_kernels import backends
from kvfold_service import logs
from kvfold_service import manifest as manifests
from kvfold_service import settings as options
from kvfold_service import weights as weight_files
from kvfold_service.app import build, build_metrics
from kvfold_service.auth import Tokens
from kvfold_service.canary import prove_or_refuse
from kvfold_service.connection import patient
from kvfold_service.drain import drain
from kvfold_service.engine import Engine
from kvfold_service.errors import StartError
from kvfold_service.manifest import Manifest
from kvfold_service.runner import pin
from kvfold_service.service import Service
from kvfold_service.settings import Settings
from kvfold_service.worker import Worker

log = logging.getLogger("kvfold")
CUT_OFF: Final = 1
"""Exit code when something still ran at the end."""
_CLOSE_SECONDS: Final = 3.0
"""For closing what is open behind --drain-seconds, before it is cut off."""


def run(argv: list[str]) -> int:
    """Serve the compressors of one model over HTTP."""
    listeners: list[socket.socket] = []
    try:
        settings = options.read(argv)
        tokens = Tokens(settings.token_file)
        logs.start(settings.log_level, settings.log_format, tokens.secrets)
        check_tls(settings.tls_cert, settings.tls_key)
        listeners.append(_listen(settings.host, settings.port))
        if settings.metrics_port is not None:
            listeners.append(_listen(settings.metrics_host, settings.metrics_port))
        service = _service(settings, tokens, listeners[0])
    except StartError as error:
        for listener in listeners:
            listener.close()
        print(f"kvfold serve: {error}", file=sys.stderr)
        return 2
    _Server(service, listeners).run(listeners)
    service.engine.stop()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def check_tls(cert: Path | None, key: Path | None) -> None:
    """Raises StartError; never asks for a passphrase."""
    if cert is not None and key is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or type(error).__name__
            raise StartError(f"--tls-cert and --tls-key cannot be used: {reason}") from None


def _service(settings: Settings, tokens: Tokens, listener: socket.socket) -> Service:
    """Everything else that can fail at start, up to the proven data path."""
    manifest = manifests.load(settings.manifest)
    try:
        backend = backends.load(settings.backend)
    except backends.BackendUnavailableError as error:
        raise StartError(str(error)) from None
    weights = weight_files.load(settings.weights, manifest)
    pages = settings.pages
    if settings.cache_bytes is not None:
        pages = settings.cache_bytes // sum(part.layout().page_bytes for part in manifest.compressors)
        if not pages:
            raise StartError("--cache-bytes does not hold one page for each compressor")
    torch.set_grad_enabled(False)
    try:
        return _started(settings, tokens, manifest, weights, backend, pages, listener)
    except (MemoryError, RuntimeError, OSError) as error:
        log.debug("no memory", exc_info=error)
        wanted = "--pages, --cache-bytes, --max-requests, --max-body-bytes or --staging-bytes"
        raise StartError(
            f"this machine cannot give the memory asked for ({type(error).__name__}); lower {wanted}"
        ) from None


def _started(
    settings: Settings,
    tokens: Tokens,
    manifest: Manifest,
    weights: weight_files.Weights,
    backend: backends.Backend,
    pages: int,
    listener: socket.socket,
) -> Service:
    """All memory taken, and the data path proven."""
    worker = Worker(
        manifest,
        weights,
        backend,
        max_requests=settings.max_requests,
        pages=pages,
        max_step_tokens=settings.max_step_tokens,
        max_step_bytes=settings.max_body_bytes,
        lease_seconds=settings.lease_seconds,
        handle_key=options.handle_key(settings),
        worker_id=settings.worker_id or f"{socket.gethostname()}:{listener.getsockname()[1]}",
    )
    log.info("backend %s; bytes by pool: %s", backend.name, worker.caches.bytes_by_pool())
    prove_or_refuse(worker)
    service = Service(settings, Engine(worker), tokens)
    if backend.device != "cpu":
        pin(service.staging.block)
    return service


def _by_port(service: Service, metrics: socket.socket | None) -> ASGIApp:
    """The app of the calls; on the port of the metrics, theirs."""
    calls = build(service)
    if metrics is None:
        return calls
    beside, port = build_metrics(service), metrics.getsockname()[1]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        on_metrics = scope["type"] == "http" and scope["server"][1] == port
        await (beside if on_metrics else calls)(scope, receive, send)

    return app


class _Server(uvicorn.Server):
    """Prints the ready line when the sockets are served; drains on the first signal, ends at once on the second."""

    def __init__(self, service: Service, listeners: list[socket.socket]) -> None:
        settings = service.settings
        super().__init__(
            uvicorn.Config(
                _by_port(service, listeners[1] if len(listeners) > 1 else None),
                http=patient(settings.receive_timeout),
                ws="none",
                loop="uvloop",
                log_config=None,
                log_level="warning",
                access_log=False,
                lifespan="on",
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
                server_header=False,
            )
        )
        self._service, self._listeners = service, listeners
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
            self.config.timeout_graceful_shutdown = max(1, round(seconds))
            self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._service.not_ready = None
        worker = self._service.worker
        scheme = "https" if self.config.is_ssl else "http"
        urls = [f"{scheme}://{_address(listener)}" for listener in self._listeners]
        metrics = f" metrics={urls[1]}" if len(urls) > 1 else ""
        with contextlib.suppress(OSError):  # nobody reads it, or its disk is full: no reason not to serve
            print(f"ready {urls[0]} backend={worker.backend.name} compat={worker.compat}{metrics}", flush=True)


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _cut_off() -> None:
    log.error("something still runs behind the end of --drain-seconds and is cut off")
    os._exit(CUT_OFF)
