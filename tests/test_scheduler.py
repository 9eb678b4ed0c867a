"""scheduler over one worker in process: every entry is the reference's, a seed is a run, odd lengths."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvfold_client.scheduler import synthetic
from kvfold_client.scheduler.trace import Arrival, fit
from kvfold_kernels import backends
from tests.http_cases import Api, services
from tests.scheduler_cases import arrivals, client_of, num_entries, over
from tests.service_cases import MAX_POSITION, SLACK

serve = pytest.fixture(services)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def api(serve: Any) -> Api:
    return serve(backends.load("cpu"))


@pytest.mark.anyio
async def test_a_trace_is_served_and_every_entry_is_the_references(api: Api) -> None:
    trace = fit(synthetic(12, 3, rate=200, mean_input=60, mean_output=12), MAX_POSITION)
    with client_of(api) as client:
        simulation, summary = await over(client, trace, draft_tokens=SLACK, acceptance=0.5, max_running=3)
    assert summary["checked"] == {"requests": 12, "entries": num_entries(trace)}
    assert [request.generated for request in simulation.requests] == [arrival.output_length for arrival in trace]
    assert summary["generated_tokens"] == sum(arrival.output_length for arrival in trace)
    assert 0 < summary["accepted"] < summary["guesses"]
    assert summary["rows"] - (summary["guesses"] - summary["accepted"]) == sum(arrival.num_rows for arrival in trace)
    totals = api.service.worker.totals
    assert (totals["steps"], totals["skipped"], totals["tokens"]) == (
        summary["steps"], summary["skipped"], summary["rows"],
    )  # fmt: skip
    assert 0 < summary["skipped"] < summary["compressor_steps"]
    assert not api.service.worker.requests


@pytest.mark.anyio
async def test_a_seed_is_a_run(api: Api) -> None:
    """The virtual clock: the same times to the last digit, whatever the machine did meanwhile."""
    trace = arrivals((70, 9), (5, 20), (130, 4))
    told = []
    with client_of(api) as client:
        for run, seed in enumerate((1, 1, 2)):
            _, summary = await over(client, trace, seed=seed, draft_tokens=2, check=False, run_id=f"run{run}")
            told.append(json.dumps({k: v for k, v in summary.items() if k not in ("measured", "launches")}))
    assert told[0] == told[1] != told[2]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("lengths", "policy"),
    [
        ([(1, 1)], {}),
        ([(3, 1), (4, 1), (7, 1), (8, 1), (9, 1)], {}),
        ([(2, 2), (1, 30)], {"token_budget": 1}),
        ([(40, 6), (33, 3)], {"token_budget": 3, "draft_tokens": SLACK, "acceptance": 0.4}),
        ([(100, 20)], {"token_budget": 7, "draft_tokens": 1, "acceptance": 0.0}),
        ([(60, 8), (61, 8), (62, 8)], {"chunked": False, "token_budget": 1}),
        ([(20, 5)] * 6, {"max_running": 1}),
    ],
    ids=["one", "below-a-window", "budget-1", "budget-below-a-window", "all-wrong", "whole", "one-at-a-time"],
)
async def test_odd_lengths(api: Api, lengths: list[tuple[int, int]], policy: dict[str, Any]) -> None:
    trace = arrivals(*lengths)
    with client_of(api) as client:
        simulation, summary = await over(client, trace, **policy)
    assert summary["checked"] == {"requests": len(trace), "entries": num_entries(trace)}
    assert all(request.committed == request.arrival.num_rows for request in simulation.requests)
    for request in simulation.requests:
        assert request.first_token_us is not None
        assert request.finished_us is not None
        assert request.arrived_us < request.first_token_us <= request.finished_us
        assert (request.first_token_us == request.finished_us) == (request.arrival.output_length == 1)
    assert not api.service.worker.requests


@pytest.mark.anyio
async def test_chunks_do_not_hold_up_a_short_prompt(api: Api) -> None:
    """A prompt of a few tokens that comes while a long one is prefilled has its first token before it."""
    trace = (Arrival(0, 180, 2), Arrival(1, 4, 2))
    firsts = {}
    with client_of(api) as client:
        for chunked in (True, False):
            simulation, _ = await over(client, trace, chunked=chunked, token_budget=20, run_id=f"r{chunked}")
            firsts[chunked] = [request.first_token_us for request in simulation.requests]
    assert firsts[False][0] < firsts[True][0]
    assert firsts[False][0] <= firsts[False][1]
