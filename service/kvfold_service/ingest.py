"""A request's body → staging → a decoded message. The body is never held a second time on the host."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import xxhash
from fastapi import Request
from starlette.requests import ClientDisconnect

from kvfold_client import wire
from kvfold_service.errors import ServiceError
from kvfold_service.staging import Extent, Staging

_DECODE_INLINE_BYTES = 256 << 10
"""A header (or msgpack body) longer than this is decoded on another thread, so that the event loop is not held up."""


@dataclass(frozen=True, slots=True)
class Body:
    """A received body. `view` lies in staging until the extent is given back."""

    media_type: str
    extent: Extent
    view: memoryview
    fingerprint: bytes


def media_type_of(request: Request) -> str:
    """The body's encoding. Raises unsupported_encoding."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ServiceError("unsupported_encoding", "send the body without a Content-Encoding")
    media_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if media_type not in (wire.MSGPACK, wire.FRAME):
        raise ServiceError("unsupported_encoding", f"send the body as {wire.MSGPACK} or {wire.FRAME}")
    return media_type


def reply_type_of(request: Request) -> str:
    """The reply's encoding: what Accept weighs most of ours; for anything else the request's, else msgpack."""
    own = request.headers.get("content-type", "").split(";")[0].strip().lower()
    own = own if own in (wire.MSGPACK, wire.FRAME) else wire.MSGPACK
    best, weight = own, 0.0
    for item in request.headers.get("accept", "").lower().split(","):
        media_type, _, parameters = (part.strip() for part in item.partition(";"))
        quality = _quality(parameters)
        if media_type in (wire.MSGPACK, wire.FRAME) and quality > weight:
            best, weight = media_type, quality
        elif media_type in ("*/*", "application/*") and quality > weight:
            best, weight = own, quality
    return best


def _quality(parameters: str) -> float:
    """The weight `q=…` of an item of Accept; 1 if there is none, 0 if it cannot be read."""
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0


async def receive(request: Request, staging: Staging, limit: int) -> Body:
    """Stream the body into staging. Raises body_too_large, queue_full; the caller gives the extent back."""
    media_type = media_type_of(request)
    announced = request.headers.get("content-length")
    size = int(announced) if announced is not None and announced.isdecimal() else limit
    if size > limit:
        raise _too_large(limit)
    extent = staging.lend(size)
    if extent is None:
        raise ServiceError(
            "queue_full",
            "too many bodies are on their way; try again later",
            retry_after=1.0,
            staging_bytes=staging.num_bytes,
        )
    try:
        return await _stream(request, media_type, extent, size, limit)
    except BaseException:
        staging.give_back(extent)
        raise


def _too_large(limit: int) -> ServiceError:
    return ServiceError("body_too_large", f"a body may have {limit} bytes; split the step", limit=limit)


async def _stream(request: Request, media_type: str, extent: Extent, size: int, limit: int) -> Body:
    fingerprint = xxhash.xxh3_128()
    room, end = extent.view, 0
    try:
        async for chunk in request.stream():
            start, end = end, end + len(chunk)
            if end > size:
                raise _too_large(limit)
            room[start:end] = chunk
            fingerprint.update(chunk)
    except ClientDisconnect:
        raise ServiceError("malformed", "the body ended early") from None
    return Body(media_type, extent, room[:end], fingerprint.digest())


async def decode(body: Body) -> dict[str, Any]:
    """The message; its tensors are views of staging if the body is a frame. Raises what the wire says."""
    header_bytes = int.from_bytes(body.view[8:12], "little") if body.media_type == wire.FRAME else len(body.view)
    try:
        if header_bytes > _DECODE_INLINE_BYTES:
            return await asyncio.to_thread(wire.decode, body.media_type, body.view)
        return wire.decode(body.media_type, body.view)
    except wire.WireError as error:
        raise ServiceError.of_wire(error) from None
