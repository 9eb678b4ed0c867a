"""Captured steps: what is captured and when, and that a replay is right for whatever step comes, on a fake device."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from kvfold_kernels import backends
from kvfold_kernels import plan as p
from kvfold_service import graphs
from kvfold_service.graphs import MAX_BUCKET, MAX_GRAPHS
from kvfold_service.rows import NEAR_BYTES
from kvfold_service.worker import Worker
from tests.fake_cuda import FakeCuda, on_device
from tests.gpu.workers import Room, no_errors
from tests.service_cases import CSA, HCA, INDEXER, NAMES, assert_entries, feed, make_worker, refused, run
from tests.walk import Part, Walk

SETS = [list(NAMES), [HCA], [CSA, INDEXER], [CSA]]


@pytest.fixture(params=[0, NEAR_BYTES], ids=["far", "near"])
def cuda(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Rows come by copies, or few are read where the host has put them."""
    monkeypatch.setattr("kvfold_service.rows.NEAR_BYTES", request.param)
    return FakeCuda()


def made(cuda: FakeCuda, **options) -> Worker:
    limits = {name: options.pop(name) for name in ("max_requests", "pages") if name in options}
    return on_device(make_worker(backends.load("cpu"), **limits), cuda, **options)


def walk_of(cuda: FakeCuda, seed: int, **options) -> Walk:
    """Frames lie in page-locked staging; messages in msgpack, some, do not."""
    golden = make_worker(backends.load("cpu"), max_requests=2, pages=400)
    subject, room = made(cuda, max_requests=24, pages=400, **options), Room(2 << 20)
    subject.runner.lock(room.staging.block)
    return Walk(subject, golden, SETS, seed, room)


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_whatever_the_batches_entries_are_those_of_one_step(graphs, layer):
    cuda = FakeCuda(sends_pieces=layer)
    walk = walk_of(cuda, 5 + graphs, graphs=graphs, layer=layer)
    with no_errors():
        for i in range(120):
            walk.step(8, 1 + i % 3)
            if i % 7 == 3:
                walk.move()
            if i % 9 == 5:
                walk.release()
    assert walk.check() > 100
    assert cuda.waits == 120, "one synchronisation a step"
    assert cuda.unlocked_sends == 0
    assert (cuda.replays > 40) == graphs


def test_the_first_step_of_a_key_is_launched_the_second_captured_the_third_replayed(cuda):
    worker = made(cuda)
    counts = []
    for start in range(4):
        run(worker, [("r", start, 1)])
        counts.append((cuda.captures, cuda.replays))
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 3)]
    assert cuda.waits == 4
    for name in NAMES:
        assert_entries(worker, "r", name)


def test_steps_are_told_apart_by_compressors_dtypes_and_bucket(cuda):
    worker = made(cuda)
    steps = [(1, NAMES, "fp32"), (1, NAMES, "bf16"), (1, [HCA], "fp32"), (1, [CSA, HCA], "fp32"), (2, NAMES, "fp32")]
    for n, (length, names, dtype) in enumerate(steps):
        for start in range(0, 3 * length, length):
            run(worker, [(f"r{n % 2}", start, length)], names, dtype=dtype)
        assert cuda.captures == n + 1
        worker.release(f"r{n % 2}")


def test_a_bucket_serves_every_number_of_tokens_up_to_it(cuda):
    worker = made(cuda)
    for start, length in ((0, 8), (8, 8), (16, 5), (21, 7), (28, 6)):
        run(worker, [("r", start, length)])
    assert (cuda.captures, cuda.replays) == (1, 4)
    run(worker, [("r", 34, 4)])
    assert cuda.replays == 4, "half of a bucket is the next smaller one"


def test_buckets():
    def bucket(tokens, windows=0, appends=0):
        arrays = np.zeros((p.WINDOW_FIELDS, windows), np.int32), np.zeros((p.APPEND_FIELDS, appends), np.int32)
        nothing = np.zeros(0, np.int64)
        return graphs.bucket_of([p.Plan(*arrays, tokens, nothing, nothing, nothing)] * 2)

    assert [bucket(n) for n in (1, 2, 3, 4, 5, 255, 256)] == [1, 2, 4, 4, 8, 256, 256]
    assert bucket(0) is None
    assert bucket(MAX_BUCKET + 1) is None
    assert bucket(3, 4, 4) == 4
    assert bucket(3, windows=5) is None
    assert bucket(3, appends=5) is None


def test_a_step_of_no_tokens_or_too_many_is_launched_as_it_is(cuda):
    worker = made(cuda, max_requests=8, pages=400)
    run(worker, [("r", 0, 4)])
    for _ in range(3):
        assert run(worker, [("r", 4, 0)])["skipped"] == list(NAMES)
    walk = Walk(worker, None, SETS, 0, lambda body: memoryview(bytearray(body)))
    for _ in range(3):
        walk.run(walk.message([Part(f"1.{i}", 0, 100) for i in range(3)], [HCA]))
        for i in range(3):
            worker.release(f"1.{i}")
    assert cuda.captures == 0


