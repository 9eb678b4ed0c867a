"""canary: a worker that has gone bad finds out by itself, idle or not, and whoever works beside it is not held up."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from kvfold_kernels import backends
from kvfold_service.canary import FAILED, NO_ROOM, PASSED, fault, proofs, watch
from tests.http_cases import Api, assert_refused, services
from tests.service_cases import HCA, changed

pytestmark = pytest.mark.anyio
serve = pytest.fixture(services)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class GoneBad:
    """The CPU backend, until it is `good` no more: then its entries are wrong, or it raises."""

    def __init__(self, how: str) -> None:
        self.good, self._how = True, how
        self.backend = changed(backends.load("cpu"), self)

    def __call__(self, real: Any, *arguments: Any) -> int:
        if not self.good and self._how == "raises":
            raise RuntimeError("injected")
        launches = real(*arguments)
        if not self.good:
            arguments[4][:, ::3] ^= 1
        return launches


@asynccontextmanager
async def watched(api: Api, seconds: float) -> AsyncIterator[None]:
    watching = asyncio.create_task(watch(api.service, seconds))
    async with asyncio.timeout(30):
        yield
    watching.cancel()


async def until_unready(api: Api) -> str:
    """What /readyz says, once it is no."""
    while (answer := await api.get("/readyz")).status_code == 200:
        await asyncio.sleep(0.01)
    return answer.json()["reason"]


def outcomes(api: Api) -> set[str]:
    worker = api.service.worker
    return {fault(worker, proof)[0] for proof in proofs(worker)}


def counted(api: Api, outcome: str) -> float:
    return api.service.metrics.registry.get_sample_value("kvfold_proofs_total", {"outcome": outcome}) or 0


@pytest.mark.parametrize("how", ["wrong", "raises"])
async def test_an_idle_worker_that_has_gone_bad_finds_out(serve, how):
    bad = GoneBad(how)
    api = serve(bad.backend)
    assert outcomes(api) == {PASSED}
    assert (await api.step([("r", 0, 9)])).status_code == 200
    async with watched(api, 0.01):
        bad.good = False
        assert "canary" in await until_unready(api)
    assert counted(api, FAILED) == 1
    assert_refused(await api.step([("r", 9, 9)], step_id="s2"), "not_ready")


async def test_so_does_one_that_never_idles(serve):
    """Steps of two clients without a pause: the engine's queue is never empty, and still the canary has its turns."""
    bad = GoneBad("wrong")
    api = serve(bad.backend, max_requests=8)
    ended: list[str] = []

    async def load(id: str) -> None:
        for i in itertools.count():
            if not i % 96:
                await api.http.delete(f"/v1/requests/{id}")
            reply = await api.step([(id, i % 96, 1)], [HCA], step_id=f"{id}{i}")
            if reply.status_code != 200:
                ended.append(assert_refused(reply, "not_ready")["message"])
                return

    clients = [asyncio.create_task(load(id)) for id in ("r", "s")]
    async with watched(api, 0.05):
        while counted(api, PASSED) < 9:
            await asyncio.sleep(0.01)
        assert not ended
        bad.good = False
        await until_unready(api)
        await asyncio.gather(*clients)
    assert all("canary" in message for message in ended)
    assert api.service.worker.totals["steps"] > 10


async def test_between_two_proofs_others_have_their_turn(serve):
    """A step that comes amid the canary waits for one proof, not for all of them."""
    slow: list[float] = []

    def compress(real: Any, *arguments: Any) -> int:
        if slow:
            time.sleep(slow[0])
        return real(*arguments)

    api = serve(changed(backends.load("cpu"), compress))
    slow.append(0.05)  # three launches a proof, three proofs
    async with watched(api, 0):
        api.service.suspect.set()
        while not api.service.worker.requests:
            await asyncio.sleep(0.001)
        assert (await api.step([("r", 0, 9)], [HCA])).status_code == 200
        assert counted(api, PASSED) < len(proofs(api.service.worker))


async def test_no_room_is_told_and_tried_again(serve):
    """All slots are taken: that is no fault, but the proof that a failed step demands is not forgotten either."""
    api = serve(max_requests=1)
    await api.step([("r", 0, 9)])
    assert outcomes(api) == {NO_ROOM}
    async with watched(api, 0):
        api.service.suspect.set()
        while not counted(api, NO_ROOM):
            await asyncio.sleep(0.01)
        assert (await api.get("/readyz")).status_code == 200
        await api.http.delete("/v1/requests/r")
        while not counted(api, PASSED):
            await asyncio.sleep(0.01)
    assert (await api.get("/v1/stats")).json()["totals"]["steps"] == 1


async def test_a_canary_leaves_requests_of_its_name_alone(serve):
    api = serve()
    await api.step([("kvfold.canary", 0, 9)])
    assert outcomes(api) == {PASSED}
    assert (await api.get("/v1/requests/kvfold.canary")).status_code == 200
