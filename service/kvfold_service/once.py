"""A step's way through the worker: received, decoded, validated, run once, remembered; sent again, it is replayed."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import Final

from fastapi import Request, Response

from kvfold_client import wire
from kvfold_service.auth import Caller
from kvfold_service.errors import ServiceError
from kvfold_service.ingest import Body, announced, decode, reply_type_of
from kvfold_service.logs import fields
from kvfold_service.memory import Encoded
from kvfold_service.service import SPAN, Service, draining
from kvfold_service.step import Step, parse_step

log = logging.getLogger("kvfold")
STEP: Final = ("POST", "/v1/step")


@dataclass
class Moments:
    """When a step came, was received, went to the engine and left it, and its reply was made: ns of perf_counter."""

    began: int = field(default_factory=time.perf_counter_ns)
    received: int = 0
    submitted: int = 0
    done: int = 0
    encoded: int = 0


async def step(service: Service, request: Request) -> Response:
    """The reply of a step, which runs unless it has run before."""
    moments = Moments()
    if service.draining:
        return await _recalled(service, request)
    caller = service.admitted(request, "step")
    body = await service.receive(request, caller)
    moments.received = time.perf_counter_ns()
    return await _step(service, request, caller, body, moments)


async def _step(service: Service, request: Request, caller: Caller, body: Body, moments: Moments) -> Response:
    """Decode, validate, run once, remember. The body's place is left when the engine is done with it."""
    handed_on = False
    try:
        step = parse_step(await decode(body), service.worker.rules)
        answer = service.memory.begin(caller.tenant, step.step_id, body.fingerprint, len(body.view))
        if answer is None:
            answer = asyncio.create_task(_run(service, request, step, caller.tenant, body, moments))
            handed_on = True
            service.running.add(answer)
            answer.add_done_callback(service.ran)
        return _remembered(service, request, await asyncio.shield(answer))
    finally:
        if not handed_on:
            body.place.leave()


async def _run(service: Service, request: Request, step: Step, tenant: str, body: Body, moments: Moments) -> Encoded:
    """A step to its end, whoever still waits for it; its reply is remembered, a refusal forgotten."""
    told = fields(step_id=step.step_id, requests=[request.id for request in step.requests])
    moments.submitted = time.perf_counter_ns()
    try:
        message, waited_us = await service.engine.step(step, tenant)
        moments.done = time.perf_counter_ns()
        recv_us = (moments.received - moments.began) // 1000
        message["timings_us"] |= {"recv": recv_us, "queue": waited_us}
        media_type = reply_type_of(request)
        encoded = Encoded(media_type, wire.encode_plain(media_type, message))
    except Exception as error:
        refusal = error if isinstance(error, ServiceError) else _failed(error)
        service.memory.forget(tenant, step.step_id, refusal)
        service.failed(refusal)
        log.log(logging.ERROR if refusal.status == 500 else logging.DEBUG, "a step: %s", refusal, extra=told)
        raise refusal from None
    finally:
        body.place.leave()
    service.memory.finish(tenant, step.step_id, encoded)
    moments.encoded = time.perf_counter_ns()
    reply_us = (moments.encoded - moments.done) // 1000
    service.metrics.observe_step(message["timings_us"] | {"reply": reply_us})
    if service.tracing is not None:
        service.tracing.step(request.scope.get(SPAN), step, tenant, message, moments)
    log.debug("a step ran", extra=told)
    return encoded


def _failed(error: Exception) -> ServiceError:
    log.error("a step failed", exc_info=error)
    return ServiceError("step_failed", "the worker failed; nothing of the step was kept, send it again")


async def _recalled(service: Service, request: Request) -> Response:
    """While draining: the reply of a step that has run or still runs. Raises draining for any other.

    The body is received only if one of its length is remembered, and no drain waits for it.
    """
    caller = service.trusted_caller(request, "step")
    if not service.memory.may_know(caller.tenant, announced(request)):
        raise draining()
    try:
        async with service.received(request, caller) as body:
            step_id = (await decode(body)).get("step_id")
            answer = service.memory.recall(caller.tenant, step_id, body.fingerprint)
    except ServiceError:
        raise draining() from None
    if answer is None:
        raise draining()
    return _remembered(service, request, await asyncio.shield(answer))


def _remembered(service: Service, request: Request, answer: Encoded) -> Response:
    media_type = reply_type_of(request)
    if media_type == answer.media_type:
        service.metrics.bytes_out.inc(len(answer.data))
        return Response(answer.data, media_type=media_type)
    return service.reply(request, wire.decode(answer.media_type, answer.data))
