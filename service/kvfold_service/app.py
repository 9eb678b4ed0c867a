"""HTTP: each call's route, from bytes to the engine and back. Nothing here computes or holds up the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.routing import Match

import kvfold_client
from kvfold_client import wire
from kvfold_service import calls
from kvfold_service.auth import Caller, Tokens
from kvfold_service.engine import Engine
from kvfold_service.errors import ServiceError
from kvfold_service.ingest import Body, decode, receive, reply_type_of
from kvfold_service.memory import Encoded, StepMemory
from kvfold_service.metrics import Metrics
from kvfold_service.openapi import CALLS
from kvfold_service.settings import Settings
from kvfold_service.staging import Staging
from kvfold_service.step import Step, malformed, parse_step

log = logging.getLogger("kvfold")
_SLICE_BYTES = 1 << 20


class Service:
    """What the routes share. `not_ready` is the reason why steps are refused, or None."""

    def __init__(self, settings: Settings, engine: Engine, tokens: Tokens) -> None:
        self.settings, self.engine, self.worker, self.tokens = settings, engine, engine.worker, tokens
        self.staging = Staging(settings.staging())
        self.memory = StepMemory(settings.remembered_steps)
        self.metrics = Metrics(engine)
        self.running: set[asyncio.Task[Encoded]] = set()
        self.not_ready: str | None = "starting"

    def caller(self, request: Request, *roles: str) -> Caller:
        caller = self.tokens.caller(request.headers.get("authorization"))
        if roles:
            caller.expect(*roles)
        if self.not_ready:
            raise ServiceError("not_ready", f"the worker is not ready: {self.not_ready}", retry_after=1.0)
        return caller

    def ran(self, step: asyncio.Task[Encoded]) -> None:
        self.running.discard(step)
        if not step.cancelled():
            step.exception()  # its client may have left

    @contextlib.asynccontextmanager
    async def message(self, request: Request) -> AsyncIterator[dict[str, Any]]:
        """A received and decoded body; what it holds lies in staging until the context ends."""
        body = await receive(request, self.staging, self.settings.max_body_bytes)
        try:
            self.metrics.bytes_in.inc(len(body.view))
            yield await decode(body)
        finally:
            self.staging.give_back(body.extent)


def build(service: Service) -> FastAPI:
    app = FastAPI(
        title="kvfold",
        version=kvfold_client.__version__,
        description="State caches and exact compression kernels for DeepSeek-V4 KV caches; see docs/contract.md.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan(service),
    )
    app.state.service = service
    app.include_router(_routes(service))

    @app.exception_handler(ServiceError)
    async def refused(request: Request, error: ServiceError) -> Response:
        service.metrics.rejections.labels(error.code).inc()
        headers = {"Retry-After": str(max(1, round(error.retry_after)))} if error.retry_after else {}
        if error.code == "unauthorized":
            headers["WWW-Authenticate"] = "Bearer"
        return _reply(request, error.body(), error.status, headers)

    @app.exception_handler(HTTPException)
    async def no_such_call(request: Request, error: HTTPException) -> Response:
        body = malformed(f"there is no call {request.method} {request.url.path[:100]}").body()
        headers = dict(error.headers or {})
        if "Allow" in headers:  # routes know their own method only
            headers["Allow"] = ", ".join(_methods(app, request))
        return _reply(request, body, error.status_code, headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        log.error("a call failed", exc_info=error)
        return _reply(request, ServiceError("step_failed", "the worker failed; nothing was changed").body(), 500)

    return app


def _methods(app: FastAPI, request: Request) -> list[str]:
    """All methods of a path."""
    matching = (route for route in app.routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in matching for method in getattr(route, "methods", ())})


def _lifespan(service: Service) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        reaper = asyncio.create_task(_reap_forever(service))
        yield
        reaper.cancel()

    return lifespan


async def _reap_forever(service: Service) -> None:
    """Release requests whose lease has ended, once a second."""
    while True:
        await asyncio.sleep(1)
        await service.engine.call(service.worker.reap)


def _reply(
    request: Request, message: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    media_type = reply_type_of(request)
    return Response(wire.encode(media_type, message), status, headers, media_type)


def _stream(request: Request, message: dict[str, Any]) -> Response:
    """A reply whose tensors are sent from where they lie, a slice at a time."""
    media_type = reply_type_of(request)
    parts = wire.encode_parts(media_type, message)

    async def slices() -> AsyncIterator[memoryview]:
        for part in parts:
            view = memoryview(part)
            for start in range(0, len(view), _SLICE_BYTES):
                yield view[start : start + _SLICE_BYTES]

    length = sum(len(part) for part in parts)
    return StreamingResponse(slices(), headers={"Content-Length": str(length)}, media_type=media_type)


def _routes(service: Service) -> APIRouter:
    router, worker, engine = APIRouter(), service.worker, service.engine

    def call(method: str, path: str) -> Callable[[Callable[..., Awaitable[Response]]], Any]:
        return router.api_route(path, methods=[method], **CALLS[method, path])

    @call("POST", "/v1/step")
    async def step(request: Request) -> Response:
        began = time.perf_counter_ns()
        caller = service.caller(request, "step")
        body = await receive(request, service.staging, service.settings.max_body_bytes)
        return await _step(service, request, caller, body, began)

    @call("POST", "/v1/pages/read")
    async def read_pages(request: Request) -> Response:
        caller = service.caller(request, "pull")
        async with service.message(request) as body:
            pages = await engine.call_for(caller.tenant, worker.read_pages, calls.parse_handles(body), caller.tenant)
        return _stream(request, pages)

    @call("POST", "/v1/verify")
    async def verify(request: Request) -> Response:
        caller = service.caller(request, "pull")
        async with service.message(request) as body:
            return _reply(
                request, await engine.call_for(caller.tenant, worker.verify, calls.parse_handles(body), caller.tenant)
            )

    @call("GET", "/v1/requests/{id}")
    async def get_request(request: Request, id: str) -> Response:
        caller = service.caller(request, "step", "pull")
        return _reply(request, await engine.call_for(caller.tenant, worker.request, id, caller.tenant))

    @call("DELETE", "/v1/requests/{id}")
    async def release(request: Request, id: str) -> Response:
        caller = service.caller(request, "step")
        await engine.call_for(caller.tenant, worker.release, id, caller.tenant)
        return Response(status_code=204)

    @call("POST", "/v1/requests/{id}/truncate")
    async def truncate(request: Request, id: str) -> Response:
        caller = service.caller(request, "step")
        async with service.message(request) as body:
            return _reply(
                request,
                await engine.call_for(caller.tenant, worker.truncate, id, calls.parse_truncate(body), caller.tenant),
            )

    @call("POST", "/v1/requests/{id}/lease")
    async def lease(request: Request, id: str) -> Response:
        caller = service.caller(request, "step", "pull")
        async with service.message(request) as body:
            return _reply(
                request, await engine.call_for(caller.tenant, worker.lease, id, calls.parse_lease(body), caller.tenant)
            )

    @call("POST", "/v1/requests/{id}/export")
    async def export(request: Request, id: str) -> Response:
        caller = service.caller(request, "step", "pull")
        async with service.message(request) as body:
            exported = await engine.call_for(caller.tenant, worker.export, id, calls.parse_export(body), caller.tenant)
        return _stream(request, exported)

    @call("POST", "/v1/import")
    async def import_(request: Request) -> Response:
        caller = service.caller(request, "step")
        async with service.message(request) as body:
            given = calls.parse_import(body, worker.rules, worker.entry_bytes)
            return _reply(request, await engine.call_for(caller.tenant, worker.import_, given, caller.tenant))

    @call("GET", "/v1/manifest")
    async def manifest(request: Request) -> Response:
        service.caller(request)
        return JSONResponse({**worker.manifest.to_json(), "compat": worker.compat})

    @call("GET", "/v1/stats")
    async def stats(request: Request) -> Response:
        service.caller(request, "admin")
        return JSONResponse(await engine.call(worker.stats) | service.metrics.phases())

    @call("GET", "/livez")
    async def livez() -> Response:
        return JSONResponse({"status": "ok"})

    @call("GET", "/readyz")
    async def readyz() -> Response:
        if service.not_ready:
            return JSONResponse({"status": "not_ready", "reason": service.not_ready}, 503)
        return JSONResponse({"status": "ok"})

    @call("GET", "/metrics")
    async def metrics(request: Request) -> Response:
        service.tokens.caller(request.headers.get("authorization")).expect("admin")
        return PlainTextResponse(await engine.call(service.metrics.expose), media_type=CONTENT_TYPE_LATEST)

    return router


async def _step(service: Service, request: Request, caller: Caller, body: Body, began: int) -> Response:
    """Decode, validate, run once, remember. The body's memory is given back when the engine is done with it."""
    lent = True
    try:
        received = time.perf_counter_ns()
        service.metrics.bytes_in.inc(len(body.view))
        step = parse_step(await decode(body), service.worker.rules)
        reply = service.memory.begin(caller.tenant, step.step_id, body.fingerprint)
        if reply is None:
            recv_us = (received - began) // 1000
            reply = asyncio.create_task(_run(service, step, caller.tenant, body, recv_us, reply_type_of(request)))
            lent = False
            service.running.add(reply)
            reply.add_done_callback(service.ran)
        return _remembered(request, await asyncio.shield(reply))
    finally:
        if lent:
            service.staging.give_back(body.extent)


async def _run(service: Service, step: Step, tenant: str, body: Body, recv_us: int, media_type: str) -> Encoded:
    """A step to its end, whoever still waits for it; its reply is remembered, a refusal forgotten."""
    try:
        message, waited_us = await service.engine.step(step, tenant)
        message["timings_us"] |= {"recv": recv_us, "queue": waited_us}
        reply = Encoded(media_type, wire.encode(media_type, message))
    except BaseException as error:
        service.memory.forget(tenant, step.step_id, error)
        raise
    finally:
        service.staging.give_back(body.extent)
    service.memory.finish(tenant, step.step_id, reply)
    service.metrics.observe_step(message, len(reply.data))
    return reply


def _remembered(request: Request, reply: Encoded) -> Response:
    media_type = reply_type_of(request)
    if media_type == reply.media_type:
        return Response(reply.data, media_type=media_type)
    return _reply(request, wire.decode(reply.media_type, reply.data))
