"""A request's body → staging → a decoded message. The body is never held a second time on the host."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final

import xxhash
from fastapi import Request
from starlette.requests import ClientDisconnect

from kvfold_client import wire
from kvfold_service.admission import Admission, Place
from kvfold_service.errors import ServiceError

_DECODE_INLINE_BYTES = 256 << 10
"""A header (or msgpack body) longer than this is decoded on another thread, so that the event loop is not held up."""
SLOWEST_BYTES: Final = 1 << 20
"""Bytes a second that a body or a reply must move at, once its first seconds are over."""


@dataclass(frozen=True, slots=True)
class Body:
    """A received body. `view` lies in staging until its place is left."""

    media_type: str
    place: Place
    view: memoryview
    fingerprint: bytes


def media_type_of(request: Request) -> str:
    """The body's encoding. Raises unsupported_encoding."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ServiceError("unsupported_encoding", "send the body without a Content-Encoding")
    if request.headers.get("transfer-encoding", "chunked").lower() != "chunked":
        raise ServiceError("unsupported_encoding", "send the body with no other Transfer-Encoding than chunked")
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


def announced(request: Request) -> int | None:
    """Content-Length. The server's parser has refused what is no number."""
    length = request.headers.get("content-length", "")
    return int(length[:20]) if length.isascii() and length.isdecimal() else None


async def receive(request: Request, admission: Admission, tenant: str, patience: float) -> Body:
    """Stream the body into staging; the caller leaves its place.

    It must come within `patience` seconds and one more for each SLOWEST_BYTES. Raises unsupported_encoding, what
    `admit` raises, malformed.
    """
    media_type = media_type_of(request)
    place = admission.admit(tenant, announced(request))
    try:
        num_bytes, fingerprint = await _stream(request, place, patience)
        place.enter_queue()
        return Body(media_type, place, place.view[:num_bytes], fingerprint)
    except BaseException:
        place.leave()
        raise


async def _stream(request: Request, place: Place, patience: float) -> tuple[int, bytes]:
    fingerprint, end = xxhash.xxh3_128(), 0
    deadline = asyncio.get_running_loop().time() + patience
    try:
        async with asyncio.timeout_at(deadline) as limit:
            async for chunk in request.stream():
                start, end = end, end + len(chunk)
                place.hold(end)
                place.view[start:end] = chunk
                fingerprint.update(chunk)
                if start // SLOWEST_BYTES < end // SLOWEST_BYTES:
                    limit.reschedule(deadline + end / SLOWEST_BYTES)
    except ClientDisconnect:
        raise ServiceError("malformed", "the body ended early") from None
    except TimeoutError:
        raise ServiceError("malformed", f"the body came too slowly: {end} bytes in time") from None
    return end, fingerprint.digest()


async def decode(body: Body) -> dict[str, Any]:
    """The message; its tensors are views of staging if the body is a frame. Raises what the wire says."""
    header_bytes = int.from_bytes(body.view[8:12], "little") if body.media_type == wire.FRAME else len(body.view)
    try:
        if header_bytes > _DECODE_INLINE_BYTES:
            return await asyncio.to_thread(wire.decode, body.media_type, body.view)
        return wire.decode(body.media_type, body.view)
    except wire.WireError as error:
        raise ServiceError.of_wire(error) from None
