"""`kvfold serve`: settings → worker → canary → listen."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Iterator

import torch
import uvicorn

from kvfold_kernels import backends
from kvfold_service import manifest as manifests
from kvfold_service import settings as options
from kvfold_service import weights as weight_files
from kvfold_service.app import Service, build
from kvfold_service.auth import Tokens
from kvfold_service.canary import prove_or_refuse
from kvfold_service.engine import Engine
from kvfold_service.errors import StartError
from kvfold_service.worker import Worker

log = logging.getLogger("kvfold")


def run(argv: list[str]) -> int:
    """Serve the compressors of one model over HTTP."""
    try:
        settings = options.read(argv)
        logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
        listener = _listen(settings)
        try:
            service = _service(settings, listener)
        except StartError:
            listener.close()
            raise
    except StartError as error:
        print(f"kvfold serve: {error}", file=sys.stderr)
        return 2
    _Server(service, listener).run([listener])
    service.engine.stop()
    return 0


def _listen(settings: options.Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        listener.close()
        raise StartError(f"cannot listen on {settings.host} port {settings.port}: {error.strerror}") from None
    return listener


def _service(settings: options.Settings, listener: socket.socket) -> Service:
    """Everything that can fail at start, up to the proven data path."""
    tokens = Tokens(settings.token_file)
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
    return Service(settings, Engine(worker), tokens)


class _Server(uvicorn.Server):
    """Prints the ready line when the socket is served."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                build(service), http="httptools", loop="uvloop", log_level="warning", access_log=False, lifespan="on"
            )
        )
        self._service, self._listener = service, listener

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT end the server, and then the process with code 0."""
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._service.not_ready = None
        host, port = self._listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        worker = self._service.worker
        print(f"ready http://{shown}:{port} backend={worker.backend.name} compat={worker.compat}", flush=True)
