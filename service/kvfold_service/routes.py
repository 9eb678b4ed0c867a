"""Each call's route, from bytes to the engine and back. Nothing here computes or holds up the event loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from kvfold_service import calls, once, ui
from kvfold_service.errors import ServiceError
from kvfold_service.ingest import reply_type_of
from kvfold_service.once import STEP
from kvfold_service.openapi import CALLS
from kvfold_service.sending import Held, Streamed, export_bytes
from kvfold_service.service import Service


def _streamed(service: Service, request: Request, message: dict[str, Any], held: Held) -> Response:
    response = Streamed(message, reply_type_of(request), held, service.settings.receive_timeout)
    service.metrics.bytes_out.inc(response.num_bytes)
    return response


def _binder(router: APIRouter) -> Callable[[str, str], Callable[[Callable[..., Awaitable[Response]]], Any]]:
    return lambda method, path: router.api_route(path, methods=[method], **CALLS[method, path])


def routes(service: Service) -> APIRouter:
    router = APIRouter()
    _step_routes(service, router)
    _page_routes(service, router)
    _request_routes(service, router)
    _json_routes(service, router)
    return router


def metrics_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @_binder(router)("GET", "/metrics")
    async def metrics(request: Request) -> Response:
        service.known_caller(request, "admin")
        return PlainTextResponse(await service.engine.call(service.metrics.expose), media_type=CONTENT_TYPE_LATEST)

    return router


def _step_routes(service: Service, router: APIRouter) -> None:
    call, worker, engine = _binder(router), service.worker, service.engine

    @call(*STEP)
    async def step(request: Request) -> Response:
        return await once.step(service, request)

    @call("POST", "/v1/import")
    async def import_(request: Request) -> Response:
        caller = service.admitted(request, "step")
        async with service.message(request, caller) as body:
            given = calls.parse_import(body, worker.rules, worker.entry_bytes)
            made = await engine.call_for(caller.tenant, worker.import_, given, caller.tenant)
        return service.reply(request, made)


def _page_routes(service: Service, router: APIRouter) -> None:
    call, worker, engine = _binder(router), service.worker, service.engine
    largest_page = max(group.layout.page_bytes for group in worker.caches.groups)
    advice = f"ask for at most {service.sending.limit // largest_page} pages at a time"

    @call("POST", "/v1/pages/read")
    async def read_pages(request: Request) -> Response:
        caller = service.caller(request, "pull")
        async with service.message(request, caller) as body:
            handles = calls.parse_handles(body)
            held = service.sending.begin(len(handles) * largest_page, advice)
            with held.unless_sent():
                pages = await engine.call_for(caller.tenant, worker.read_pages, handles, caller.tenant)
                return _streamed(service, request, pages, held)

    @call("POST", "/v1/verify")
    async def verify(request: Request) -> Response:
        caller = service.caller(request, "pull")
        async with service.message(request, caller) as body:
            handles = calls.parse_handles(body)
            digests = await engine.call_for(caller.tenant, worker.verify, handles, caller.tenant)
        return service.reply(request, digests)

    @call("POST", "/v1/requests/{id}/export")
    async def export(request: Request, id: str) -> Response:
        caller = service.caller(request, "step", "pull")
        async with service.message(request, caller) as body:
            wanted = calls.parse_export(body)
            num_bytes = await engine.call_for(caller.tenant, export_bytes, worker, id, wanted, caller.tenant)
            held = service.sending.begin(num_bytes, "name fewer compressors, or entries from from_entry on")
            with held.unless_sent():
                exported = await engine.call_for(caller.tenant, worker.export, id, wanted, caller.tenant)
                return _streamed(service, request, exported, held)


def _request_routes(service: Service, router: APIRouter) -> None:
    call, worker, engine = _binder(router), service.worker, service.engine

    @call("GET", "/v1/requests/{id}")
    async def get_request(request: Request, id: str) -> Response:
        caller = service.caller(request, "step", "pull")
        return service.reply(request, await engine.call_for(caller.tenant, worker.request, id, caller.tenant))

    @call("DELETE", "/v1/requests/{id}")
    async def release(request: Request, id: str) -> Response:
        caller = service.caller(request, "step")
        await engine.call_for(caller.tenant, worker.release, id, caller.tenant)
        return Response(status_code=204)

    @call("POST", "/v1/requests/{id}/truncate")
    async def truncate(request: Request, id: str) -> Response:
        caller = service.caller(request, "step")
        async with service.message(request, caller) as body:
            length = calls.parse_truncate(body)
            left = await engine.call_for(caller.tenant, worker.truncate, id, length, caller.tenant)
        return service.reply(request, left)

    @call("POST", "/v1/requests/{id}/lease")
    async def lease(request: Request, id: str) -> Response:
        caller = service.caller(request, "step", "pull")
        async with service.message(request, caller) as body:
            seconds = calls.parse_lease(body)
            renewed = await engine.call_for(caller.tenant, worker.lease, id, seconds, caller.tenant)
        return service.reply(request, renewed)


def _json_routes(service: Service, router: APIRouter) -> None:
    call, worker, engine = _binder(router), service.worker, service.engine

    @call("GET", "/v1/manifest")
    async def manifest(request: Request) -> Response:
        service.known_caller(request)
        return JSONResponse({**worker.manifest.to_json(), "compat": worker.compat})

    @call("GET", "/v1/stats")
    async def stats(request: Request) -> Response:
        service.known_caller(request, "admin")
        return JSONResponse(await engine.call(service.metrics.worker_stats) | service.metrics.stats())

    @call("GET", "/v1/integrity")
    async def integrity(request: Request) -> Response:
        service.known_caller(request, "admin")
        try:
            service.check_integrity()
            await engine.call(worker.check_integrity)
        except AssertionError as error:
            service.distrust(f"its books do not agree: {error}")
            raise ServiceError("not_ready", f"the worker is not ready: {service.not_ready}") from None
        held = {"bodies": service.admission.places, "staging_bytes": service.staging.num_lent}
        return JSONResponse({"status": "ok", **held, "replies": service.sending.num_replies})

    @call("GET", "/ui")
    async def show() -> Response:
        return ui.page()

    @call("GET", "/livez")
    async def livez() -> Response:
        return JSONResponse({"status": "ok"})

    @call("GET", "/readyz")
    async def readyz() -> Response:
        if service.unready:
            return JSONResponse({"status": "not_ready", "reason": service.unready}, 503)
        return JSONResponse({"status": "ok"})
