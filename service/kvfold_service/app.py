"""The HTTP app of a service: its calls, its one shape of errors, and what runs beside the calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import compile_path
from starlette.types import Receive, Scope, Send

import kvfold_client
from kvfold_service import once, refusals
from kvfold_service.canary import watch
from kvfold_service.errors import ServiceError
from kvfold_service.movers.routes import fleet_routes
from kvfold_service.once import STEP
from kvfold_service.openapi import CALLS
from kvfold_service.routes import metrics_routes, routes
from kvfold_service.service import Service
from kvfold_service.step import malformed

__all__ = ["Service", "build", "build_metrics"]

log = logging.getLogger("kvfold")
_NO_TELEMETRY: Any = dict.fromkeys(("tracing", "metrics", "logs", "auto_configure"), False)
"""FastAPI's own, where it has any: spans are `tracing`'s, metrics are `metrics`', and no body goes anywhere else."""


class _App(FastAPI):
    """Steps go straight to their route: FastAPI's way there takes longer than all that is checked before a body."""

    def __init__(self, service: Service, **options: Any) -> None:
        super().__init__(**options)
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (scope["method"], scope["path"]) != STEP:
            await super().__call__(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await once.step(self._service, request)
        except ServiceError as error:
            response = refusals.refused(self._service, request, error)
        except Exception as error:
            response = refusals.broken(self._service, request, error)
        await response(scope, receive, send)


def build(service: Service) -> FastAPI:
    """All calls; /metrics only if it has no port of its own."""
    app = _app(service, partial(_App, service), lifespan=_lifespan(service))
    app.include_router(routes(service))
    app.include_router(fleet_routes(service))
    if service.settings.metrics_port is None:
        app.include_router(metrics_routes(service))
    return app


def build_metrics(service: Service) -> FastAPI:
    """What --metrics-port serves."""
    app = _app(service, FastAPI, openapi_url=None)
    app.include_router(metrics_routes(service))
    return app


def _app(service: Service, make: Callable[..., FastAPI], **options: Any) -> FastAPI:
    app = make(
        title="kvfold",
        version=kvfold_client.__version__,
        description="State caches and exact compression kernels for DeepSeek-V4 KV caches; see docs/contract.md.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        telemetry=_NO_TELEMETRY,
        **options,
    )

    @app.exception_handler(ServiceError)
    async def refused(request: Request, error: ServiceError) -> Response:
        return refusals.refused(service, request, error)

    @app.exception_handler(HTTPException)
    async def no_such_call(request: Request, error: HTTPException) -> Response:
        body = malformed(f"there is no call {request.method} {request.url.path[:100]}").body()
        headers = dict(error.headers or {})
        if "Allow" in headers:  # routes know their own method only
            headers["Allow"] = ", ".join(_methods(request.url.path))
        return service.reply(request, body, error.status_code, headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        return refusals.broken(service, request, error)

    return app


def _methods(path: str) -> list[str]:
    """All methods of a path."""
    return sorted(method for method, template in CALLS if compile_path(template)[0].match(path))


def _lifespan(service: Service) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        beside = [_reap_forever(service), watch(service, service.settings.canary_seconds)]
        tasks = [asyncio.create_task(_or_distrust(service, coroutine)) for coroutine in beside]
        yield
        for task in tasks:
            task.cancel()

    return lifespan


async def _or_distrust(service: Service, forever: Coroutine[Any, Any, None]) -> None:
    """What must not end has ended."""
    try:
        await forever
    except Exception:
        log.exception("the worker failed")
        service.distrust("the worker failed; its log says where")


async def _reap_forever(service: Service) -> None:
    """Release requests whose lease has ended, once a second."""
    while True:
        await asyncio.sleep(1)
        await service.engine.call(service.worker.reap)
