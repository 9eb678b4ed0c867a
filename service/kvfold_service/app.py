"""The HTTP app of a service: its calls, its one shape of errors, and what runs beside the calls."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Match

import kvfold_client
from kvfold_service.canary import watch
from kvfold_service.errors import ServiceError
from kvfold_service.routes import metrics_routes, reply, routes
from kvfold_service.service import Service
from kvfold_service.step import malformed

__all__ = ["Service", "build", "build_metrics"]

log = logging.getLogger("kvfold")


def build(service: Service) -> FastAPI:
    """All calls; /metrics only if it has no port of its own."""
    app = _app(service, lifespan=_lifespan(service))
    app.include_router(routes(service))
    if service.settings.metrics_port is None:
        app.include_router(metrics_routes(service))
    return app


def build_metrics(service: Service) -> FastAPI:
    """What --metrics-port serves."""
    app = _app(service, openapi_url=None)
    app.include_router(metrics_routes(service))
    return app


def _app(service: Service, **options: Any) -> FastAPI:
    app = FastAPI(
        title="kvfold",
        version=kvfold_client.__version__,
        description="State caches and exact compression kernels for DeepSeek-V4 KV caches; see docs/contract.md.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        **options,
    )

    @app.exception_handler(ServiceError)
    async def refused(request: Request, error: ServiceError) -> Response:
        service.metrics.rejections.labels(error.code).inc()
        log.debug("%s %s is refused: %s", request.method, request.url.path, error)
        headers = {"Retry-After": str(max(1, round(error.retry_after)))} if error.retry_after else {}
        if error.code == "unauthorized":
            headers["WWW-Authenticate"] = "Bearer"
        return reply(service, request, error.body(), error.status, headers)

    @app.exception_handler(HTTPException)
    async def no_such_call(request: Request, error: HTTPException) -> Response:
        body = malformed(f"there is no call {request.method} {request.url.path[:100]}").body()
        headers = dict(error.headers or {})
        if "Allow" in headers:  # routes know their own method only
            headers["Allow"] = ", ".join(_methods(app, request))
        return reply(service, request, body, error.status_code, headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        log.error("a call failed", exc_info=error)
        service.failed(error)
        body = ServiceError("step_failed", "the worker failed; nothing was changed").body()
        return reply(service, request, body, 500)

    return app


def _methods(app: FastAPI, request: Request) -> list[str]:
    """All methods of a path."""
    matching = (route for route in app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in matching for method in getattr(route, "methods", ())})


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
