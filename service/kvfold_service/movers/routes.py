"""The calls of a fleet: take a request over, some entries of one, who this worker is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from kvfold_client import wire
from kvfold_service import calls
from kvfold_service.ingest import reply_type_of
from kvfold_service.movers.pull import Pulls, parse_pull
from kvfold_service.openapi import CALLS
from kvfold_service.sending import Streamed
from kvfold_service.service import Service
from kvfold_service.step import malformed
from kvfold_service.transfer import EntriesCall, entry_range
from kvfold_service.worker import Worker

_Bind = Callable[[str, str], Callable[[Callable[..., Awaitable[Response]]], Any]]


def fleet_routes(service: Service) -> APIRouter:
    router, pulls = APIRouter(), service.pulls

    def call(method: str, path: str) -> Callable[[Callable[..., Awaitable[Response]]], Any]:
        return router.api_route(path, methods=[method], **CALLS[method, path])

    _take_over(service, pulls, call)
    _give(service, pulls, call)
    return router


def _take_over(service: Service, pulls: Pulls, call: _Bind) -> None:
    @call("POST", "/v1/pull")
    async def pull(request: Request) -> Response:
        caller = service.admitted(request, "step")
        async with service.message(request, caller) as body:
            wanted = parse_pull(body)
        return service.reply(request, await pulls.pull(wanted, caller.tenant, request.headers.get("authorization")))


def _give(service: Service, pulls: Pulls, call: _Bind) -> None:
    worker, engine = service.worker, service.engine

    @call("POST", "/v1/requests/{id}/entries")
    async def entries(request: Request, id: str) -> Response:
        caller = service.caller(request, "step", "pull")
        async with service.message(request, caller) as body:
            wanted = calls.parse_entries(body)
        num_bytes = await engine.call_for(caller.tenant, _num_bytes, worker, id, wanted, caller.tenant)
        held = service.sending.begin(num_bytes, "ask for fewer entries at a time")
        with held.unless_sent():
            message = await engine.call_for(caller.tenant, worker.entries, id, wanted, caller.tenant)
            response = Streamed(message, reply_type_of(request), held, service.settings.receive_timeout)
            service.metrics.bytes_out.inc(response.num_bytes)
            return response

    @call("POST", "/v1/pages/locate")
    async def locate(request: Request) -> Response:
        caller = service.caller(request, "pull")
        if pulls.agent is None:
            raise malformed("this worker does not offer its pages by NIXL; it is started without --nixl")
        async with service.message(request, caller) as body:
            handles = calls.parse_handles(body)
        told = await engine.call_for(caller.tenant, worker.locate, handles, caller.tenant)
        pulls.agent.expect_readers()
        return service.reply(request, told)

    @call("GET", "/v1/nixl")
    async def nixl(request: Request) -> Response:
        service.caller(request, "admin")
        data = pulls.agent.metadata if pulls.agent else b""
        metadata = wire.tensor_map("uint8", [len(data)], data)
        return service.reply(request, {"version": wire.PROTOCOL_VERSION, "metadata": metadata})

    @call("GET", "/v1/worker")
    async def who(request: Request) -> Response:
        service.known_caller(request)
        return JSONResponse(
            {
                "epoch": worker.epoch.hex(),
                "compat": worker.compat,
                "status": service.unready or "ok",
                "movers": list(pulls.movers),
                "max_body_bytes": service.sending.limit,
            }
        )


def _num_bytes(worker: Worker, request_id: str, wanted: EntriesCall, tenant: str) -> int:
    """Bytes of the entries of a reply. Raises unknown_request. Engine thread."""
    cache = worker.caches.by_name.get(wanted.compressor)
    if cache is None:
        return 0  # it is refused in its turn
    first, end = entry_range(cache, worker.known(request_id, tenant).slot, wanted)
    return (end - first) * worker.entry_bytes[cache.name]
