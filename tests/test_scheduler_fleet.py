"""scheduler over a fleet: hand-over behind prefill, deaths, drains, full decode workers; every entry is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvfold_client import Client
from kvfold_client.scheduler import OnPaper, RealClock, SimulationError, synthetic
from kvfold_client.scheduler import workers as places
from kvfold_client.scheduler.check import Checker
from kvfold_client.scheduler.lane import Tally
from kvfold_client.scheduler.request import Request
from kvfold_client.scheduler.trace import fit
from kvfold_service import manifest as manifests
from kvfold_service.expected import sizes
from tests.fleet_cases import Town, towns
from tests.scheduler_cases import arrivals, live, over_town, simulate
from tests.service_cases import MAX_POSITION, SMALL

town = pytest.fixture(towns)
MANIFEST = manifests.parse(SMALL, "test").to_json()
TRACE = fit(synthetic(14, 5, rate=300, mean_input=60, mean_output=14), MAX_POSITION)


def at_step(number: int, do: Callable[[], None]) -> Callable[[int, Tally, float], None]:
    """Does it once, when so many steps have ended."""
    left = [do]

    def watch(num_finished: int, tally: Tally, now_us: float) -> None:
        if left and tally.steps >= number:
            left.pop()()

    return watch


def test_prefill_here_decode_there(town: Town) -> None:
    """And what moves is what paper says: the same requests, windows, entries and open rows."""
    town.add("p0", "prefill")
    town.add("d0", "decode")
    _, summary = over_town(town, TRACE, draft_tokens=2)
    going_on = [arrival for arrival in TRACE if arrival.output_length > 1]
    assert summary["hand_overs"]["requests"] == len(going_on)
    assert live(town) == 0
    totals = {name: worker.worker.totals for name, worker in town.workers.items()}
    assert totals["p0"]["tokens"] == sum(arrival.input_length for arrival in TRACE)
    assert totals["p0"]["steps"] + totals["d0"]["steps"] == summary["steps"]
    paper = OnPaper({"p0": "prefill", "d0": "decode"}, sizes(SMALL))
    _, planned = simulate(TRACE, paper, MANIFEST, check=False, draft_tokens=2)
    same = ("steps", "rows", "windows", "skipped", "accepted", "ttft_ms", "per_token_ms", "gap_ms")
    assert {name: summary[name] for name in same} == {name: planned[name] for name in same}
    for name in ("requests", "entry_bytes", "open_row_bytes"):
        assert summary["hand_overs"][name] == planned["hand_overs"][name] > 0


@pytest.mark.parametrize("keep_copies", [False, True])
def test_a_decode_worker_dies(town: Town, keep_copies: bool) -> None:
    """Its requests go on at the other one, from the prefill worker's copy or from their beginning."""
    trace = arrivals(*[(50, 40)] * 6)
    town.add("p0", "prefill")
    town.add("d0", "decode")
    town.add("d1", "decode")
    _, summary = over_town(town, trace, keep_copies=keep_copies, on_progress=at_step(20, lambda: town.leave("d0")))
    assert summary["recovered"] >= 1
    assert summary["replayed_tokens"] > 0
    again = summary["rows"] - sum(arrival.num_rows for arrival in trace)
    assert again == summary["replayed_tokens"]
    per_request = summary["replayed_tokens"] / summary["recovered"]
    assert (per_request < 50) == keep_copies


@pytest.mark.parametrize("roles", [("prefill", "prefill", "decode"), ("any", "any", "any")])
def test_a_worker_dies_amid_prefill(town: Town, roles: tuple[Any, ...]) -> None:
    for i, role in enumerate(roles):
        town.add(f"w{i}", role)
    _, summary = over_town(town, TRACE, token_budget=16, on_progress=at_step(6, town.workers["w0"].kill))
    del town.workers["w0"]
    assert summary["recovered"] >= 1


def test_the_only_worker_of_its_role_comes_back(town: Town) -> None:
    """With nothing of what it had."""
    town.add("p0", "prefill")
    decode = town.add("d0", "decode")

    def again() -> None:
        decode.kill()
        decode.start()

    _, summary = over_town(town, TRACE, on_progress=at_step(12, again))
    assert summary["recovered"] >= 1
    assert live(town) == 0


def test_a_worker_dies_before_it_is_looked_at(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step of a request has ended, its entries are not checked yet: they are made again somewhere else."""
    town.add("p0", "prefill")
    town.add("d0", "decode")
    town.add("d1", "decode")
    look, dead = Checker.__call__, []

    def die_first(self: Checker, request: Request, client: Client | None) -> None:
        if request.lane == "d1" and not dead:
            dead.append(request.idx)
            town.workers["d1"].kill()
            town.workers["d1"].start()
        look(self, request, client)

    monkeypatch.setattr(Checker, "__call__", die_first)
    simulation, summary = over_town(town, TRACE, keep_copies=True)
    assert len(dead) == 1
    assert summary["recovered"] >= 1
    assert simulation.requests[dead[0]].generated == TRACE[dead[0]].output_length


def test_nobody_is_left(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "RECOVERY_S", 0.5)
    town.add("p0", "prefill")
    town.add("d0", "decode")
    with pytest.raises(SimulationError, match=r"no worker took request run\.\d+"):
        over_town(town, TRACE, on_progress=at_step(12, lambda: town.leave("d0")))


@pytest.mark.parametrize("name", ["p0", "d0"])
def test_a_worker_drains(town: Town, name: str) -> None:
    """Its requests move, with what they have: nothing is sent twice."""
    for worker in ("p0", "p1"):
        town.add(worker, "prefill")
    for worker in ("d0", "d1"):
        town.add(worker, "decode")

    def drain() -> None:
        town.workers[name].service.draining = True

    _, summary = over_town(town, TRACE, token_budget=16, on_progress=at_step(8, drain))
    assert summary["refusals"]["draining"] >= 1
    assert summary["replayed_tokens"] == 0
    assert live(town) == 0


def test_a_full_decode_worker_keeps_requests_at_prefill(town: Town) -> None:
    town.add("p0", "prefill")
    town.add("d0", "decode", max_requests=2)
    trace = arrivals(*[(40, 30)] * 5)
    _, summary = over_town(town, trace)
    assert summary["refusals"]["pool_exhausted"] >= 1
    assert summary["replayed_tokens"] == 0
    assert summary["hand_overs"]["requests"] == 4
    assert live(town) == 0


def test_in_real_time(town: Town) -> None:
    """Workers run beside each other; times are the wall's, and no request is before its time."""
    town.add("p0", "prefill")
    town.add("d0", "decode")
    trace = arrivals(*[(60, 10)] * 4, every_ms=20)
    simulation, summary = over_town(town, trace, clock=RealClock(5), draft_tokens=2)
    assert 0.06 <= summary["seconds"] < 30
    assert simulation.clock.now_us() / 1e6 >= summary["seconds"]
    for request in simulation.requests:
        assert request.first_token_us is not None
        assert request.arrived_us < request.first_token_us < (request.finished_us or 0)
    assert summary["measured"]["phases_us_a_step"]["kernel"] > 0
    assert summary["hand_overs"]["seconds"] > 0
