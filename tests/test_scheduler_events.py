"""scheduler over a fleet whose workers die, return, join, leave and drain at random: every entry is the reference's."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from kvfold_client.scheduler import synthetic
from kvfold_client.scheduler.lane import Tally
from kvfold_client.scheduler.trace import fit
from tests.fleet_cases import Town, towns
from tests.scheduler_cases import live, over_town
from tests.service_cases import MAX_POSITION

town = pytest.fixture(towns)


def some_events(town: Town, random: np.random.Generator) -> Callable[[int, Tally, float], None]:
    """Now and then a worker dies, comes back, joins, leaves or drains; one of each role always takes requests."""
    added = itertools.count()

    def event() -> None:
        name = str(random.choice(list(town.workers)))
        role, worker = town.roles[name], town.workers[name]
        others = [other for other in town.workers if other != name and town.roles[other] == role]
        able = any(not town.workers[other].service.draining for other in others)
        what = random.choice(["restart", "join", "leave", "drain"])
        if what == "restart":
            worker.kill()
            worker.start()
        elif what == "join" and len(town.workers) < 5:
            town.add(f"{role}-{next(added)}", role)
        elif what == "leave" and able:
            town.leave(name)
        elif what == "drain" and able:
            worker.service.draining = True

    def watch(num_finished: int, tally: Tally, now_us: float) -> None:
        if random.random() < 0.06:
            event()

    return watch


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 100))])
def test_whatever_happens_the_entries_are_the_references(town: Town, seed: int) -> None:
    random = np.random.default_rng(seed)
    for role in ("prefill", "decode", "decode"):
        town.add(f"{role}{len(town.workers)}", role)
    trace = fit(synthetic(8, seed, rate=300, mean_input=70, mean_output=12), MAX_POSITION, longest=200)
    events = some_events(town, random)
    keep_copies, policy = bool(seed % 2), {"draft_tokens": seed % 4, "token_budget": 24}
    over_town(town, trace, keep_copies=keep_copies, health_seconds=0.2, on_progress=events, **policy)
    assert seed % 2 or live(town) == 0
