"""rollback: rejected drafts leave nothing behind. Drafts here are rows of another stream, so that any trace shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvfold_service.worker import Worker
from tests.service_cases import (
    CSA,
    HCA,
    INDEXER,
    NAMES,
    PAGE_ENTRIES,
    RATIO,
    REAL,
    REAL_NAMES,
    SLACK,
    SMALL,
    alone,
    assert_entries,
    committed,
    export,
    feed,
    import_,
    open_positions,
    page_entries,
    read,
    refused,
    rows_of,
    run,
    send,
    snapshot,
    step_body,
    stream,
    tensor,
    whole_workers,
)

Start = Callable[..., Worker]
start = pytest.fixture(whole_workers)


@pytest.fixture
def worker(start: Start) -> Worker:
    return start()


def guess(worker: Worker, request_id: str, right: int, wrong: int, names: tuple[str, ...] = NAMES) -> None:
    """The next tokens, all of them drafts: `right` ones and then `wrong` ones."""
    at = committed(worker, request_id, names[0])
    drafts = min(right + wrong, worker.manifest.draft_slack)
    run(worker, [(request_id, at, right + wrong)], names, wrong=wrong, draft_tokens=[drafts])


def poison(worker: Worker) -> None:
    """NaN into every ring row that no request needs."""
    for cache in worker.caches.compressors:
        rows = cache.compressor.geometry.ring_rows
        dead = np.ones(cache.rings.shape[:2], bool)
        for slot, (end, live, ring) in enumerate(cache.state.T):
            dead[slot, (ring + np.arange(end - live)) % rows] = False
        cache.rings.numpy()[dead] = np.nan


def assert_serial(worker: Worker, names: tuple[str, ...], length: int) -> None:
    """Request r stands as if it had been fed `length` tokens and no others: entries, open rows, numbers."""
    for name in names:
        assert_entries(worker, "r", name)
    for name, part in export(worker, "r", compressors=list(names), entries=False)["compressors"].items():
        positions = open_positions(name, length)
        assert (part["committed"], part["open_positions"]) == (length, list(positions))
        np.testing.assert_array_equal(rows_of(part["open_rows"]), stream(name, "r")[positions.start : positions.stop])
        told = worker.request("r")["compressors"][name]
        ratio = worker.rules.parts[name].ratio
        assert (told["num_entries"], told["open_tokens"]) == divmod(length, ratio)
        assert len(told["pages"]) == -(-told["num_entries"] // worker.caches.by_name[name].page_entries)


# -- any lengths ---------------------------------------------------------------------------------------------------


def reject(start: Start, manifest: dict[str, Any], names: tuple[str, ...], before: int, right: int, wrong: int) -> None:
    """`before` tokens, `right` and `wrong` drafts, the wrong ones withdrawn, one token, and all the others."""
    worker = start(manifest=manifest)
    feed(worker, "r", [before], names)
    guess(worker, "r", right, wrong, names)
    poison(worker)
    worker.truncate("r", before + right)
    worker.check_integrity()
    poison(worker)
    assert_serial(worker, names, before + right)
    feed(worker, "r", [1], names)
    assert_serial(worker, names, before + right + 1)
    rest = len(stream(names[0], "r")) - before - right - 1
    feed(worker, "r", [rest], names)
    assert_serial(worker, names, before + right + 1 + rest)


@pytest.mark.parametrize("shift", range(8))
def test_of_drafts_6_to_9_only_6_is_accepted(start, shift):
    """Ascend 9111, at every phase of the windows: positions 6 … 9, then on from 7."""
    reject(start, SMALL | {"draft_slack": 8}, NAMES, 6 + shift, 1, 3)


@pytest.mark.parametrize("right", [0, 1, 3])
@pytest.mark.parametrize("before", [*range(119, 130), 255])
def test_drafts_across_127_and_128(start, before, right):
    """The real ratios and slack: eight drafts, of which few are accepted."""
    reject(start, REAL, REAL_NAMES, before, right, 8 - right)


@pytest.mark.parametrize("before", range(17))
def test_every_small_rollback(start, before):
    """(tokens of the step, drafts among them, length to go back to): every one that three drafts allow."""
    worker = start()
    for length in (1, 2, 3, 4, 9):
        for drafts in range(1, min(length, SLACK) + 1):
            for back in range(1, drafts + 1):
                feed(worker, "r", [before] * (before > 0))
                run(worker, [("r", before, length)], wrong=back, draft_tokens=[drafts])
                worker.truncate("r", before + length - back)
                worker.check_integrity()
                assert_serial(worker, NAMES, before + length - back)
                feed(worker, "r", [2, 11])
                worker.check_integrity()
                assert_serial(worker, NAMES, before + length - back + 13)
                worker.release("r")
                assert all(group.pool.num_used == 0 for group in worker.caches.groups)


def test_speculative_decoding_to_the_end(start):
    """Guess four, keep some, guess again, beside a request that only goes on; rings turn many times."""
    worker, rng, at = start(manifest=SMALL | {"draft_slack": 4}), np.random.default_rng(4), 3
    feed(worker, "r", [at])
    while at < 90:
        right = int(rng.integers(0, 5))
        run(worker, [("r", at, 4), ("s", at - 3, 4)], wrong=4 - right, draft_tokens=[4, 4])
        for id in "rs":
            worker.truncate(id, committed(worker, id, HCA) - (4 - right))
            worker.check_integrity()
        at += right
        poison(worker)
    assert at <= 93
    assert_serial(worker, NAMES, at)
    for name in NAMES:
        assert_entries(worker, "s", name)


# -- what was published --------------------------------------------------------------------------------------------


def pages(worker: Worker, name: str) -> list[str]:
    return worker.request("r")["compressors"][name]["pages"]


def used(worker: Worker) -> dict[str, int]:
    return {group.label: group.pool.num_used for group in worker.caches.groups}


@pytest.mark.parametrize("name", NAMES)
def test_a_page_that_loses_an_entry_is_another_page(worker, name):
    """The first page keeps an entry: its old handle is stale, its new one shows what is left."""
    feed(worker, "r", [2 * RATIO[name] - 1], [name])
    first = pages(worker, name)
    guess(worker, "r", 0, 2, (name,))
    assert pages(worker, name) == first
    before = used(worker)
    assert [page["num_entries"] for page in read(worker, first)] == [2]
    told = worker.truncate("r", 2 * RATIO[name] - 1)
    (new,) = told["compressors"][name]["pages"]
    assert new != first[0]
    assert used(worker) == before
    with refused("stale_handle"):
        read(worker, first)
    with refused("stale_handle"):
        worker.verify([new, *first], "")
    (page,) = read(worker, [new])
    assert page["num_entries"] == 1
    left = page_entries(worker.caches.by_name[name], page)
    np.testing.assert_array_equal(left, alone(worker.backend, "r", name)[:1])
    feed(worker, "r", [1], [name])
    assert pages(worker, name) == [new]
    assert_entries(worker, "r", name)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_that_loses_all_entries_is_free(worker, name):
    """The page before it stays as it was; who gets the free page does not answer to the old handle."""
    full = RATIO[name] * PAGE_ENTRIES[name]
    feed(worker, "r", [full + RATIO[name] - 1], [name])
    kept, before = pages(worker, name), used(worker)
    guess(worker, "r", 0, 3, (name,))
    old = pages(worker, name)
    assert old[:1] == kept
    assert len(old) == 2
    worker.truncate("r", full + RATIO[name])  # the accepted one closes the entry
    assert pages(worker, name) == old
    worker.truncate("r", full + RATIO[name] - 1)
    assert (pages(worker, name), used(worker)) == (kept, before)
    with refused("stale_handle"):
        read(worker, old[1:])
    page = worker.caches.by_name[name].group.pool
    feed(worker, "other", [RATIO[name]], [name])
    assert page.num_used == sum(before[group.label] for group in worker.caches.groups if group.pool is page) + 1
    with refused("stale_handle"):
        read(worker, old[1:])
    assert len(read(worker, kept)) == 1
    feed(worker, "r", [20], [name])
    assert_entries(worker, "r", name)
    assert_entries(worker, "other", name)


def test_drafts_over_a_page_end(start):
    """Eight drafts close entries in two csa pages: a page before them stays, one loses an entry, one is freed."""
    worker = start(manifest=SMALL | {"draft_slack": 8})
    feed(worker, "r", [11], [CSA])
    run(worker, [("r", 11, 10)], [CSA], wrong=8, draft_tokens=[8])  # entries 0, 1 | 2, 3 | 4
    old = pages(worker, CSA)
    worker.truncate("r", 13)
    new = pages(worker, CSA)
    assert (len(old), len(new)) == (3, 2)
    assert [a == b for a, b in zip(old, new, strict=False)] == [True, False]
    for handle in old[1:]:
        with refused("stale_handle"):
            read(worker, [handle])
    assert_serial(worker, (CSA,), 13)


def test_no_entry_withdrawn_no_handle_changed(worker):
    feed(worker, "r", [9])
    run(worker, [("r", 9, 2)], wrong=2, draft_tokens=[2])
    old = {name: pages(worker, name) for name in NAMES}
    worker.truncate("r", 9)
    assert {name: pages(worker, name) for name in NAMES} == old
    for name in NAMES:
        assert len(read(worker, old[name])) == 1


def test_back_to_nothing(worker):
    """A request whose only tokens were drafts stays known, with no tokens and no page."""
    run(worker, [("r", 0, 3)], wrong=3, draft_tokens=[3])
    worker.truncate("r", 0)
    assert {committed(worker, "r", name) for name in NAMES} == {0}
    assert set(used(worker).values()) == {0}
    with refused("truncate_too_far"):
        worker.truncate("r", 1)
    feed(worker, "r", [40])
    assert_serial(worker, NAMES, 40)


# -- what is refused -----------------------------------------------------------------------------------------------


def assert_too_far(worker: Worker, length: int, **details: Any) -> None:
    before = snapshot(worker)
    with refused("truncate_too_far", **details) as caught:
        worker.truncate("r", length)
    assert not caught.value.body()["retryable"]
    assert snapshot(worker) == before


def test_too_far(worker):
    feed(worker, "r", [10])
    assert_too_far(worker, 9, compressor=HCA, committed=10, draft_tokens=0)
    run(worker, [("r", 10, 5)], draft_tokens=[2])
    assert_too_far(worker, 12, compressor=HCA, committed=15, draft_tokens=2)
    assert_too_far(worker, 0, compressor=HCA, committed=15, draft_tokens=2)
    assert_too_far(worker, 16, request="r")
    worker.truncate("r", 13)
    assert_too_far(worker, 14, request="r")


def test_a_second_truncate_takes_more_of_the_same_drafts(worker):
    feed(worker, "r", [7])
    run(worker, [("r", 7, 4)], wrong=3, draft_tokens=[3])
    for length in (10, 10, 9, 8):
        worker.truncate("r", length)
    assert_too_far(worker, 7, compressor=HCA, committed=8, draft_tokens=0)
    assert_serial(worker, NAMES, 8)


@pytest.mark.parametrize("drafts", [0, 2])
def test_truncate_to_the_same_length_does_nothing(worker, drafts):
    run(worker, [("r", 0, 17)], draft_tokens=[drafts])
    before = snapshot(worker)
    told = worker.request("r")
    assert worker.truncate("r", 17) == told
    assert snapshot(worker) == before


def test_only_the_last_step_s_drafts(worker):
    run(worker, [("r", 0, 9)], draft_tokens=[3])
    run(worker, [("r", 9, 1)])
    assert_too_far(worker, 9, committed=10, draft_tokens=0)
    run(worker, [("r", 10, 2)], draft_tokens=[1])
    assert_too_far(worker, 10, committed=12, draft_tokens=1)
    worker.truncate("r", 11)


def test_what_changes_nothing_leaves_the_drafts(worker):
    """A step of no tokens, refused steps, refused exports; and the steps of other requests."""
    run(worker, [("r", 0, 9)], draft_tokens=[2])
    run(worker, [("r", 9, 0), ("s", 0, 4)])
    with refused("position_gap"):
        run(worker, [("r", 10, 1)])
    with refused("pool_exhausted"):
        run(worker, [("r", 9, 1), *((id, 0, 1) for id in "abc")])
    with refused("unknown_compressor"):
        export(worker, "r", compressors=[HCA, "none"])
    with refused("malformed"):
        export(worker, "r", from_entry=-1)
    worker.truncate("r", 7)
    assert_serial(worker, NAMES, 7)


def test_an_export_makes_its_drafts_final(worker):
    """In the compressors that it named, and so for the step as a whole."""
    run(worker, [("r", 0, 9)], [HCA], draft_tokens=[2])
    run(worker, [("r", 0, 9)], [CSA], draft_tokens=[2])
    export(worker, "r", compressors=[CSA], entries=False)
    assert_too_far(worker, 8, compressor=CSA, committed=9, draft_tokens=0)
    run(worker, [("r", 0, 7)], [INDEXER])
    worker.truncate("r", 9)
    export(worker, "r")
    assert_too_far(worker, 8, compressor=HCA, committed=9, draft_tokens=0)


def test_an_import_has_no_drafts(start):
    giver, worker = start(), start()
    run(giver, [("r", 0, 9)], draft_tokens=[2])
    import_(worker, "r", export(giver, "r"))
    assert_too_far(worker, 8, compressor=HCA, committed=9, draft_tokens=0)
    run(worker, [("r", 9, 3)], wrong=3, draft_tokens=[3])
    worker.truncate("r", 9)
    assert_serial(worker, NAMES, 9)


def test_unknown_requests(worker):
    run(worker, [("r", 0, 9)], draft_tokens=[2])
    with refused("unknown_request"):
        worker.truncate("s", 0)
    with refused("unknown_request"):
        worker.truncate("r", 8, "tenant")
    assert committed(worker, "r", HCA) == 9


# -- by compressor -------------------------------------------------------------------------------------------------


def test_steps_of_one_compressor_each(worker):
    """One truncate takes from each as much as it has, and as its own drafts allow."""
    for name, drafts in zip(NAMES, (2, 3, 1), strict=True):
        run(worker, [("r", 0, 7)], [name])
        run(worker, [("r", 7, 3)], [name], wrong=drafts, draft_tokens=[drafts])
    assert_too_far(worker, 8, compressor=INDEXER, committed=10, draft_tokens=1)
    worker.truncate("r", 9)
    assert {committed(worker, "r", name) for name in NAMES} == {9}
    assert_too_far(worker, 7, compressor=HCA, committed=9, draft_tokens=1)


def test_those_that_have_fewer_tokens_stay(worker):
    run(worker, [("r", 0, 10)], [HCA], wrong=2, draft_tokens=[3])
    run(worker, [("r", 0, 5)], [CSA], draft_tokens=[3])
    worker.truncate("r", 8)
    assert [committed(worker, "r", name) for name in NAMES] == [8, 5, 0]
    feed(worker, "r", [3], [CSA])
    feed(worker, "r", [8], [INDEXER])
    assert_serial(worker, NAMES, 8)
    assert_too_far(worker, 4)


def test_compressors_of_one_step_go_back_together(worker):
    """A partner of the step has gone on: its drafts, until it is back where the step left it."""
    run(worker, [("r", 0, 10)], [HCA, CSA], wrong=2, draft_tokens=[3])
    feed(worker, "r", [10], [INDEXER])
    run(worker, [("r", 10, 2)], [CSA], wrong=2, draft_tokens=[2])
    assert_too_far(worker, 9, compressor=HCA)
    worker.truncate("r", 11)
    assert [committed(worker, "r", name) for name in NAMES] == [10, 11, 10]
    assert_too_far(worker, 9, compressor=HCA)
    worker.truncate("r", 10)
    assert_too_far(worker, 9, compressor=CSA, committed=10, draft_tokens=0)  # that step's drafts are used up


def test_a_partner_that_has_gone_on_holds_back_the_other(worker):
    """Here by its place alone: each has drafts enough to go back to 9."""
    run(worker, [("r", 0, 10)], [HCA, CSA], draft_tokens=[3])
    run(worker, [("r", 10, 2)], [CSA], draft_tokens=[2])
    worker.truncate("r", 11)
    run(worker, [("r", 11, 3)], [CSA], draft_tokens=[3])
    for length in (9, 8, 7):
        assert_too_far(worker, length, compressor=HCA)
    run(worker, [("r", 10, 4)], [HCA], draft_tokens=[3])
    worker.truncate("r", 11)  # two steps of one compressor each, at one place
    assert [committed(worker, "r", name) for name in (HCA, CSA)] == [11, 11]


def test_a_step_that_is_refused_writes_nothing_over_the_drafts(worker):
    """It has the rings and pages in hand when a value of its last compressor is found not to be finite."""
    feed(worker, "r", [6])
    guess(worker, "r", 1, 2)
    body = step_body([("r", 9, 3)])
    bad = np.full((3, stream(INDEXER, "r").shape[1]), np.nan, np.float32)
    with refused("non_finite", compressor=INDEXER):
        send(worker, body | {"tensors": [*body["tensors"][:2], tensor(bad, INDEXER)]})
    worker.truncate("r", 7)
    assert_serial(worker, NAMES, 7)
    feed(worker, "r", [30])
    assert_serial(worker, NAMES, 37)
