"""scheduler over one worker that refuses, fails, drains or loses replies: it waits, and every entry is right."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import httpx
import pytest

from kvfold_client import errors
from kvfold_client.scheduler import RowSource, SimulationError, shapes_of
from kvfold_kernels import backends
from tests.http_cases import Api, services
from tests.scheduler_cases import arrivals, client_of, num_entries, over
from tests.service_cases import SLACK, SMALL, changed

serve = pytest.fixture(services)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def api(serve: Any) -> Api:
    return serve(backends.load("cpu"))


@pytest.mark.anyio
async def test_a_full_pool_makes_requests_wait_and_start_over(api: Api) -> None:
    """Pages for about one and a half of them: somebody is refused, somebody starts over, and all of them end."""
    trace = arrivals((150, 60), (150, 60), (100, 30), (100, 30), every_ms=0.5)
    with client_of(api) as client:
        simulation, summary = await over(client, trace, draft_tokens=2)
    assert summary["refusals"]["pool_exhausted"] >= 2
    assert summary["preempted"] >= 1
    assert summary["recovered"] == 0
    assert summary["replayed_tokens"] > 0
    assert sum(request.replayed_tokens for request in simulation.requests) == summary["replayed_tokens"]
    assert summary["checked"] == {"requests": 4, "entries": num_entries(trace)}
    assert not api.service.worker.requests


@pytest.mark.anyio
async def test_slots_that_others_have_are_waited_for(serve: Any) -> None:
    """Another client has the only slot; Retry-After passes on the simulation's clock until it is free."""
    api = serve(backends.load("cpu"), max_requests=1)
    await api.step([("other", 0, 5)])
    refusals = 0

    def free_it_in_time(request: httpx.Request) -> None:
        nonlocal refusals
        if request.url.path == "/v1/step":
            refusals += 1
            if refusals == 4:
                api.service.worker.release("other", "")

    with client_of(api, free_it_in_time) as client:
        simulation, summary = await over(client, arrivals((20, 3), (9, 1), (9, 1), every_ms=0.0), max_running=3)
    assert summary["refusals"]["pool_exhausted"] >= 3
    assert summary["preempted"] == 0
    assert simulation.requests[0].first_token_us > 1e6


@pytest.mark.anyio
async def test_a_request_that_never_fits_ends_the_simulation(serve: Any) -> None:
    api = serve(backends.load("cpu"), pages=2)
    with client_of(api) as client, pytest.raises(SimulationError, match="refused 30 times in a row: pool_exhausted"):
        await over(client, arrivals((200, 3)))


@pytest.mark.anyio
async def test_a_step_that_fails_is_sent_again(serve: Any) -> None:
    def fail_twice(real: Any, *arguments: Any) -> int:
        failures.append(len(failures))
        if len(failures) in (2, 3):
            raise RuntimeError("no")
        return real(*arguments)

    failures: list[int] = []
    api = serve(changed(backends.load("cpu"), fail_twice))
    trace = arrivals((50, 5), (20, 4))
    with client_of(api) as client:
        _, summary = await over(client, trace)
    assert summary["refusals"] == {"step_failed": 2}
    assert summary["checked"]["entries"] == num_entries(trace)


@pytest.mark.anyio
async def test_the_only_worker_drains(api: Api) -> None:
    def drain(request: httpx.Request) -> None:
        if request.url.path == "/v1/step" and api.service.worker.requests:
            api.service.draining = True

    with client_of(api, drain) as client, pytest.raises(SimulationError, match="worker takes no more steps"):
        await over(client, arrivals((100, 5)))


@pytest.mark.anyio
async def test_a_lost_reply_costs_no_entry(api: Api) -> None:
    """The step ran, and its guesses are committed: the request starts over; a step that did not run goes on."""
    trace = arrivals((60, 12), (30, 9))
    steps = 0

    def lose(request: httpx.Request) -> httpx.Response | None:
        nonlocal steps
        steps += request.url.path == "/v1/step"
        if steps == 3 and request.url.path == "/v1/step":
            raise httpx.ReadError("cut off before it was sent")
        if steps == 5 and request.url.path.endswith("/truncate"):
            steps += 1
            raise httpx.ReadError("its guesses stay")
        return None

    with client_of(api, lose) as client:
        _, summary = await over(client, trace, draft_tokens=SLACK, acceptance=0.3)
    assert summary["recovered"] >= 2
    assert summary["replayed_tokens"] > 0
    assert summary["checked"]["entries"] == num_entries(trace)


@pytest.mark.anyio
async def test_a_refusal_that_waiting_does_not_mend_is_told(api: Api) -> None:
    trace = arrivals((60, 20))
    with client_of(api) as client, pytest.raises(errors.Malformed, match="draft"):
        await over(client, trace, draft_tokens=SLACK + 1)


@pytest.mark.anyio
async def test_a_refusal_says_how_long_to_wait(serve: Any) -> None:
    """As Retry-After does, and still when it comes from another process."""
    api = serve(backends.load("cpu"), max_requests=1)
    await api.step([("other", 0, 5)])
    with client_of(api) as client:
        source = RowSource(1, shapes_of(SMALL))
        rows = {name: source.rows(0, name, 0, 1) for name in source.shapes}
        with pytest.raises(errors.PoolExhausted) as caught:
            await asyncio.to_thread(client.step, [("r", 0, 1)], rows)
        with pytest.raises(errors.UnknownRequest) as at_once:
            await asyncio.to_thread(client.request, "r")
    assert caught.value.retry_after_s == pickle.loads(pickle.dumps(caught.value)).retry_after_s == 1.0
    assert at_once.value.retry_after_s is None
