"""A worker on a GPU in this process: bytes, whatever the way to them, and what happens when something fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvfold_kernels import backends
from kvfold_service import canary, weights
from kvfold_service.device import DeviceRunner
from kvfold_service.errors import ServiceError
from kvfold_service.graphs import MAX_BUCKET
from kvfold_service.worker import Worker
from tests.gpu.workers import CSA, HCA, INDEXER, NAMES, SETS, counted, no_errors
from tests.walk import Part, Walk, entries

FEW = 0.02
"""Share of bytes that may differ from the reference: roundings that fall the other way."""


def check_ways(golden: Walk, subject: Walk) -> None:
    """One step, chunks, single tokens and a merged batch give the same bytes, about those of the reference."""
    canary.prove(subject.worker)
    total, random = 1400, np.random.default_rng(3)
    golden.run(golden.message([Part("r", 0, total)], NAMES))
    expected = {name: entries(golden.worker, "r", name) for name in NAMES}
    chunks: list[int] = []
    while (left := total - sum(chunks)) > 0:
        chunks.append(min(left, int(random.choice([1, 2, 3, 7, 64, 127, 128, 129, 300]))))
    for lengths in ([total], chunks, [1] * 300):
        starts = np.cumsum([0, *lengths]).tolist()
        for start, length in zip(starts, lengths, strict=False):
            subject.run(subject.message([Part("r", start, length)], NAMES))
        for name in NAMES:
            ours = entries(subject.worker, "r", name)
            assert torch.equal(ours, expected[name][: len(ours)]), f"{name}: {len(lengths)} steps change bytes"
        subject.worker.release("r")
    golden.worker.release("r")
    on_host = Worker(golden.worker.manifest, weights.seeded(golden.worker.manifest, 1), backends.load("reference"))
    reference = Walk(on_host, None, SETS, 0)
    reference.run(reference.message([Part("r", 0, 300)], NAMES))
    for name in NAMES:
        rows = entries(reference.worker, "r", name)
        differing = (rows != expected[name][: len(rows)]).float().mean().item()
        print(f"  {name}: {differing:.2e} of the bytes differ from the reference's", flush=True)
        assert differing <= FEW, name


def check_walk(walk: Walk, steps: int, graphs: bool) -> None:
    """Batches of all sizes, phases and dtypes, merged or not; drafts withdrawn, requests moved and released."""
    random = np.random.default_rng(7)
    with no_errors(), counted(torch.cuda.CUDAGraph, "replay") as replays:
        for i in range(steps):
            walk.step(int(random.choice([2, 8, 40, 200])), 1 + i % 3)
            if i % 7 == 3:
                walk.move()
            if i % 5 == 2:
                walk.release()
    compared = walk.check()
    assert (replays[0] > steps // 10) == graphs, f"{replays[0]} replays of {steps} steps"
    print(f"  {steps} batches, {replays[0]} of them replays: {compared} entries agree", flush=True)


def check_full_bucket(walk: Walk, graphs: bool) -> None:
    """One graph serves a whole bucket of requests and fewer, no window, some windows and all that there can be."""
    requests = [f"1.b{i}" for i in range(MAX_BUCKET)]
    walk.lengths |= dict.fromkeys(requests, 0)

    def step(chosen: list[str], length: int) -> dict[str, Any]:
        (reply,) = walk.run(walk.message([Part(r, walk.lengths[r], length) for r in chosen], [HCA]))
        for request in chosen:
            walk.lengths[request] += length
        return reply

    step(requests, 124)
    with no_errors(), counted(torch.cuda.CUDAGraph, "replay") as replays:
        for chosen in (requests, requests, requests[:130], requests, requests, requests[100:], requests):
            reply = step(chosen, 1)
    assert replays[0] == (6 if graphs else 0), replays
    assert reply["skipped"] == ([] if graphs else [HCA])
    for request in requests[40:]:
        walk.release(request)
    walk.check()


def check_refusals(walk: Walk) -> None:
    """A NaN is found where it is, with graphs and without; what it left in the rows' memory troubles nobody."""
    for request, tokens, row, column in (("0.n1", 50, 31, 77), ("0.n2", 300, 299, 511), ("0.n1", 64, 63, 0)):
        for _ in range(3):
            refusal = walk.spoil(request, NAMES, tokens, row, column)
            assert refusal.code == "non_finite", refusal
            assert (refusal.details["row"], refusal.details["column"]) == (row, column), refusal.details
            walk.run(walk.message([Part("0.fine", 0, 33)], NAMES))
            walk.worker.release("0.fine")


def check_failures(walk: Walk, graphs: bool) -> None:
    """A launch that fails fails its step alone; what cannot be captured is launched instead."""
    runner = walk.worker.runner
    assert isinstance(runner, DeviceRunner)
    launches = runner._launches
    real, calls = launches._compress, [0]

    def fail_second(*operands: Any) -> int:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("injected: launch")
        return real(*operands)

    for tokens in (300, 200):
        calls[0] = 0
        launches._compress = fail_second
        with pytest.raises(ServiceError) as caught:
            walk.run(walk.message([Part("0.f", 0, tokens)], [HCA, CSA]))
        assert caught.value.code == "step_failed"
        launches._compress = real
        walk.run(walk.message([Part("0.f", 0, tokens)], NAMES))
        walk.worker.release("0.f")
    if graphs:
        check_capture(walk, launches)


def check_capture(walk: Walk, launches: Any) -> None:
    run: Callable[[Any], Any] = launches.run

    def waits(calls: Any) -> Any:
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().synchronize()  # ends the capture with an error
        return run(calls)

    launches.run = waits
    with counted(torch.cuda.CUDAGraph, "replay") as replays:
        for n in range(4):
            walk.run(walk.message([Part("3.c", 20 * n, 20)], [INDEXER, CSA]))
        assert not replays[0]
    del launches.run
    for name in (CSA, INDEXER):
        assert len(entries(walk.worker, "3.c", name)) == 20
    walk.worker.release("3.c")
