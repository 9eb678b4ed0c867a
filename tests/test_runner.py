"""Runners of devices, on a fake one: how rows and plans get there, and what happens when something fails."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvfold_client import wire
from kvfold_client.wire import FRAME
from kvfold_kernels import backends
from kvfold_service import execute
from kvfold_service.device import DeviceRunner
from kvfold_service.errors import BrokenDeviceError
from kvfold_service.reserve import Wanted
from kvfold_service.rows import BOUNCE_BYTES, NEAR_BYTES, FarRows, Move, one_behind_the_other, together
from kvfold_service.runner import HostRunner
from kvfold_service.staging import Staging
from kvfold_service.step import parse_step
from kvfold_service.worker import Worker
from tests.fake_cuda import FakeCuda, fake_backend, on_device
from tests.service_cases import (
    CSA,
    HCA,
    INDEXER,
    NAMES,
    assert_entries,
    feed,
    make_worker,
    refused,
    run,
    snapshot,
    step_body,
)


@pytest.fixture
def cuda(monkeypatch) -> FakeCuda:
    """Here even few rows come by copies, unless a test says otherwise."""
    monkeypatch.setattr("kvfold_service.rows.NEAR_BYTES", 0)
    return FakeCuda()


def made(cuda: FakeCuda, **options) -> Worker:
    return on_device(make_worker(backends.load("cpu"), max_requests=8, pages=64), cuda, **options)


class Framed:
    """Bodies as a served worker gets them: frames in page-locked staging."""

    def __init__(self, worker: Worker) -> None:
        self.worker, self.staging = worker, Staging(1 << 20)
        worker.runner.lock(self.staging.block)

    def step(self, requests, names=NAMES, **changes):
        return parse_step(self.decoded(step_body(requests, names, **changes)), self.worker.rules)

    def decoded(self, body):
        frame = wire.encode(FRAME, body)
        extent = self.staging.lend(len(frame))
        extent.view[: len(frame)] = frame
        return wire.decode(FRAME, extent.view[: len(frame)])

    def run(self, *args, **changes):
        return self.worker.step(self.step(*args, **changes))


def layer_names(kinds: str) -> list[str]:
    return [{"h": HCA, "c": CSA, "i": INDEXER}[kind] for kind in kinds]


# -- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 3, 40])
def test_a_frame_comes_in_one_copy(cuda, num_tokens):
    framed = Framed(made(cuda, graphs=False))
    framed.run([("r", 0, num_tokens)])
    assert cuda.sends == [(num_tokens * 4 * (256 + 512 + 256), 1)]
    assert cuda.copies == 2, "plans there, flags back"
    assert_entries(framed.worker, "r", CSA)


def test_with_padding_rows_it_comes_in_a_copy_for_each_size(cuda):
    framed = Framed(made(cuda, graphs=False))
    framed.run([("r", 0, 3)], pad=50)
    assert sorted(cuda.sends) == [(3 * 4 * 256, 2), (3 * 4 * 512, 1)]
    for name in NAMES:
        assert_entries(framed.worker, "r", name)


def test_rows_from_other_memory_pass_through_memory_that_is_page_locked(cuda):
    worker = made(cuda, graphs=False)
    run(worker, [("r", 0, 3)])
    assert cuda.sends == [(3 * 4 * 1024, 1)]
    assert cuda.unlocked_sends == 0


def test_more_of_them_than_fit_come_as_they_are(cuda, monkeypatch):
    monkeypatch.setattr("kvfold_service.rows.BOUNCE_BYTES", 1024)
    worker = made(cuda, graphs=False)
    run(worker, [("r", 0, 16)])
    assert cuda.unlocked_sends == 3
    for name in NAMES:
        assert_entries(worker, "r", name)
    assert BOUNCE_BYTES > 1024


def test_staging_that_cannot_be_page_locked_is_used_all_the_same(cuda, monkeypatch):
    monkeypatch.setattr(cuda, "lock_pages", lambda address, num_bytes: False)
    framed = Framed(made(cuda))
    for start in range(3):
        framed.run([("r", start, 1)])
    assert_entries(framed.worker, "r", CSA)


def test_a_merged_batch_comes_in_as_few_copies_as_its_frames_allow(cuda):
    framed = Framed(made(cuda, graphs=False))
    wanted = [Wanted(framed.step([(f"r{i}", 0, 5)]), "") for i in range(4)]
    for outcome in execute.steps(framed.worker, wanted):
        assert isinstance(outcome, dict), outcome
    assert sum(num_bytes * count for num_bytes, count in cuda.sends) == 4 * 5 * 4 * 1024
    assert len(cuda.sends) <= 8
    for i in range(4):
        assert_entries(framed.worker, f"r{i}", CSA)


@pytest.mark.parametrize("graphs", [False, True])
def test_few_rows_are_read_where_the_host_has_put_them(cuda, monkeypatch, graphs):
    monkeypatch.setattr("kvfold_service.rows.NEAR_BYTES", NEAR_BYTES)
    framed = Framed(made(cuda, graphs=graphs))
    fits = NEAR_BYTES // (4 * 1024)
    for start in range(8):
        framed.run([("r", start, 1)])
    framed.run([("r", 8, fits)])
    assert cuda.sends == []
    framed.run([("r", 8 + fits, fits + 1)])
    assert sum(num_bytes * count for num_bytes, count in cuda.sends) == (fits + 1) * 4 * 1024
    run(framed.worker, [("s", 0, 5)])
    assert cuda.unlocked_sends == 0
    assert cuda.replays == (7 if graphs else 0)
    for name in NAMES:
        assert_entries(framed.worker, "r", name)
        assert_entries(framed.worker, "s", name)


def test_a_device_that_does_not_read_host_memory_gets_copies(cuda, monkeypatch):
    monkeypatch.setattr("kvfold_service.rows.NEAR_BYTES", NEAR_BYTES)
    monkeypatch.setattr(FakeCuda, "reads_host_memory", False)
    framed = Framed(made(cuda))
    for start in range(5):
        framed.run([("r", start, 1)])
    assert len(cuda.sends) >= 5
    assert_entries(framed.worker, "r", CSA)


PIECES = st.lists(st.tuples(st.sampled_from([16, 32, 100]), st.sampled_from([0, 16, 64])), min_size=1, max_size=12)


@given(PIECES, st.booleans(), st.randoms())
def test_fewer_copies_bring_the_same_bytes(pieces, in_pieces, random):
    """Pieces anywhere on both sides: `together` moves each byte to its place, and reads nothing behind the last."""
    sizes = [size for size, _ in pieces]
    moves, target, address = [], 0, 0
    order = list(range(len(sizes)))
    random.shuffle(order)
    targets = {}
    for i in order:
        targets[i] = target
        target += sizes[i] + random.choice([0, 16, 64])
    for i, size in enumerate(sizes):
        moves.append(Move(targets[i], address, size))
        address += size + pieces[i][1]
    source = np.arange(address, dtype=np.int64) + 1
    expected, got = np.zeros(target + 200, np.int64), np.zeros(target + 200, np.int64)
    for move in moves:
        expected[move.target : move.target + move.num_bytes] = source[move.address : move.address + move.num_bytes]
    for move in together(moves, in_pieces):
        assert move.count == 1 or (in_pieces and min(move.pitch, move.target_pitch) >= move.num_bytes)
        for i in range(move.count):
            to, from_ = move.target + i * move.target_pitch, move.address + i * move.pitch
            assert from_ + move.num_bytes <= address, "reads behind the last piece"
            got[to : to + move.num_bytes] = source[from_ : from_ + move.num_bytes]
    written = expected > 0
    np.testing.assert_array_equal(got[written], expected[written])


def test_only_what_lies_close_on_both_sides_is_one_piece():
    near, far, behind = Move(128, 128, 64), Move(1000, 1000, 64), Move(0, 2000, 64)
    assert together([Move(0, 0, 100), near, far, behind], False) == [Move(0, 0, 192), far, behind]


@pytest.mark.parametrize("blocks", [(None, None, None), (0, 1, 0), (1, None, 0)])
def test_only_pieces_of_one_block_of_page_locked_memory_are_joined(blocks):
    moves = [Move(64 * i, 64 * i, 64, block) for i, block in enumerate(blocks)]
    assert together(moves, False) == moves


def test_pieces_are_not_further_apart_than_a_copy_may_reach():
    moves = [Move(0, 0, 64), Move(128, 2**31, 64), Move(256, 2**31 + 2**20, 64)]
    assert together(moves, True) == [moves[0], Move(128, 2**31, 64, 0, 2, 128, 2**20)]
    assert len(together([Move(0, 0, 64, 0), Move(128, 2**20, 64, 1)], True)) == 2


def test_a_layer_after_layer_frame_comes_in_a_copy_for_each_size():
    """91 compressors, as of deepseek-v4-pro, three tokens, to where a captured step wants them."""
    sizes = [3 * 64 * (4, 2, 1)[i % 3] for i in range(91)]
    starts, _ = one_behind_the_other(sizes)
    wanted = {size: (n * 10**6, 4 * size // 3) for n, size in enumerate(sorted(set(sizes)))}
    at = dict.fromkeys(wanted, 0)
    moves = []
    for start, size in zip(starts, sizes, strict=True):
        base, pitch = wanted[size]
        moves.append(Move(base + at[size] * pitch, start, size))
        at[size] += 1
    joined = together(moves, True)
    assert sorted(move.count for move in joined) == [30, 30, 31]


def test_rows_are_seen_where_they_were_brought(cuda):
    rows = FarRows(cuda, 1 << 16, "cpu")
    data = np.arange(64 * 16, dtype=np.float32)
    rows.send([(0, memoryview(b""), 0), (256, memoryview(data.tobytes()), data.nbytes)])
    cuda.synchronize()
    assert torch.equal(rows.view("fp32", 256, 64, 16), torch.from_numpy(data).view(64, 16))


# -- limits ---------------------------------------------------------------------------------------------------------


def test_steps_are_merged_only_as_far_as_their_rows_fit(cuda):
    token_bytes = 4 * (256 + 512 + 256)
    worker = made(cuda, max_step_bytes=40 * token_bytes, max_step_tokens=64)
    assert worker.runner.most_merged_rows == 40
    framed = Framed(worker)
    batch = [Wanted(framed.step([("a", 0, 30)]), "")]
    assert execute.can_join(worker, batch, Wanted(framed.step([("b", 0, 10)]), ""))
    assert not execute.can_join(worker, batch, Wanted(framed.step([("b", 0, 11)]), ""))


def test_the_largest_step_fits(cuda):
    token_bytes = 4 * (256 + 512 + 256)
    worker = made(cuda, max_step_bytes=96 * token_bytes, max_step_tokens=96)
    worker.rules = make_worker(backends.load("cpu"), max_step_tokens=96).rules
    run(worker, [("r", 0, 96)])
    for name in NAMES:
        assert_entries(worker, "r", name)


# -- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_launch_that_fails_undoes_the_step_and_leaves_nothing_on_its_way(cuda, graphs, failing):
    worker = made(cuda, graphs=graphs)
    feed(worker, "r", [3, 5])
    before = snapshot(worker)
    real, calls = worker.runner._launches._compress, 0

    def compress(*operands):
        nonlocal calls
        calls += 1
        if calls == failing + 1:
            raise RuntimeError("injected: launch")
        return real(*operands)

    worker.runner._launches._compress = compress
    with refused("step_failed"):
        run(worker, [("r", 8, 2)])
    assert not cuda.pending, "the next step writes to memory that is still read"
    assert snapshot(worker) == before
    worker.runner._launches._compress = real
    feed(worker, "r", [2, 2, 2, 9])
    for name in NAMES:
        assert_entries(worker, "r", name)
    worker.check_integrity()


def test_a_kernel_that_fails_later_undoes_the_step(cuda, caplog):
    worker = made(cuda)
    feed(worker, "r", [3])

    def fault():
        raise RuntimeError("injected: kernel")

    cuda.pending.append(fault)
    with caplog.at_level(logging.ERROR, "kvfold"), refused("step_failed"):
        run(worker, [("r", 3, 1)])
    assert "a kernel failed" in caplog.text
    feed(worker, "r", [1])
    assert_entries(worker, "r", CSA)


def test_a_device_that_stays_broken_says_so(cuda):
    worker = made(cuda)
    feed(worker, "r", [3])
    cuda.broken = True
    with pytest.raises(BrokenDeviceError):
        run(worker, [("r", 3, 1)])


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("near_bytes", [0, NEAR_BYTES])
def test_the_first_value_that_is_not_finite_is_told(cuda, monkeypatch, near_bytes, graphs):
    monkeypatch.setattr("kvfold_service.rows.NEAR_BYTES", near_bytes)
    worker = made(cuda, graphs=graphs)
    framed = Framed(worker)
    for _ in range(3):
        body = framed.decoded(step_body([("a", 0, 2), ("b", 0, 3)], pad=2))
        rows = np.frombuffer(body["tensors"][1]["data"], np.float32).reshape(7, 512)
        rows[4, 100], rows[3, 400] = np.inf, np.nan
        before = snapshot(worker)
        with refused("non_finite", compressor=CSA, row=3, column=400):
            worker.step(parse_step(body, worker.rules))
        assert snapshot(worker) == before
    framed.run([("a", 0, 9)])
    assert_entries(worker, "a", CSA)


def test_a_score_of_minus_infinity_is_a_weight_of_nothing(cuda):
    framed = Framed(made(cuda))
    body = framed.decoded(step_body([("a", 0, 4)], [CSA]))
    np.frombuffer(body["tensors"][0]["data"], np.float32).reshape(4, 512)[2, 256:] = -np.inf
    framed.worker.step(parse_step(body, framed.worker.rules))


# -- which runner ---------------------------------------------------------------------------------------------------


def test_a_backend_of_the_host_needs_no_device():
    assert isinstance(make_worker(backends.load("cpu")).runner, HostRunner)


def test_scratch_is_reserved_at_start_for_the_largest_step(cuda):
    asked = []

    def reserve(device, num_windows, head_dim):
        asked.append((device.type, num_windows, head_dim))

    backend = dataclasses.replace(fake_backend(cuda), reserve_scratch=reserve)
    caches = make_worker(backends.load("cpu"), max_requests=4).caches
    DeviceRunner(backend, caches, 1 << 20, 4096, graphs=True, cuda=cuda)
    assert asked == [("cpu", 4096 // 8 + 4, 128), ("cpu", 4096 // 4 + 4, 128), ("cpu", 4096 // 4 + 4, 64)]
