"""recall: a worker that drains still tells how a step that it has run ended, and nothing else; none waits for that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvfold_client import wire
from kvfold_client.wire import FRAME, MSGPACK
from kvfold_service.drain import drain
from tests.http_cases import assert_refused, said, services
from tests.service_cases import HCA, Gate, parts_of, step_body

pytestmark = pytest.mark.anyio
serve = pytest.fixture(services)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_a_step_that_ran_is_told_again_while_draining(serve):
    """Only that very step: whatever else comes is `draining`, and if its length is none that ran, it is not read."""
    api = serve(remembered_steps=2)
    first = await api.step([("r", 0, 30)])
    api.service.draining = True
    again = await api.step([("r", 0, 30)])
    assert (again.status_code, again.content) == (200, first.content)
    frame = await api.post("/v1/step", step_body([("r", 0, 30)]), accept=FRAME)
    assert frame.headers["content-type"] == FRAME
    assert said(frame) == said(first)
    for changes in ({"step_id": "s2"}, {"version": 2}, {"positions": list(range(1, 31))}):
        assert_refused(await api.step([("r", 0, 30)], **changes), "draining")
    extent = api.service.staging.lend(api.service.staging.num_bytes - 1000)
    assert_refused(await api.step([("r", 0, 30)]), "draining")
    api.service.staging.give_back(extent)

    async def unread() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    assert_refused(await api.post("/v1/step", unread(), content_length="10"), "draining")
    assert_refused(await api.post("/v1/step", unread()), "draining")
    assert said(await api.get("/v1/requests/r"))["compressors"][HCA]["committed"] == 30


async def test_a_step_that_still_runs_is_told_while_draining(serve):
    gate = Gate()
    api = serve(gate.backend)
    first = asyncio.create_task(api.step([("r", 0, 3)]))
    await gate.running()
    draining = asyncio.create_task(drain(api.service, 5))
    while not api.service.draining:
        await asyncio.sleep(0.001)
    again = asyncio.create_task(api.step([("r", 0, 3)]))
    await asyncio.sleep(0.05)
    gate.go.set()
    assert (await first).content == (await again).content
    assert await draining > 0


async def test_who_asks_again_and_again_does_not_prolong_the_drain(serve):
    """A body that comes after the signal is not waited for; the pages are."""
    api = serve()
    reply = said(await api.step([("r", 0, 30)]))
    body, come = wire.encode(MSGPACK, step_body([("r", 0, 30)])), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield body[:100]
        await come.wait()
        yield body[100:]

    draining = asyncio.create_task(drain(api.service, 5))
    await asyncio.sleep(0.1)
    again = asyncio.create_task(api.post("/v1/step", slow(), content_length=str(len(body))))
    while not api.service.admission.places:
        await asyncio.sleep(0.001)
    handles = [handle for part in parts_of(reply, "r").values() for handle in part["pages"]]
    await api.post("/v1/pages/read", {"version": 1, "handles": handles})
    assert await draining > 3
    come.set()
    assert (await again).status_code == 200
