"""worker: what each call does to the state, and that a refused one does nothing. Synchronous, on every backend."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvfold_kernels.backends import Backend
from kvfold_service import manifest as manifests
from kvfold_service import weights as weight_files
from kvfold_service.calls import parse_export, parse_import
from kvfold_service.canary import CanaryError, prove, prove_or_refuse
from kvfold_service.errors import ServiceError
from kvfold_service.worker import Worker
from tests.service_cases import (
    CSA,
    HCA,
    INDEXER,
    INDEXER_POOL,
    NAMES,
    PACKED_POOL,
    PAGE_ENTRIES,
    RATIO,
    SLACK,
    SMALL,
    STREAM_TOKENS,
    alone,
    assert_entries,
    changed,
    entries_of,
    make_worker,
    no_start,
    page_entries,
    parts_of,
    read,
    refused,
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


def spoilt(body: dict[str, Any], name: str, row: int, column: int, value: float) -> dict[str, Any]:
    """The step with another value in one tensor."""
    tensors = []
    for item in body["tensors"]:
        rows = np.frombuffer(item["data"], np.float32).reshape(item["shape"]).copy()
        if item["compressor"] == name:
            rows[row, column] = value
        tensors.append(tensor(rows, item["compressor"]))
    return body | {"tensors": tensors}


# -- replies -------------------------------------------------------------------------------------------------------


def test_the_reply_of_a_step(worker):
    reply = run(worker, [("r1", 0, 10), ("r2", 0, 3)], step_id="first")
    assert (reply["version"], reply["step_id"], reply["compat"]) == (1, "first", worker.compat)
    assert reply["epoch"] == worker.epoch.hex()
    assert [request["id"] for request in reply["requests"]] == ["r1", "r2"]
    told = {name: {k: v for k, v in part.items() if k != "pages"} for name, part in parts_of(reply, "r1").items()}
    assert told == {
        HCA: {"committed": 10, "open_tokens": 2, "num_entries": 1, "new_entries": [0, 1]},
        CSA: {"committed": 10, "open_tokens": 2, "num_entries": 2, "new_entries": [0, 2]},
        INDEXER: {"committed": 10, "open_tokens": 2, "num_entries": 2, "new_entries": [0, 2]},
    }
    assert [len(part["pages"]) for part in parts_of(reply, "r1").values()] == [1, 1, 1]
    nothing = {"committed": 3, "open_tokens": 3, "num_entries": 0, "new_entries": [0, 0], "pages": []}
    assert parts_of(reply, "r2") == dict.fromkeys(NAMES, nothing)
    assert all(type(us) is int and us >= 0 for us in reply["timings_us"].values())
    for name in NAMES:
        assert_entries(worker, "r1", name)


def test_a_page_keeps_its_handle_while_it_fills(worker):
    """An indexer page has 3 entries of 4 tokens."""
    seen, handles = [], []
    for start, length in ((0, 4), (4, 4), (8, 5), (13, 2), (15, 1), (16, 14)):
        part = parts_of(run(worker, [("r", start, length)], [INDEXER]), "r")[INDEXER]
        seen.append(part["new_entries"])
        handles.append(part["pages"])
        assert [page["num_entries"] for page in read(worker, part["pages"])] == [
            min(3, part["num_entries"] - 3 * page)
            for page in range(part["new_entries"][0] // 3, -(-part["new_entries"][1] // 3))
            if part["pages"]
        ]
    assert seen == [[0, 1], [1, 2], [2, 3], [3, 3], [3, 4], [4, 7]]
    first, second, third = handles[0][0], handles[4][0], handles[5][1]
    assert handles == [[first], [first], [first], [], [second], [second, third]]
    assert len({first, second, third}) == 3
    assert worker.request("r")["compressors"][INDEXER]["pages"] == [first, second, third]
    assert_entries(worker, "r", INDEXER)


def test_pages_all_lists_those_of_the_past_too(worker):
    run(worker, [("r", 0, 16)], [INDEXER])
    new = parts_of(run(worker, [("r", 16, 4)], [INDEXER]), "r")[INDEXER]
    every = parts_of(run(worker, [("r", 20, 1)], [INDEXER], pages="all"), "r")[INDEXER]
    assert (new["new_entries"], len(new["pages"])) == ([4, 5], 1)
    assert (every["new_entries"], len(every["pages"])) == ([5, 5], 2)
    assert new["pages"] == every["pages"][1:]
    assert parts_of(run(worker, [("r", 21, 0)], [INDEXER], pages="all"), "r")[INDEXER] == every


def test_a_request_asked_for_says_all_compressors(worker):
    reply = run(worker, [("r", 0, 20)], [CSA, INDEXER], pages="all")
    told = worker.request("r")
    assert told["id"] == "r"
    untouched = {"committed": 0, "open_tokens": 0, "num_entries": 0, "pages": []}
    parts = {name: {k: v for k, v in part.items() if k != "new_entries"} for name, part in parts_of(reply, "r").items()}
    assert told["compressors"] == {HCA: untouched, **parts}


def test_skipped_and_launches_say_what_the_kernels_did(backend, start):
    launched: list[int] = []

    def compress(real: Callable[..., int], *arguments: Any) -> int:
        launched.append(real(*arguments))
        return launched[-1]

    worker = start(changed(backend, compress))
    at = 0
    for length, skipped in ((3, [HCA, CSA, INDEXER]), (1, [HCA]), (4, []), (0, [HCA, CSA, INDEXER]), (24, [])):
        launched.clear()
        reply = run(worker, [("r", at, length)])
        assert reply["skipped"] == skipped
        assert reply["launches"] == sum(launched)
        assert (reply["launches"] > 0) == (length > 0)
        at += length
    assert worker.totals["skipped"] == 7


# -- requests and positions ----------------------------------------------------------------------------------------


def test_each_compressor_has_its_own_committed(worker):
    run(worker, [("r", 0, 6)], [CSA])
    run(worker, [("r", 0, 9)], [HCA])
    run(worker, [("r", 6, 5)], [CSA])
    assert {n: part["committed"] for n, part in worker.request("r")["compressors"].items()} == {
        HCA: 9,
        CSA: 11,
        INDEXER: 0,
    }
    with refused("position_conflict", request="r", compressor=CSA, expected=11):
        run(worker, [("r", 9, 1)], [HCA, CSA])
    with refused("position_gap", request="r", compressor=INDEXER, expected=0):
        run(worker, [("r", 9, 1)], [HCA, INDEXER])
    run(worker, [("r", 9, 2)], [HCA])
    run(worker, [("r", 11, 5)], [HCA, CSA])
    for name in (HCA, CSA):
        assert_entries(worker, "r", name)


@pytest.mark.parametrize(
    ("requests", "code", "details"),
    [
        ([("r", 19, 1)], "position_conflict", {"request": "r", "compressor": HCA, "expected": 20}),
        ([("r", 0, 20)], "position_conflict", {"request": "r", "expected": 20}),
        ([("r", 21, 1)], "position_gap", {"request": "r", "expected": 20}),
        ([("new", 1, 1)], "position_gap", {"request": "new", "expected": 0}),
        ([("new", 0, 5), ("r", 3, 1)], "position_conflict", {"request": "r", "expected": 20}),
        ([("new", 7, 1), ("r", 3, 1)], "position_gap", {"request": "new", "expected": 0}),
        ([("r", 3, 0)], "position_conflict", {"request": "r", "expected": 20}),
        ([("new", 3, 0)], "position_gap", {"request": "new", "expected": 0}),
    ],
)
def test_a_step_starts_where_the_request_stands(worker, requests, code, details):
    run(worker, [("r", 0, 20)])
    before = snapshot(worker)
    with refused(code, **details):
        run(worker, requests)
    assert snapshot(worker) == before


def test_a_request_without_tokens_changes_nothing(worker):
    run(worker, [("r", 0, 20)])
    before = snapshot(worker)
    nothing = {"committed": 0, "open_tokens": 0, "num_entries": 0, "new_entries": [0, 0], "pages": []}
    reply = run(worker, [("unknown", 0, 0), ("r", 20, 0)])
    assert parts_of(reply, "unknown") == dict.fromkeys(NAMES, nothing)
    assert {part["new_entries"][1] for part in parts_of(reply, "r").values()} == {2, 5}
    after = snapshot(worker)
    for count in ("steps", "batches"):
        assert after.pop(count) == before.pop(count) + 1
    assert after.pop("skipped") == before.pop("skipped") + 3
    assert after == before
    with refused("unknown_request"):
        worker.request("unknown")


def test_requests_without_tokens_between_others(backend, worker):
    run(worker, [("a", 0, 7), ("b", 0, 9)])
    reply = run(worker, [("x", 0, 0), ("a", 7, 9), ("y", 0, 0), ("b", 9, 7), ("z", 0, 0)], pad=3)
    assert [request["id"] for request in reply["requests"]] == ["x", "a", "y", "b", "z"]
    for id in "ab":
        for name in NAMES:
            assert_entries(worker, id, name)


def test_a_step_without_any_token(worker):
    reply = run(worker, [("a", 0, 0)])
    assert (reply["launches"], reply["skipped"]) == (0, list(NAMES))
    assert not worker.requests
    assert run(worker, [("a", 0, 0)], pad=2)["launches"] == 0


def test_an_unknown_request_is_told_nothing_of_a_known_one(start):
    """An import without entries leaves a mark in its slot, which is the only one here."""
    giver, taker = start(), start(max_requests=1)
    run(giver, [("r", 0, 21)])
    exported = giver.export("r", parse_export({"version": 1, "entries": False}))
    body = {"version": 1, "id": "r", "compat": exported["compat"], "compressors": exported["compressors"]}
    taker.import_(parse_import(body, taker.rules, taker.entry_bytes))
    reply = run(taker, [("unknown", 0, 0)])
    assert parts_of(reply, "unknown") == parts_of(run(start(), [("unknown", 0, 0)]), "unknown")


def test_release_is_idempotent_and_gives_all_back(worker):
    empty = snapshot(worker)
    for _ in range(3):
        run(worker, [("a", 0, 40), ("b", 0, 3)])
        for _ in range(2):
            worker.release("a")
            worker.release("b")
        worker.release("never seen")
        assert {what: snapshot(worker)[what] for what in ("state", "slots", "free", "pools")} == {
            what: empty[what] for what in ("state", "slots", "free", "pools")
        }
        assert all(group.pool.num_used == 0 for group in worker.caches.groups)
    assert worker.totals["released"] == 6
    with refused("unknown_request"):
        worker.request("a")


def test_a_slot_serves_one_request_after_another(start):
    worker = start(max_requests=1, pages=16)
    for id, lengths in (("a", (5, 30)), ("b", (1, 1, 20)), ("a", (33,)), ("c", (7, 8, 9))):
        at = 0
        for length in lengths:
            run(worker, [(id, at, length)])
            at += length
        for name in NAMES:
            assert_entries(worker, id, name)
        with refused("pool_exhausted", pool="requests", needed=1, free=0):
            run(worker, [("next", 0, 1)])
        worker.release(id)


# -- all or nothing ------------------------------------------------------------------------------------------------


def test_capacity_by_requests(start):
    worker = start(max_requests=3)
    run(worker, [("a", 0, 9), ("b", 0, 4)])
    before = snapshot(worker)
    with refused("pool_exhausted", pool="requests", needed=2, free=1) as caught:
        run(worker, [("c", 0, 9), ("a", 9, 9), ("d", 0, 1)])
    assert caught.value.retry_after > 0
    assert snapshot(worker) == before
    run(worker, [("c", 0, 9), ("a", 9, 9), ("d", 0, 0)])


def test_capacity_by_pages(start):
    """hca and csa share 2 · 3 pages; in `needed` they are counted together, as the step needs them."""
    worker = start(pages=3)
    run(worker, [("a", 0, 16)])  # 1 page of hca, 2 of csa, 2 of the indexer
    before = snapshot(worker)
    with refused("pool_exhausted", pool=PACKED_POOL, needed=4, free=3):
        run(worker, [("a", 16, 16), ("b", 0, 4)], [HCA, CSA])
    assert snapshot(worker) == before
    with refused("pool_exhausted", pool=INDEXER_POOL, needed=2, free=1):
        run(worker, [("a", 16, 4), ("b", 0, 16)], [HCA, INDEXER])
    assert snapshot(worker) == before
    run(worker, [("a", 16, 8), ("b", 0, 1)])
    for name in NAMES:
        assert_entries(worker, "a", name)


def test_what_the_first_compressor_took_comes_back_if_the_second_finds_no_room(start):
    worker = start(pages=3)
    run(worker, [("a", 0, 12)], [INDEXER])
    run(worker, [("b", 0, 12)], [INDEXER])
    before = snapshot(worker)
    for _ in range(3):
        with refused("pool_exhausted", pool=INDEXER_POOL, needed=2, free=1):
            run(worker, [("c", 0, 16)], [HCA, INDEXER])
        assert snapshot(worker) == before
    worker.release("a")
    run(worker, [("c", 0, 16)], [HCA, INDEXER])


@pytest.mark.parametrize(
    ("name", "row", "column", "value"),
    [
        (HCA, 0, 0, np.nan),
        (HCA, 4, 127, np.inf),
        (CSA, 2, 255, -np.inf),
        (INDEXER, 6, 255, np.inf),
        (INDEXER, 6, 200, np.nan),
    ],
)
def test_values_that_are_not_finite(worker, name, row, column, value):
    run(worker, [("r", 0, 13)])
    before = snapshot(worker)
    body = step_body([("new", 0, 4), ("r", 13, 3)], pad=1)
    with refused("non_finite", compressor=name, row=row, column=column):
        send(worker, spoilt(body, name, row, column, value))
    assert snapshot(worker) == before
    send(worker, body)
    assert_entries(worker, "r", name)


def test_a_score_of_minus_infinity_is_a_weight_of_zero(worker):
    send(worker, spoilt(step_body([("r", 0, 8)]), HCA, 3, 200, -np.inf))
    other = entries_of(worker, "r", HCA)
    assert other.shape == (1, worker.entry_bytes[HCA])
    assert not np.array_equal(other, alone(worker.backend, "r", HCA)[:1])


def test_of_several_refusals_the_contract_s_order_decides(start):
    worker = start(max_requests=1, pages=1)
    run(worker, [("r", 0, 4)])
    bad = functools.partial(spoilt, name=HCA, row=0, column=0, value=np.nan)
    with refused("position_conflict", request="r"):
        send(worker, bad(step_body([("r", 3, 4), ("new", 5, 4)])))
    with refused("position_gap", request="new"):
        send(worker, bad(step_body([("new", 5, 4), ("r", 3, 4)])))
    with refused("pool_exhausted", pool="requests"):
        send(worker, bad(step_body([("new", 0, 40), ("r", 4, 4)])))
    with refused("pool_exhausted", pool=PACKED_POOL):
        send(worker, bad(step_body([("r", 4, 40)])))
    with refused("non_finite"):
        send(worker, bad(step_body([("r", 4, 2)])))


class Failing:
    """Fails in its k-th call from now on, before or after the real kernel has written."""

    def __init__(self, when: str) -> None:
        self.when, self.left = when, 0

    def __call__(self, real: Callable[..., int], *arguments: Any) -> int:
        self.left -= 1
        if self.left == 0 and self.when == "before":
            raise RuntimeError("injected")
        launches = real(*arguments)
        if self.left == 0:
            raise RuntimeError("injected")
        return launches


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("failing_call", [1, 2, 3])
def test_a_kernel_that_fails_leaves_nothing(backend, start, failing_call, when):
    """At every step, first once or twice in vain: the same bytes as if it had never failed."""
    failing = Failing(when)
    worker, undisturbed = start(changed(backend, failing)), start()
    at = dict.fromkeys("abc", 0)
    for step in ([("a", 5)], [("b", 17), ("a", 3)], [("a", 1), ("c", 8), ("b", 1)], [("c", 30), ("a", 1)]):
        requests = [(id, at[id], length) for id, length in step]
        before = snapshot(worker)
        for _ in range(2):
            failing.left = failing_call
            with refused("step_failed"):
                run(worker, requests)
            assert snapshot(worker) == before
            worker.check_integrity()
        assert _told(run(worker, requests)) == _told(run(undisturbed, requests))
        at |= {id: at[id] + length for id, length in step}
    for id in at:
        for name in NAMES:
            np.testing.assert_array_equal(entries_of(worker, id, name), entries_of(undisturbed, id, name))


def _told(reply: dict[str, Any]) -> dict[str, Any]:
    """A reply without what differs between two workers and two runs."""
    parts = {
        request["id"]: {name: part | {"pages": len(part["pages"])} for name, part in request["compressors"].items()}
        for request in reply["requests"]
    }
    return {name: reply[name] for name in ("step_id", "compat", "launches", "skipped")} | {"requests": parts}


def test_step_failed_says_nothing_of_the_reason(backend, start):
    def compress(real: Callable[..., int], *arguments: Any) -> int:
        raise RuntimeError("/secret/path at 0x7f00")

    with refused("step_failed") as caught:
        run(start(changed(backend, compress)), [("r", 0, 1)])
    assert "secret" not in str(caught.value.body())
    assert caught.value.body()["retryable"]


# -- pages ---------------------------------------------------------------------------------------------------------


def test_pages_are_read_all_or_none(worker):
    part = parts_of(run(worker, [("r", 0, 30)]), "r")
    handles = part[HCA]["pages"] + part[CSA]["pages"]
    twice = read(worker, handles + handles[:1])
    assert [page["handle"] for page in twice] == handles + handles[:1]
    assert [page["compressor"] for page in twice] == [HCA] * 2 + [CSA] * 4 + [HCA]
    assert twice[0] == twice[-1]
    assert read(worker, []) == []
    with refused("unknown_handle"):
        read(worker, [*handles, "A" * 52])
    run(worker, [("gone", 0, 16)])
    stale = worker.request("gone")["compressors"][CSA]["pages"]
    worker.release("gone")
    with refused("stale_handle"):
        read(worker, handles + stale)
    assert read(worker, handles) == twice[:-1]


@pytest.mark.parametrize("filling", [0xFF, 0x7F, 0x01])
def test_whatever_lay_in_memory_before_nothing_of_it_shows(start, filling):
    """NaN in every ring and page; `page_entries` wants zeros behind the valid entries."""
    worker = start()
    for cache in worker.caches.compressors:
        cache.rings.fill_(float("nan"))
        cache.group.pages.fill_(filling)
    at = 0
    for length in (1, 3, 9, 2, 30):
        run(worker, [("r", at, length)])
        at += length
        for name in NAMES:
            assert_entries(worker, "r", name)


def test_a_page_that_another_request_has_now(start):
    worker = start(pages=1)
    old = parts_of(run(worker, [("old", 0, 12)], [INDEXER]), "old")[INDEXER]["pages"]
    worker.release("old")
    with refused("stale_handle"):
        read(worker, old)
    new = parts_of(run(worker, [("new", 0, 4)], [INDEXER]), "new")[INDEXER]["pages"]
    with refused("stale_handle"):
        read(worker, old)
    (page,) = read(worker, new)
    assert page["num_entries"] == 1
    np.testing.assert_array_equal(
        page_entries(worker.caches.by_name[INDEXER], page), alone(worker.backend, "new", INDEXER)[:1]
    )


def test_requests_never_share_a_page(worker):
    """Not even if they begin with the same tokens."""
    body = step_body([("a", 0, 16), ("b", 0, 16)])
    for item, name in zip(body["tensors"], NAMES, strict=True):
        item |= tensor(np.concatenate([stream(name, "a")[:16]] * 2), name)
    reply = send(worker, body)
    for name in NAMES:
        a, b = (parts_of(reply, id)[name]["pages"] for id in "ab")
        assert not set(a) & set(b)
        np.testing.assert_array_equal(entries_of(worker, "a", name), entries_of(worker, "b", name))
    worker.release("a")
    for name in NAMES:
        got = entries_of(worker, "b", name)
        np.testing.assert_array_equal(got, alone(worker.backend, "a", name)[: len(got)])


def test_tenants_do_not_see_each_other(worker):
    run(worker, [("r", 0, 16)], tenant="a")
    handles = worker.request("r", "a")["compressors"][CSA]["pages"]
    with refused("unknown_request") as foreign:
        worker.request("r", "b")
    with refused("unknown_request") as unknown:
        worker.request("never", "b")
    assert foreign.value.body() == unknown.value.body()
    with refused("unknown_handle") as foreign:
        read(worker, handles, "b")
    with refused("unknown_handle") as forged:
        read(worker, ["A" * 52], "b")
    assert foreign.value.body() == forged.value.body()
    worker.release("r", "b")
    run(worker, [("r", 0, 8)], tenant="b")
    run(worker, [("r", 16, 16)], tenant="a")
    for tenant in "ab":
        assert_entries(worker, "r", CSA, tenant)
    assert len(read(worker, handles, "a")) == 2


def test_handles_after_a_restart(start):
    """With the key of before they are stale, without it they are nothing."""
    worker = start(handle_key=b"k" * 32)
    handles = parts_of(run(worker, [("r", 0, 8)], [HCA]), "r")[HCA]["pages"]
    for key, code in ((b"k" * 32, "stale_handle"), (b"o" * 32, "unknown_handle"), (None, "unknown_handle")):
        again = start(handle_key=key)
        assert again.epoch != worker.epoch
        assert again.compat == worker.compat
        run(again, [("r", 0, 8)], [HCA])
        with refused(code):
            read(again, handles)


def test_what_nobody_renewed_is_gone(backend, start):
    now = [100.0]
    worker = start(lease_seconds=10.0, clock=lambda: now[0])
    run(worker, [("r", 0, 16), ("s", 0, 16)])
    handles = {id: worker.request(id)["compressors"][HCA]["pages"] for id in "rs"}
    now[0] += 9.0
    run(worker, [("r", 16, 1)])
    now[0] += 2.0
    assert_entries(worker, "r", HCA)
    with refused("unknown_request"):
        worker.request("s")
    with refused("stale_handle"):
        read(worker, handles["s"])
    with refused("position_gap", expected=0):
        run(worker, [("s", 16, 1)])


# -- sizes ---------------------------------------------------------------------------------------------------------


def test_a_large_step_needs_room_for_its_tail_only(backend, start):
    """65,536 tokens in a worker of one ring; kernels that do nothing, for it is the plan that is tried."""
    part = SMALL["compressors"][2] | {"page_entries": 64}
    worker = start(
        changed(backend, lambda real, *arguments: 0),
        manifest=SMALL | {"max_position": 65536, "compressors": [part]},
        max_requests=1,
        pages=256,
    )
    rows = np.zeros((65536, 256), np.uint16)
    body = step_body([("r", 0, 65536)], [])
    reply = send(worker, body | {"tensors": [tensor(rows, INDEXER, "bf16")]})
    assert parts_of(reply, "r")[INDEXER]["num_entries"] == 16384
    cache = worker.caches.by_name[INDEXER]
    assert cache.rings.shape[:2] == (1, 2 * (2 * 4 - 1 + SLACK))


@pytest.mark.parametrize("drafts", [0, 1, SLACK])
def test_drafts_change_no_entry(worker, drafts):
    at = 0
    for length in (3, 5, 4, 9, 3, 8):
        run(worker, [("r", at, length)], draft_tokens=[drafts])
        at += length
        worker.check_integrity()
    for name in NAMES:
        assert_entries(worker, "r", name)


@pytest.mark.parametrize("input_dtype", ["bf16", "any"])
def test_bf16_rows_give_the_entries_of_the_same_rows_in_fp32(start, input_dtype):
    parts = [part | {"input_dtype": input_dtype} for part in SMALL["compressors"]]
    worker, wide = start(manifest=SMALL | {"compressors": parts}), start()
    bits = {name: stream(name, "r").view(np.uint32) >> 16 for name in NAMES}
    at = 0
    for length in (7, 1, 20):
        narrow, full = step_body([("r", at, length)]), step_body([("r", at, length)])
        rows = {name: bits[name][at : at + length] for name in NAMES}
        narrow["tensors"] = [tensor(rows[name].astype(np.uint16), name, "bf16") for name in NAMES]
        full["tensors"] = [tensor((rows[name] << 16).view(np.float32), name) for name in NAMES]
        assert _told(send(worker, narrow)) == _told(send(wide, full))
        at += length
    for name in NAMES:
        np.testing.assert_array_equal(entries_of(worker, "r", name), entries_of(wide, "r", name))


# -- the canary ----------------------------------------------------------------------------------------------------


def test_the_canary_proves_and_leaves_nothing(backend, start):
    worker = start(max_requests=1, pages=1)
    prove(worker)
    assert not worker.requests
    assert all(group.pool.num_used == 0 for group in worker.caches.groups)
    run(worker, [("r", 0, 8)])


def _wrong_entries(real: Callable[..., int], windows, appends, rows, rings, pages, compressor) -> int:
    return real(windows, appends, -rows, rings, pages, compressor)


def _lost_rows(real: Callable[..., int], windows, appends, rows, rings, pages, compressor) -> int:
    rings.zero_()
    return real(windows, appends[:, :0], rows, rings, pages, compressor)


def _nothing(real: Callable[..., int], *arguments: Any) -> int:
    return 1


@pytest.mark.parametrize("compress", [_wrong_entries, _lost_rows, _nothing])
def test_the_canary_refuses_a_backend_that_computes_something_else(backend, start, compress):
    worker = start(changed(backend, compress))
    with pytest.raises(CanaryError, match="layers"):
        prove(worker)
    assert not worker.requests
    with no_start("canary"):
        prove_or_refuse(worker)


def test_the_canary_tries_every_layout_of_a_model(backend):
    manifest = manifests.load("tiny")
    served = set()

    def compress(real: Callable[..., int], windows, appends, rows, rings, pages, compressor) -> int:
        served.add((compressor.geometry.kind, compressor.layout.format.name))
        return real(windows, appends, rows, rings, pages, compressor)

    prove(Worker(manifest, weight_files.seeded(manifest, 0), changed(backend, compress), max_requests=1, pages=1))
    assert served == {("hca", "fp8_ds_mla"), ("csa", "fp8_ds_mla"), ("indexer", "indexer_fp8")}


# -- any order of calls --------------------------------------------------------------------------------------------


class Calls(RuleBasedStateMachine):
    """Steps of any requests and compressors, releases and failures, beside a record of what must have come of them."""

    IDS = ("a", "b", "c", "d")

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.failing = Failing("after")
        self.worker = make_worker(changed(backend, self.failing), max_requests=3, pages=9)
        self.committed: dict[str, dict[str, int]] = {}
        self.dead_handles: set[str] = set()

    @rule(
        lengths=st.dictionaries(st.sampled_from(IDS), st.integers(0, 24), min_size=1),
        names=st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
        pad=st.integers(0, 2),
        fails=st.sampled_from([0, 0, 0, 1]),
    )
    def step(self, lengths, names, pad, fails):
        at = {id: self.committed.get(id, {}).get(names[0], 0) for id in lengths}
        requests = [(id, at[id], min(length, STREAM_TOKENS - at[id])) for id, length in lengths.items()]
        expected = self.refusal(requests, names) or ("step_failed" if fails else None)
        self.failing.left = fails
        if expected:
            with refused(expected):
                run(self.worker, requests, names, pad=pad)
            return
        reply = run(self.worker, requests, names, pad=pad)
        for id, start, length in requests:
            if length:
                self.committed.setdefault(id, dict.fromkeys(NAMES, 0)).update(dict.fromkeys(names, start + length))
            assert {part["committed"] for part in parts_of(reply, id).values()} == {start + length}

    def refusal(self, requests: list[tuple[str, int, int]], names: list[str]) -> str | None:
        """What the contract says must come of such a step."""
        for id, start, _ in requests:
            for name in names:
                have = self.committed.get(id, {}).get(name, 0)
                if have != start:
                    return "position_gap" if start > have else "position_conflict"
        new = [id for id, _, length in requests if length and id not in self.committed]
        needed = {PACKED_POOL: 0, INDEXER_POOL: 0}
        for _, start, length in requests:
            for name in names:
                pool = INDEXER_POOL if name == INDEXER else PACKED_POOL
                needed[pool] += self.pages(name, start + length) - self.pages(name, start)
        room = {PACKED_POOL: 18, INDEXER_POOL: 9}
        for committed in self.committed.values():
            for name in NAMES:
                room[INDEXER_POOL if name == INDEXER else PACKED_POOL] -= self.pages(name, committed[name])
        if len(new) > 3 - len(self.committed) or any(needed[pool] > room[pool] for pool in room):
            return "pool_exhausted"
        return None

    @staticmethod
    def pages(name: str, num_tokens: int) -> int:
        return -(-(num_tokens // RATIO[name]) // PAGE_ENTRIES[name])

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def release(self, data):
        id = data.draw(st.sampled_from(sorted(self.committed)))
        for part in self.worker.request(id)["compressors"].values():
            self.dead_handles.update(part["pages"])
        self.worker.release(id)
        del self.committed[id]

    @precondition(lambda self: self.committed)
    @rule(data=st.data(), name=st.sampled_from(NAMES))
    def read(self, data, name):
        id = data.draw(st.sampled_from(sorted(self.committed)))
        got = entries_of(self.worker, id, name)
        assert len(got) == self.committed[id][name] // RATIO[name]
        np.testing.assert_array_equal(got, alone(self.backend, id, name)[: len(got)])

    @precondition(lambda self: self.dead_handles)
    @rule(data=st.data())
    def read_what_is_gone(self, data):
        with refused("stale_handle"):
            read(self.worker, [data.draw(st.sampled_from(sorted(self.dead_handles)))])

    @invariant()
    def agrees(self):
        self.worker.check_integrity()
        told = {
            id: {name: part["committed"] for name, part in self.worker.request(id)["compressors"].items()}
            for _, id in self.worker.requests
        }
        assert told == self.committed


def test_any_order_of_calls(backend):
    run_state_machine_as_test(lambda: Calls(backend), settings=settings(max_examples=25, stateful_step_count=25))


# -- integrity -----------------------------------------------------------------------------------------------------


def _lost_slot(worker: Worker) -> None:
    worker.free_slots.pop()


def _page_of_another(worker: Worker) -> None:
    worker.caches.by_name[CSA].page_table[0, 0] = worker.caches.by_name[HCA].page_table[0, 0]


def _committed_too_much(worker: Worker) -> None:
    worker.caches.by_name[INDEXER].state[0, 0] += 40


def _forgotten_page(worker: Worker) -> None:
    worker.caches.by_name[INDEXER].num_pages[0] -= 1


@pytest.mark.parametrize("damage", [_lost_slot, _page_of_another, _committed_too_much, _forgotten_page])
def test_integrity_notices(backend, damage):
    worker = make_worker(backend)
    run(worker, [("r", 0, 16)])
    worker.check_integrity()
    damage(worker)
    with pytest.raises(AssertionError):
        worker.check_integrity()


def test_a_step_does_not_write_to_its_tensors(worker):
    """Rows of a frame lie in staging, writable."""
    body = step_body([("r", 0, 16)])
    for item in body["tensors"]:
        item["data"] = memoryview(bytearray(item["data"]))
    before = [bytes(item["data"]) for item in body["tensors"]]
    send(worker, body)
    assert [bytes(item["data"]) for item in body["tensors"]] == before


def test_errors_have_one_shape():
    error = ServiceError("pool_exhausted", "no room", retry_after=1.0, pool="requests", needed=1, free=0)
    assert (error.status, error.body()) == (
        429,
        {
            "code": "pool_exhausted",
            "message": "no room",
            "retryable": True,
            "details": {"pool": "requests", "needed": 1, "free": 0},
        },
    )
