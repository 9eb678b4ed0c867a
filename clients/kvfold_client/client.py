"""The two clients. Every call is described once, in `calls`; here it is only bound to a way of waiting."""

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

import httpx

from . import calls
from .calls import Call
from .exchange import ENCODINGS, Conversation, Outgoing, converse, probe
from .heartbeat import AsyncHeartbeat, Heartbeat

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class _Base:
    """What both clients are told: where the worker is, who asks, how bytes are written, how often to try."""

    def __init__(self, encoding: str, retries: int) -> None:
        if encoding not in ENCODINGS:
            raise ValueError(f"encoding must be one of {', '.join(ENCODINGS)}, not {encoding!r}")
        if retries < 0:
            raise ValueError(f"retries must not be negative, not {retries}")
        self._encoding = ENCODINGS[encoding]
        self._retries = retries

    def _conversation(self, call: Call[T]) -> Conversation[T]:
        return converse(call, self._encoding, self._retries)


def _headers(token: str | None) -> dict[str, str]:
    return {} if token is None else {"authorization": f"Bearer {token}"}


def _now(build: Callable[P, Call[T]]) -> Callable[Concatenate["Client", P], T]:
    @functools.wraps(build)
    def method(self: "Client", *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(self._conversation(build(*args, **kwargs)))

    return _with_self(method)


def _awaited(build: Callable[P, Call[T]]) -> Callable[Concatenate["AsyncClient", P], Awaitable[T]]:
    @functools.wraps(build)
    async def method(self: "AsyncClient", *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._run(self._conversation(build(*args, **kwargs)))

    return _with_self(method)


def _with_self(method: F) -> F:
    """Lets help() show the builder's parameters behind `self`."""
    signature = inspect.signature(method)
    self = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    vars(method)["__signature__"] = signature.replace(parameters=[self, *signature.parameters.values()])
    return method


class Client(_Base):
    """A worker's calls, blocking. Raises KvfoldError and its kinds; close it, or use it in a `with`.

    A refusal marked retryable, or a lost reply of a call that may be repeated, is tried again up to `retries` times,
    with growing pauses, always with the same bytes. `timeout` in seconds is httpx's, `transport` too (for tests).
    """

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        *,
        encoding: Literal["frame", "msgpack"] = "frame",
        timeout: float | None = 30.0,
        retries: int = 3,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(encoding, retries)
        self._http = httpx.Client(base_url=base_url, headers=_headers(token), timeout=timeout, transport=transport)

    step = _now(calls.step)
    read_pages = _now(calls.read_pages)
    verify = _now(calls.verify)
    request = _now(calls.request)
    release = _now(calls.release)
    truncate = _now(calls.truncate)
    lease = _now(calls.lease)
    export = _now(calls.export)
    entries = _now(calls.entries)
    import_ = _now(calls.import_)
    pull = _now(calls.pull)
    worker = _now(calls.worker)
    manifest = _now(calls.manifest)
    stats = _now(calls.stats)

    def heartbeat(self, *ids: str, seconds: float = 30.0) -> Heartbeat:
        """Keeps requests alive while a `with` lasts, on a thread; see `heartbeat`."""
        return Heartbeat(self.lease, ids, seconds)

    def live(self) -> bool:
        """Whether the worker's process answers."""
        return self._run(probe("/livez"))

    def ready(self) -> bool:
        """Whether the worker takes steps."""
        return self._run(probe("/readyz"))

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.close()

    def _run(self, conversation: Conversation[T]) -> T:
        try:
            wanted = next(conversation)
            while True:
                outcome = None
                if not isinstance(wanted, Outgoing):
                    time.sleep(wanted)
                else:
                    try:
                        outcome = self._http.send(wanted.request(self._http))
                    except httpx.RequestError as error:
                        outcome = error
                wanted = conversation.send(outcome)
        except StopIteration as end:
            return end.value


class AsyncClient(_Base):
    """A worker's calls, awaited; as `Client` in everything else, with `aclose` and `async with`."""

    def __init__(
        self,
        base_url: str,
        token: str | None = None,
        *,
        encoding: Literal["frame", "msgpack"] = "frame",
        timeout: float | None = 30.0,
        retries: int = 3,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(encoding, retries)
        self._http = httpx.AsyncClient(base_url=base_url, headers=_headers(token), timeout=timeout, transport=transport)

    step = _awaited(calls.step)
    read_pages = _awaited(calls.read_pages)
    verify = _awaited(calls.verify)
    request = _awaited(calls.request)
    release = _awaited(calls.release)
    truncate = _awaited(calls.truncate)
    lease = _awaited(calls.lease)
    export = _awaited(calls.export)
    entries = _awaited(calls.entries)
    import_ = _awaited(calls.import_)
    pull = _awaited(calls.pull)
    worker = _awaited(calls.worker)
    manifest = _awaited(calls.manifest)
    stats = _awaited(calls.stats)

    def heartbeat(self, *ids: str, seconds: float = 30.0) -> AsyncHeartbeat:
        """Keeps requests alive while an `async with` lasts, as a task; see `heartbeat`."""
        return AsyncHeartbeat(self.lease, ids, seconds)

    async def live(self) -> bool:
        """Whether the worker's process answers."""
        return await self._run(probe("/livez"))

    async def ready(self) -> bool:
        """Whether the worker takes steps."""
        return await self._run(probe("/readyz"))

    async def aclose(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        await self.aclose()

    async def _run(self, conversation: Conversation[T]) -> T:
        try:
            wanted = next(conversation)
            while True:
                outcome = None
                if not isinstance(wanted, Outgoing):
                    await asyncio.sleep(wanted)
                else:
                    try:
                        outcome = await self._http.send(wanted.request(self._http))
                    except httpx.RequestError as error:
                        outcome = error
                wanted = conversation.send(outcome)
        except StopIteration as end:
            return end.value