def test_a_replay_skips_nothing_and_counts_what_it_launches(cuda):
    worker = made(cuda)
    for start in range(3):
        reply = run(worker, [("r", start, 1)])
        assert reply["skipped"] == []
        assert reply["launches"] == 3
    assert worker.totals["skipped"] == 0
    assert worker.totals["launches"] == 9
    without = made(FakeCuda(), graphs=False)
    reply = run(without, [("r", 0, 1)])
    assert reply["skipped"] == list(NAMES)


def test_a_replay_after_a_refused_step_does_not_see_its_values(cuda):
    walk = walk_of(cuda, 1)
    step = [Part("0.a", 0, 6)]
    for n in range(5):
        walk.worker.release("0.a")
        refusal = walk.spoil("0.bad", list(NAMES), tokens=8, row=7, column=0)
        assert refusal.code == "non_finite"
        assert (refusal.details["row"], refusal.details["column"]) == (7, 0)
        walk.run(walk.message(step, list(NAMES), pad=2))
        assert cuda.replays == 2 * n + 1, "both keep to the bucket of 8"
    walk.lengths["0.a"] = 6
    assert walk.check()


def test_a_refused_member_does_not_stop_the_others(cuda):
    walk = walk_of(cuda, 1)
    for n in range(4):
        bad = walk.message([Part(f"0.bad{n}", 0, 2)], list(NAMES))
        rows = np.frombuffer(bad["tensors"][1]["data"], np.float32).copy()
        rows[5] = np.nan
        bad["tensors"][1]["data"] = memoryview(rows.tobytes())
        with refused("non_finite", row=0, column=5, compressor=CSA):
            walk.run(walk.message([Part("0.a", 3 * n, 3)], list(NAMES)), bad)
    walk.lengths["0.a"] = 12
    assert walk.check()
    assert cuda.replays


def test_what_cannot_be_captured_is_launched_and_not_tried_again(cuda, caplog):
    worker = made(cuda)
    cuda.fails_captures = True
    with caplog.at_level(logging.ERROR, "kvfold"):
        feed(worker, "r", [1] * 5)
    assert [record.message for record in caplog.records] == [
        "steps of up to 1 tokens and 3 compressors are not captured"
    ]
    cuda.fails_captures = False
    feed(worker, "r", [1] * 4)
    assert cuda.captures == 0
    feed(worker, "r", [2] * 4)
    assert cuda.captures == 1
    for name in NAMES:
        assert_entries(worker, "r", name)


def test_a_graph_that_does_not_start_is_given_up(cuda):
    worker = made(cuda)
    feed(worker, "r", [1] * 3)
    cuda.fails_replays = True
    with refused("step_failed"):
        feed(worker, "r", [1])
    feed(worker, "r", [1] * 4)
    assert cuda.replays == 2
    for name in NAMES:
        assert_entries(worker, "r", name)


def test_the_least_recently_used_graph_leaves_when_there_are_too_many(cuda, monkeypatch):
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 2)
    worker = made(cuda)
    at = 0
    for length, captures in ((1, 0), (1, 1), (2, 1), (2, 2), (1, 2), (4, 2), (4, 3), (1, 3), (2, 3), (2, 4)):
        run(worker, [("r", at, length)])
        at += length
        assert cuda.captures == captures
    assert [graph.alive for graph in cuda.graphs] == [True, False, False, True]
    for name in NAMES:
        assert_entries(worker, "r", name)
    assert MAX_GRAPHS > 2


def test_rows_that_do_not_fit_beside_each_other_are_not_captured(cuda):
    worker = made(cuda, max_step_bytes=12 * 4096, max_step_tokens=64)
    feed(worker, "r", [9] * 3)
    assert cuda.captures == 0
    feed(worker, "r", [8] * 3)
    assert cuda.captures == 1


def test_a_backend_without_counts_captures_nothing(cuda, monkeypatch):
    monkeypatch.setattr("tests.fake_cuda.TAKES_COUNTS", False)
    worker = made(cuda)
    feed(worker, "r", [1] * 4)
    assert cuda.captures == 0


@pytest.mark.parametrize("graphs", [False, True])
def test_a_csa_layer_is_one_launch(cuda, graphs):
    worker = made(cuda, layer=True, graphs=graphs)
    for start in range(0, 12, 4):
        reply = run(worker, [("r", start, 4)])
        assert reply["launches"] == 2
    assert worker.by_kind["launches", "csa"] == 3
    assert worker.by_kind["launches", "indexer"] == 0
    assert worker.by_kind["launches", "hca"] == 3
    for name in NAMES:
        assert_entries(worker, "r", name)


def test_compressors_of_a_layer_are_launched_alone_where_dtypes_differ(cuda):
    walk = walk_of(cuda, 1, layer=True)
    for n in range(3):
        message = walk.message([Part("2.a", 4 * n, 4)], [INDEXER, CSA], {CSA: "bf16", INDEXER: "fp32"})
        (reply,) = walk.run(message)
        assert reply["launches"] == 2
    (reply,) = walk.run(walk.message([Part("2.a", 12, 4)], [INDEXER, CSA], {CSA: "bf16", INDEXER: "bf16"}))
    assert reply["launches"] == 1
    walk.lengths["2.a"] = 16
    assert walk.check() == 8
