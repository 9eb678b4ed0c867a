"""The engine: order, turns and batches. Merging steps changes no byte, and a bad step touches no other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from kvfold_service.engine import Engine
from kvfold_service.errors import ServiceError
from kvfold_service.step import Step, parse_step
from kvfold_service.worker import Worker
from tests.service_cases import CSA, HCA, INDEXER, assert_entries, changed, make_worker, parts_of, step_body

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


Wanted = tuple[str, dict[str, Any]]
"""(tenant, body of a step)."""


@pytest.fixture
def worker(backend) -> Iterator[Worker]:
    worker = make_worker(backend, max_requests=12, max_step_tokens=4096)
    yield worker
    worker.check_integrity()


@contextmanager
def engine_of(worker: Worker) -> Iterator[Engine]:
    engine = Engine(worker)
    try:
        yield engine
    finally:
        engine.stop()


async def queued(engine: Engine, wanted: list[Wanted], more: Callable[[], Any] | None = None) -> list[Any]:
    """What comes of steps that all wait before the first one runs."""
    gate = threading.Event()
    blocked = asyncio.create_task(engine.call(gate.wait))
    await asyncio.sleep(0.02)
    parsed: list[tuple[Step, str]] = [(parse_step(body, engine.worker.rules), tenant) for tenant, body in wanted]
    tasks = [asyncio.create_task(engine.step(step, tenant)) for step, tenant in parsed]
    if more:
        tasks.append(asyncio.create_task(more()))
    await asyncio.sleep(0.02)
    gate.set()
    await blocked
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    return [outcome[0] if isinstance(outcome, tuple) else outcome for outcome in outcomes]


def one(id: str, start: int, length: int, *names: str, tenant: str = "", **changes: Any) -> Wanted:
    return tenant, step_body([(id, start, length)], names or (HCA,), step_id=f"{tenant}{id}{start}", **changes)


async def test_waiting_steps_of_different_requests_run_as_one_batch(worker):
    wanted = [one("a", 0, 20), one("b", 0, 3, HCA, CSA), one("c", 0, 9, INDEXER), one("a", 0, 20, tenant="t")]
    with engine_of(worker) as engine:
        replies = await queued(engine, wanted)
        assert (worker.totals["batches"], worker.totals["steps"]) == (1, 4)
        assert len({reply["launches"] for reply in replies}) == 1
        assert [reply["skipped"] for reply in replies] == [[], [HCA, CSA], [], []]
        assert [reply["step_id"] for reply in replies] == ["a0", "b0", "c0", "ta0"]
        for id, name in (("a", HCA), ("b", HCA), ("b", CSA), ("c", INDEXER)):
            assert_entries(worker, id, name)
        assert worker.request("a", "t")["compressors"][HCA]["committed"] == 20


async def test_merging_changes_no_byte_with_padding_and_drafts(worker, backend):
    rounds = [
        [one("a", 0, 5, HCA, CSA, pad=3), one("b", 0, 30, HCA, CSA), one("c", 0, 1, CSA, pad=1)],
        [one("c", 1, 40, CSA), one("a", 5, 22, HCA, CSA, draft_tokens=[3]), one("b", 30, 1, HCA, CSA, pad=2)],
    ]
    with engine_of(worker) as engine:
        for wanted in rounds:
            await queued(engine, wanted)
    assert worker.totals["batches"] == len(rounds)
    for id, names in (("a", (HCA, CSA)), ("b", (HCA, CSA)), ("c", (CSA,))):
        for name in names:
            assert_entries(worker, id, name)
    assert worker.truncate("a", 24)["compressors"][HCA]["committed"] == 24


async def test_steps_of_one_request_run_in_order_and_not_together(worker):
    wanted = [one("a", 0, 7), one("a", 7, 9), one("b", 0, 8), one("a", 16, 24)]
    with engine_of(worker) as engine:
        replies = await queued(engine, wanted)
    ids = ("a", "a", "b", "a")
    committed = [parts_of(reply, id)[HCA]["committed"] for reply, id in zip(replies, ids, strict=True)]
    assert committed == [7, 16, 8, 40]
    assert worker.totals["batches"] == 3  # a, then a and b, then a
    assert_entries(worker, "a", HCA)


async def test_a_call_between_two_steps_stays_between_them(worker):
    with engine_of(worker) as engine:
        wanted = [one("a", 0, 16)]

        async def release_and_begin_again() -> Any:
            await engine.call_for("", worker.release, "a")
            step = parse_step(one("a", 0, 8)[1], worker.rules)
            return await engine.step(step, "")

        _, reply = await queued(engine, wanted, release_and_begin_again)
    assert parts_of(reply, "a")[HCA]["committed"] == 8


@pytest.mark.parametrize("bad", ["non_finite", "position_gap", "pool_exhausted"])
async def test_a_bad_step_touches_no_other(worker, bad):
    spoilt = one("bad", 0, 12, HCA, CSA)
    if bad == "non_finite":
        rows = np.frombuffer(spoilt[1]["tensors"][1]["data"], np.float32).copy()
        rows[-1] = np.nan
        spoilt[1]["tensors"][1]["data"] = memoryview(rows.tobytes())
    elif bad == "position_gap":
        spoilt = one("bad", 5, 12, HCA, CSA)
    else:
        spoilt = "", step_body([(f"x{i}", 0, 1) for i in range(12)], [HCA])
    wanted = [one("a", 0, 20, HCA, CSA), spoilt, one("b", 0, 13, HCA, CSA)]
    with engine_of(worker) as engine:
        first, refusal, last = await queued(engine, wanted)
        assert isinstance(refusal, ServiceError)
        assert refusal.code == bad
        if bad == "non_finite":
            assert refusal.details["compressor"] == CSA
            assert refusal.details["row"] == 11
        assert parts_of(first, "a")[CSA]["committed"] == 20
        assert parts_of(last, "b")[CSA]["committed"] == 13
        for id in ("a", "b"):
            for name in (HCA, CSA):
                assert_entries(worker, id, name)
        with pytest.raises(ServiceError, match="no request"):
            worker.request("bad")


async def test_a_kernel_that_fails_for_one_step_fails_that_step_alone(backend):
    def failing(real, windows, appends, rows, *arguments):
        if (rows == 7.0).all(1).any():
            raise RuntimeError("boom")
        return real(windows, appends, rows, *arguments)

    worker = make_worker(changed(backend, failing), max_requests=12)
    sevens = one("bad", 0, 2)
    sevens[1]["tensors"][0]["data"] = memoryview(np.full((2, 256), 7, np.float32).tobytes())
    with engine_of(worker) as engine:
        first, refusal, last = await queued(engine, [one("a", 0, 20), sevens, one("b", 0, 13)])
    assert refusal.code == "step_failed"
    assert {id for _, id in worker.requests} == {"a", "b"}
    assert first["launches"] > 0
    assert last["launches"] > 0
    assert_entries(worker, "a", HCA)
    worker.check_integrity()


async def test_dtypes_are_not_mixed_in_a_batch(worker):
    with engine_of(worker) as engine:
        await queued(engine, [one("a", 0, 20), one("b", 0, 20, dtype="bf16"), one("c", 0, 20)])
    assert worker.totals["batches"] == 3
    assert_entries(worker, "a", HCA)
    assert_entries(worker, "c", HCA)


async def test_tenants_take_turns(worker):
    """A tenant with a long queue of steps that cannot be merged does not hold up another's one step."""
    order: list[str] = []
    with engine_of(worker) as engine:
        many = [one("a", i, 1, tenant="greedy") for i in range(10)]

        async def watched(body: Wanted) -> None:
            await engine.step(parse_step(body[1], worker.rules), body[0])
            order.append(body[0])

        gate = threading.Event()
        blocked = asyncio.create_task(engine.call(gate.wait))
        await asyncio.sleep(0.02)
        tasks = [asyncio.create_task(watched(body)) for body in [*many, one("b", 0, 1, tenant="modest")]]
        await asyncio.sleep(0.02)
        gate.set()
        await asyncio.gather(blocked, *tasks)
    assert order.index("modest") <= 1


async def test_stop_finishes_what_was_submitted(worker):
    engine = Engine(worker)
    task = asyncio.create_task(engine.step(parse_step(one("a", 0, 20)[1], worker.rules), ""))
    await asyncio.sleep(0)
    engine.stop()
    assert parts_of((await task)[0], "a")[HCA]["committed"] == 20
    assert engine.depth in (0, 1)
