"""memory: a step sent twice runs once; what was refused is forgotten."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import pytest

from kvfold_service.errors import ServiceError
from kvfold_service.memory import Encoded, StepMemory
from tests.service_cases import refused

A, B = b"body a", b"body b"


def reply(text: str) -> Encoded:
    return Encoded("application/msgpack", text.encode())


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def begin(memory: StepMemory, tenant: str, step_id: str, body: bytes) -> asyncio.Future[Encoded] | None:
    return memory.begin(tenant, step_id, body, len(body))


def run_step(memory: StepMemory, step_id: str, body: bytes = A, tenant: str = "t", text: str = "done") -> None:
    assert begin(memory, tenant, step_id, body) is None
    memory.finish(tenant, step_id, reply(text))


@on_a_loop
async def test_the_same_step_gets_the_first_reply():
    memory = StepMemory(4)
    run_step(memory, "s", text="first")
    for _ in range(3):
        assert await begin(memory, "t", "s", A) == reply("first")


@on_a_loop
async def test_while_the_first_runs_the_second_waits_for_its_reply():
    memory = StepMemory(4)
    assert begin(memory, "t", "s", A) is None
    second = begin(memory, "t", "s", A)
    assert not second.done()
    memory.finish("t", "s", reply("first"))
    assert await second == reply("first")


@pytest.mark.parametrize("finished", [True, False])
@on_a_loop
async def test_another_body_under_the_id_is_a_conflict(finished):
    memory = StepMemory(4)
    begin(memory, "t", "s", A)
    if finished:
        memory.finish("t", "s", reply("first"))
    with refused("step_conflict"):
        begin(memory, "t", "s", B)
    assert begin(memory, "t", "s", A) is not None


@on_a_loop
async def test_ids_are_each_tenant_s_own():
    memory = StepMemory(4)
    run_step(memory, "s", A, "a", "of a")
    run_step(memory, "s", B, "b", "of b")
    assert (await begin(memory, "a", "s", A), await begin(memory, "b", "s", B)) == (reply("of a"), reply("of b"))


@on_a_loop
async def test_a_refused_step_frees_its_id_and_tells_who_waited():
    memory = StepMemory(4)
    begin(memory, "t", "s", A)
    waiting = begin(memory, "t", "s", A)
    memory.forget("t", "s", ServiceError("non_finite", "no"))
    with refused("non_finite"):
        await waiting
    run_step(memory, "s", B, text="second try")
    assert await begin(memory, "t", "s", B) == reply("second try")


@on_a_loop
async def test_the_last_ids_are_kept():
    memory = StepMemory(3)
    for i in range(5):
        run_step(memory, f"s{i}")
    assert [begin(memory, "t", f"s{i}", A) is not None for i in (2, 3, 4)] == [True] * 3
    assert begin(memory, "t", "s1", A) is None


@on_a_loop
async def test_another_tenant_s_steps_push_nothing_out():
    memory = StepMemory(1)
    run_step(memory, "s", tenant="a")
    for i in range(3):
        run_step(memory, f"s{i}", tenant="b")
    assert begin(memory, "a", "s", A) is not None


@on_a_loop
async def test_what_still_runs_is_never_dropped():
    memory = StepMemory(1)
    begin(memory, "t", "slow", A)
    for i in range(3):
        run_step(memory, f"s{i}")
    slow = begin(memory, "t", "slow", A)
    memory.finish("t", "slow", reply("late"))
    assert await slow == reply("late")


@on_a_loop
async def test_replies_are_bounded_by_bytes_too():
    memory = StepMemory(100, max_bytes=10)
    for i in range(4):
        run_step(memory, f"s{i}", text="12345")
    assert [begin(memory, "t", f"s{i}", A) is not None for i in (2, 3)] == [True, True]
    assert begin(memory, "t", "s1", A) is None


@on_a_loop
async def test_a_reply_over_the_bound_is_kept_until_the_next():
    memory = StepMemory(100, max_bytes=10)
    run_step(memory, "large", text="x" * 50)
    assert await begin(memory, "t", "large", A) == reply("x" * 50)
    run_step(memory, "small", text="x")
    assert begin(memory, "t", "large", A) is None
    assert begin(memory, "t", "small", A) is not None
