"""The app of a service in process, and the shortest way to ask it: what the tests of its calls share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from kvfold_client import wire
from kvfold_client.wire import MSGPACK, STATUS
from kvfold_kernels import backends
from kvfold_kernels.backends import Backend
from kvfold_service import app as apps
from kvfold_service import settings as options
from kvfold_service.auth import Tokens
from kvfold_service.engine import Engine
from tests.service_cases import make_worker, step_body

BACKEND = "reference"


@dataclass
class Api:
    """The app of one service, and the shortest way to ask it."""

    service: apps.Service
    http: httpx.AsyncClient

    async def post(
        self,
        path: str,
        message: dict[str, Any] | bytes | AsyncIterator[bytes],
        encoding: str = MSGPACK,
        *,
        accept: str | None = "*/*",
        **headers: str,
    ) -> httpx.Response:
        """A message is encoded; bytes are sent as they are; a generator's chunks too, without a Content-Length."""
        content = wire.encode(encoding, message) if isinstance(message, dict) else message
        given = {name.replace("_", "-"): value for name, value in ({"content_type": encoding} | headers).items()}
        return await self.send(self.http.build_request("POST", path, content=content, headers=given), accept)

    async def get(self, path: str, *, accept: str | None = "*/*", **headers: str) -> httpx.Response:
        return await self.send(self.http.build_request("GET", path, headers=headers), accept)

    async def send(self, request: httpx.Request, accept: str | None) -> httpx.Response:
        request.headers.pop("accept", None)
        if accept is not None:
            request.headers["accept"] = accept
        return await self.http.send(request)

    async def step(self, *args: Any, token: str | None = None, **kwargs: Any) -> httpx.Response:
        bearer = {"authorization": f"Bearer {token}"} if token else {}
        return await self.post("/v1/step", step_body(*args, **kwargs), **bearer)


def said(response: httpx.Response) -> dict[str, Any]:
    """A reply's message by its content type."""
    return wire.decode(response.headers["content-type"], response.content)


def assert_refused(response: httpx.Response, code: str, encoding: str = MSGPACK, **details: Any) -> dict[str, Any]:
    """The one shape of an error, in the encoding of the reply."""
    assert response.headers["content-type"] == encoding
    error = said(response)
    assert error["code"] == code, error
    assert response.status_code == STATUS[code]
    assert error.keys() == {"code", "message", "retryable", "details"}
    assert error["retryable"] is (code in wire.RETRYABLE)
    assert error["details"] | details == error["details"]
    assert (response.status_code == 429) <= ("retry-after" in response.headers)
    return error


async def services() -> AsyncIterator[Callable[..., Api]]:
    """For `pytest.fixture`: makes services; at the end each has all of its staging back and its worker is whole."""
    made: list[Api] = []

    def make(backend: Backend | None = None, tokens: Tokens | None = None, **limits: Any) -> Api:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
        settings = options.read(["--manifest", "tiny", "--weights", "random:1", "--max-body-bytes=400000", *flags])
        worker = make_worker(
            backend or backends.load(BACKEND),
            max_requests=settings.max_requests,
            max_step_tokens=settings.max_step_tokens,
            pages=min(settings.pages, 32),
        )
        service = apps.Service(settings, Engine(worker), tokens or Tokens(None))
        service.not_ready = None
        transport = httpx.ASGITransport(apps.build(service), raise_app_exceptions=False)
        made.append(Api(service, httpx.AsyncClient(transport=transport, base_url="http://kvfold")))
        return made[-1]

    yield make
    for api in made:
        await api.http.aclose()
        await asyncio.to_thread(api.service.engine.stop)
        await asyncio.sleep(0)
        assert api.service.staging.num_lent == api.service.admission.places == 0
        assert api.service.sending.num_bytes == api.service.sending.num_replies == 0
        api.service.check_integrity()
        api.service.worker.check_integrity()
