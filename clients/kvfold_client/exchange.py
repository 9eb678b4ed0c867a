"""A call as a conversation: a generator that says what to send and how long to wait, and is told what came back.

    Outgoing  →  httpx.Response | httpx.RequestError
    float     →  None, after so many seconds

One conversation serves both clients; they only move bytes and wait.
"""

import json
import random
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import httpx

from .calls import Call
from .errors import ApiError, KvfoldError, ReplyError, TransportError, error_for
from .wire import FRAME, MSGPACK, WireError, decode, encode_parts

T = TypeVar("T")
Outcome = httpx.Response | httpx.RequestError | None
Conversation = Generator["Outgoing | float", Outcome, T]

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 5.0
LONGEST_RETRY_AFTER_S = 60.0
CHUNK_BYTES = 1 << 20  # a socket takes less at a time, and what it leaves is copied

ENCODINGS = {"frame": FRAME, "msgpack": MSGPACK}

_JSON = "application/json"
_UNSENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
_GATEWAY = {502, 503, 504}


class Body:
    """Encoded parts, sent from the caller's memory in chunks of about CHUNK_BYTES, as often as needed."""

    def __init__(self, parts: list[bytes | memoryview]) -> None:
        self._views = [memoryview(part) for part in parts]

    def __len__(self) -> int:
        return sum(map(len, self._views))

    def __iter__(self) -> Iterator[bytes]:
        pending: list[memoryview] = []
        num_bytes = 0
        for view in self._views:
            for start in range(0, len(view), CHUNK_BYTES):
                pending.append(view[start : start + CHUNK_BYTES])
                num_bytes += len(pending[-1])
                if num_bytes >= CHUNK_BYTES:
                    yield b"".join(pending)
                    pending, num_bytes = [], 0
        yield b"".join(pending)

    async def chunks(self) -> AsyncIterator[bytes]:
        for chunk in self:
            yield chunk


@dataclass(frozen=True, slots=True)
class Outgoing:
    method: str
    path: str
    headers: dict[str, str]
    body: Body | None

    def request(self, http: httpx.Client | httpx.AsyncClient) -> httpx.Request:
        content = self.body
        if content is not None and isinstance(http, httpx.AsyncClient):
            content = content.chunks()
        return http.build_request(self.method, self.path, headers=self.headers, content=content)


def converse(call: Call[T], encoding: str, retries: int) -> Conversation[T]:
    """Sends, waits and sends again, up to `retries` times, the same bytes. Raises KvfoldError."""
    outgoing = _outgoing(call, encoding)
    for attempt in count():
        outcome = yield outgoing
        try:
            return _result(call, outcome)
        except KvfoldError as error:
            wait = _wait_s(attempt, outcome)
            if attempt == retries or not _may_retry(call, error) or wait is None:
                raise
        yield wait


def probe(path: str) -> Conversation[bool]:
    """Whether the worker answers this path with success, asked once."""
    outcome = yield Outgoing("GET", path, {"accept": _JSON}, None)
    if not isinstance(outcome, httpx.Response):
        return False
    if not outcome.is_success and outcome.status_code not in _GATEWAY:
        raise _refusal(outcome)
    return outcome.is_success


def _outgoing(call: Call[Any], encoding: str) -> Outgoing:
    headers = {"accept": _JSON if call.json else encoding}
    if call.message is None:
        return Outgoing(call.method, call.path, headers, None)
    body = Body(encode_parts(encoding, call.message))
    headers |= {"content-type": encoding, "content-length": str(len(body))}
    return Outgoing(call.method, call.path, headers, body)


def _result(call: Call[T], outcome: Outcome) -> T:
    if not isinstance(outcome, httpx.Response):
        raise TransportError(f"{call.method} {call.path}: {outcome or type(outcome).__name__}") from outcome
    if not outcome.is_success:
        raise _refusal(outcome)
    message = None if outcome.status_code == 204 else _message(outcome)
    try:
        return call.read(message)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReplyError(f"the reply to {call.method} {call.path} is not what the contract says: {error!r}") from error


def _message(response: httpx.Response) -> Any:
    content_type = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    try:
        if content_type == _JSON:
            return json.loads(response.content)
        return decode(content_type, response.content)
    except WireError as error:
        raise ReplyError(f"the reply of status {response.status_code} cannot be read: {error}") from error
    except ValueError as error:
        raise ReplyError(f"the reply of status {response.status_code} is not JSON") from error


def _refusal(response: httpx.Response) -> KvfoldError:
    try:
        fields = _message(response)
        code = fields["code"]
        error = error_for(code)(
            code, fields["message"], fields["retryable"] is True, fields.get("details") or {}, response.status_code
        )
        error.retry_after_s = _retry_after_s(response)
        return error
    except (ReplyError, KeyError, TypeError, AttributeError):
        if response.status_code in _GATEWAY:
            return TransportError(f"something before the worker answered {response.status_code}")
        return ReplyError(f"status {response.status_code} without an error of this protocol: is this a kvfold worker?")


def _may_retry(call: Call[Any], error: KvfoldError) -> bool:
    if isinstance(error, ApiError):
        return error.retryable  # a refused call has changed nothing
    return isinstance(error, TransportError) and (call.idempotent or isinstance(error.__cause__, _UNSENT))


def _wait_s(attempt: int, outcome: Outcome) -> float | None:
    """min(0.05·2ⁿ, 5) s and never less than Retry-After, plus up to the half of it; None: too long to wait here."""
    wait = min(FIRST_WAIT_S * 2**attempt, LONGEST_WAIT_S)
    if isinstance(outcome, httpx.Response):
        wait = max(wait, _retry_after_s(outcome) or 0.0)
    if not wait <= LONGEST_RETRY_AFTER_S:
        return None
    return wait * random.uniform(1.0, 1.5)


def _retry_after_s(response: httpx.Response) -> float | None:
    with suppress(ValueError):  # a date: no worker sends one
        return float(response.headers["retry-after"]) if "retry-after" in response.headers else None
