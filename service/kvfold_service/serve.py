"""`kvfold serve`: settings → worker → canary → listen → drain."""

from __future__ import annotations

import logging
import socket
import ssl
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from kvfold_kernels import backends
from kvfold_service import logs
from kvfold_service import manifest as manifests
from kvfold_service import settings as options
from kvfold_service import weights as weight_files
from kvfold_service.auth import Tokens
from kvfold_service.canary import prove_or_refuse
from kvfold_service.connection import allow_files
from kvfold_service.engine import Engine
from kvfold_service.errors import StartError
from kvfold_service.manifest import Manifest
from kvfold_service.server import Server
from kvfold_service.service import Service
from kvfold_service.settings import Settings
from kvfold_service.worker import Worker

if TYPE_CHECKING:
    from kvfold_service.tracing import Tracing

log = logging.getLogger("kvfold")


def run(argv: list[str]) -> int:
    """Serve the compressors of one model over HTTP."""
    listeners: list[socket.socket] = []
    try:
        settings = options.read(argv)
        tokens = Tokens(settings.token_file, options.tokens_of_environment())
        logs.start(settings.log_level, settings.log_format, tokens.secrets)
        tls = tls_of(settings.tls_cert, settings.tls_key)
        listeners.append(_listen(settings.host, settings.port))
        if settings.metrics_port is not None:
            listeners.append(_listen(settings.metrics_host, settings.metrics_port))
        service = _service(settings, tokens, listeners[0])
    except StartError as error:
        for listener in listeners:
            listener.close()
        print(f"kvfold serve: {error}", file=sys.stderr)
        return 2
    Server(service, listeners, tls).run(listeners)
    service.engine.stop()
    if service.tracing is not None:
        service.tracing.stop()
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


def tls_of(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """None: plain HTTP. Raises StartError; never asks for a passphrase."""
    if cert is None or key is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or type(error).__name__
        raise StartError(f"--tls-cert and --tls-key cannot be used: {reason}") from None
    return context


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
    worker_id = settings.worker_id or f"{socket.gethostname()}:{listener.getsockname()[1]}"
    tracing = tracing_to(settings.otlp_endpoint, worker_id)
    log.info("backend %s; taking memory for %d requests and their pages", backend.name, settings.max_requests)
    worker = Worker(
        manifest,
        weights,
        backend,
        max_requests=settings.max_requests,
        pages=pages,
        max_step_tokens=settings.max_step_tokens,
        max_step_bytes=settings.max_body_bytes,
        graphs=settings.graphs == "auto",
        lease_seconds=settings.lease_seconds,
        handle_key=options.handle_key(settings),
        worker_id=worker_id,
    )
    log.info("bytes by pool: %s; proving every kind of compressor", worker.caches.bytes_by_pool())
    prove_or_refuse(worker)
    service = Service(settings, Engine(worker), tokens, tracing)
    service.connections.most = allow_files(settings.max_connections)
    if service.connections.most < settings.max_connections:
        log.warning("this process may open files for %d connections only", service.connections.most)
    worker.runner.lock(service.staging.block)
    return service


def tracing_to(endpoint: str | None, worker_id: str) -> Tracing | None:
    """Imports OpenTelemetry only if spans are wanted."""
    if endpoint is None:
        return None
    try:
        from kvfold_service.tracing import Tracing
    except ModuleNotFoundError as error:
        wanted = "--otlp-endpoint (or OTEL_EXPORTER_OTLP_ENDPOINT) needs OpenTelemetry"
        raise StartError(f"{wanted}: pip install 'kvfold[otel]' (no module {error.name})") from None
    return Tracing.sending_to(endpoint, worker_id)
