"""Plans of a batch: made once for compressors that differ in nothing but pages, and the same as each alone."""

from __future__ import annotations

import numpy as np
import pytest

from kvfold_kernels import backends
from kvfold_kernels import plan as p
from kvfold_service import works as module
from kvfold_service.reserve import Wanted, prepare
from kvfold_service.step import parse_step
from kvfold_service.works import works
from tests.service_cases import make_worker, step_body
from tests.walk import Part, Walk

LAYERS = ("layers.0", "layers.1", "layers.2")
NAMES = [f"{layer}.{kind}" for layer in LAYERS for kind in ("csa", "indexer", "hca")]


def body(page_entries: dict[str, int] | None = None) -> dict:
    """Three layers of each kind; page sizes are those of the kind but where given."""
    usual = {
        "csa": {"ratio": 4, "head_dim": 128, "page_entries": 2, "cache_format": "fp8_ds_mla"},
        "indexer": {"ratio": 4, "head_dim": 64, "page_entries": 3, "cache_format": "indexer_fp8"},
        "hca": {"ratio": 8, "head_dim": 128, "page_entries": 2, "cache_format": "fp8_ds_mla"},
    }
    parts = [{"name": name, "kind": (kind := name.rpartition(".")[2])} | usual[kind] for name in NAMES]
    return {
        "max_position": 256,
        "draft_slack": 3,
        "compressors": [
            part | {"page_entries": (page_entries or {}).get(part["name"], part["page_entries"])} for part in parts
        ],
    }


def walked(page_entries=None, sets=None, steps=40) -> Walk:
    worker = make_worker(backends.load("cpu"), body(page_entries), max_requests=8, pages=200)
    walk = Walk(worker, make_worker(backends.load("cpu"), body(), max_requests=2, pages=200), sets or [NAMES], 2)
    walk._place = lambda frame: memoryview(bytearray(frame))
    for i in range(steps):
        walk.step(5, 1 + i % 2)
        if i % 7 == 3:
            walk.move()
    return walk


@pytest.fixture
def made(monkeypatch) -> list[p.Plan]:
    """Plans that were made in full."""
    plans, real = [], p.make_plan

    def make_plan(*args):
        plans.append(real(*args))
        return plans[-1]

    monkeypatch.setattr(module.p, "make_plan", make_plan)
    return plans


def planned(walk: Walk, lengths: dict[str, int]) -> list:
    """The works of a step of these requests, and that each plan is what its compressor alone gives."""
    message = walk.message([Part(r, walk.lengths[r], n) for r, n in lengths.items()], NAMES)
    prepared = prepare(walk.worker, Wanted(parse_step(message, walk.worker.rules), ""))
    found = works(walk.worker.caches, [prepared])
    for work in found:
        cache, loc = work.cache, np.cumsum([0, *(n for n in lengths.values() if n)])
        alone = p.make_plan(
            cache.compressor.geometry,
            cache.state,
            prepared.slots[prepared.active],
            loc,
            cache.page_table,
            cache.page_entries,
        )
        for field in ("windows", "appends", "slots", "entries", "next_state"):
            np.testing.assert_array_equal(getattr(work.plan, field), getattr(alone, field), field)
            assert not getattr(work.plan, field).flags.writeable
        assert work.plan.num_tokens == alone.num_tokens
    prepared.undo(walk.worker)
    return found


@pytest.mark.parametrize("page_entries", [None, {"layers.1.csa": 5, "layers.2.indexer": 1}])
def test_plans_are_those_of_each_compressor_alone(page_entries):
    walk = walked(page_entries)
    for length in (0, 1, 4, 9):
        found = planned(walk, dict.fromkeys(walk.lengths, length))
        assert [work.cache.name for work in found] == NAMES


def test_one_plan_serves_a_kind_in_all_its_layers(made):
    walk = walked(steps=5)
    made.clear()
    works_ = planned(walk, {next(iter(walk.lengths)): 9})
    assert len(made) == 3 + len(NAMES), "a plan a kind, and those that were made to compare"
    slots = [work.plan.windows[p.SLOT].tolist() for work in works_ if work.cache.part.kind == "csa"]
    assert len({tuple(row) for row in slots}) == 3, "pages of their own"


def test_compressors_that_stand_elsewhere_have_plans_of_their_own(made):
    walk = walked(steps=0)
    walk.lengths["0.a"] = 0
    walk.run(walk.message([Part("0.a", 0, 8)], NAMES))
    walk.lengths["0.a"] = 8
    cache = walk.worker.caches.by_name["layers.1.csa"]
    cache.state[p.RING_START, 0] += 1
    made.clear()
    planned(walk, {"0.a": 4})
    assert len(made) == 4 + len(NAMES)


def test_members_that_carry_different_compressors():
    sets = [NAMES, NAMES[:2], NAMES[3:7]]
    walk = walked(sets=sets, steps=0)
    for n in range(6):
        steps = [walk.message([Part(f"{i}.r", 5 * n, 5)], names) for i, names in enumerate(sets)]
        walk.run(*steps)
    walk.lengths = dict.fromkeys(("0.r", "1.r", "2.r"), 30)
    assert walk.check() == sum(30 // (8 if name.endswith("hca") else 4) for names in sets for name in names)


def test_the_order_is_that_of_the_first_mention():
    worker = make_worker(backends.load("cpu"))
    names = [["layers.1.csa"], ["layers.0.hca", "layers.1.csa"]]
    members = [
        prepare(worker, Wanted(parse_step(step_body([(f"r{i}", 0, 2)], some), worker.rules), ""))
        for i, some in enumerate(names)
    ]
    assert [work.cache.name for work in works(worker.caches, members)] == ["layers.1.csa", "layers.0.hca"]
