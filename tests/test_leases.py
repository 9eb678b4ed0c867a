"""leases: on a clock that the tests turn. A request lives as long as it is used, and whatever it had comes back."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from kvfold_kernels.backends import Backend
from kvfold_service import app as apps
from kvfold_service import settings as options
from kvfold_service.auth import Tokens
from kvfold_service.calls import MAX_LEASE_SECONDS, parse_lease
from kvfold_service.engine import Engine
from kvfold_service.errors import ServiceError
from kvfold_service.step import parse_step
from kvfold_service.worker import Worker
from tests.service_cases import (
    CSA,
    HCA,
    INDEXER,
    NAMES,
    Gate,
    assert_entries,
    committed,
    export,
    feed,
    import_,
    read,
    refused,
    run,
    snapshot,
    step_body,
    whole_workers,
)

LEASE = 10.0
start = pytest.fixture(whole_workers)


class Clock:
    def __init__(self) -> None:
        self.now = 1e6

    def __call__(self) -> float:
        return self.now

    def turn(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def worker(start: Callable[..., Worker], clock: Clock) -> Worker:
    return start(lease_seconds=LEASE, clock=clock)


def is_known(worker: Worker, request_id: str = "r") -> bool:
    try:
        return bool(worker.request(request_id))
    except ServiceError:
        return False


def pages(worker: Worker, name: str = HCA, id: str = "r") -> list[str]:
    return worker.request(id)["compressors"][name]["pages"]


def ends_after(worker: Worker, clock: Clock, seconds: float) -> bool:
    """Whether the request lives for so long from now on, and not a moment longer. GET does not renew."""
    clock.turn(seconds - 1e-3)
    alive = is_known(worker)
    clock.turn(2e-3)
    return alive and not is_known(worker)


# -- what renews ---------------------------------------------------------------------------------------------------

USES: dict[str, Callable[[Worker], Any]] = {
    "step": lambda worker: run(worker, [("r", 17, 1)]),
    "step of no tokens": lambda worker: run(worker, [("s", 0, 1), ("r", 17, 0)]),
    "step of one compressor": lambda worker: run(worker, [("r", 17, 1)], [INDEXER]),
    "truncate": lambda worker: worker.truncate("r", 16),
    "truncate of nothing": lambda worker: worker.truncate("r", 17),
    "export": lambda worker: export(worker, "r", compressors=[], entries=False),
    "read": lambda worker: read(worker, pages(worker)[:1]),
    "verify": lambda worker: worker.verify(pages(worker, CSA)[-1:]),
    "lease": lambda worker: worker.lease("r", LEASE),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_every_use_renews(worker, clock, use):
    run(worker, [("r", 0, 17)], draft_tokens=[2])
    clock.turn(LEASE - 1)
    use(worker)
    assert ends_after(worker, clock, LEASE)


def test_every_request_of_a_step_or_a_read(worker, clock):
    run(worker, [("r", 0, 16), ("s", 0, 16), ("t", 0, 16)])
    clock.turn(LEASE - 1)
    run(worker, [("r", 16, 1), ("s", 16, 0)])
    clock.turn(LEASE - 1)
    assert [is_known(worker, id) for id in "rst"] == [True, True, False]
    read(worker, pages(worker, id="r") + pages(worker, id="s"))
    clock.turn(LEASE - 1)
    assert [is_known(worker, id) for id in "rst"] == [True, True, False]


def test_an_import_begins_a_lease(worker, clock):
    run(worker, [("s", 0, 17)])
    exported = export(worker, "s")
    clock.turn(LEASE / 2)
    import_(worker, "r", exported)
    assert ends_after(worker, clock, LEASE)
    assert not is_known(worker, "s")


NO_USES: dict[str, tuple[str | None, Callable[[Worker], Any]]] = {
    "GET": (None, lambda worker: worker.request("r")),
    "another request's step": (None, lambda worker: run(worker, [("s", 0, 5)])),
    "a step that is refused": ("position_gap", lambda worker: run(worker, [("s", 0, 1), ("r", 18, 1)])),
    "a step without room": ("pool_exhausted", lambda worker: run(worker, [(i, 17 * (i == "r"), 1) for i in "rabcd"])),
    "a truncate that is refused": ("truncate_too_far", lambda worker: worker.truncate("r", 3)),
    "a read that is refused": ("unknown_handle", lambda worker: read(worker, [*pages(worker), "A" * 52])),
    "a digest that is refused": ("unknown_handle", lambda worker: worker.verify([*pages(worker), "A" * 52])),
    "an export that is refused": ("unknown_compressor", lambda worker: export(worker, "r", compressors=["none"])),
    "an import that is refused": ("request_exists", lambda worker: import_(worker, "r", export(worker, "s"))),
    "another tenant's lease": ("unknown_request", lambda worker: worker.lease("r", 100.0, "tenant")),
}


@pytest.mark.parametrize(("code", "call"), NO_USES.values(), ids=NO_USES)
def test_what_does_not_renew(worker, clock, code, call):
    run(worker, [("r", 0, 17)])
    if code == "request_exists":
        run(worker, [("s", 0, 5)])
    clock.turn(LEASE - 1)
    if code:
        with refused(code):
            call(worker)
    else:
        call(worker)
    assert ends_after(worker, clock, 1)


# -- the lease call ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [1e-2, 0.5, 3, 1000, MAX_LEASE_SECONDS])
def test_a_lease_is_exactly_what_was_asked_for(worker, clock, seconds):
    run(worker, [("r", 0, 17)])
    clock.turn(1)
    assert worker.lease("r", seconds) == {"version": 1, "expires_in": seconds}
    assert ends_after(worker, clock, seconds)


def test_a_use_never_shortens_a_lease(worker, clock):
    run(worker, [("r", 0, 17)])
    worker.lease("r", 1000)
    run(worker, [("r", 17, 1)])
    clock.turn(500)
    read(worker, pages(worker))
    assert ends_after(worker, clock, 500)


def test_a_lease_may_be_shortened_and_then_renewed(worker, clock):
    run(worker, [("r", 0, 17)])
    worker.lease("r", 1000)
    worker.lease("r", 2)
    clock.turn(1)
    run(worker, [("r", 17, 1)])
    assert ends_after(worker, clock, LEASE)


@pytest.mark.parametrize(
    "seconds", [0, -1, -0.0, 86400.001, 86401, 2**70, math.inf, -math.inf, math.nan, True, "10", None, b"1", [1], {}]
)
def test_seconds_out_of_bounds(seconds):
    with refused("malformed"):
        parse_lease({"version": 1, "seconds": seconds})


@pytest.mark.parametrize("seconds", [5e-324, 1, 0.25, 86400, 86400.0])
def test_seconds_within_bounds(seconds):
    assert parse_lease({"version": 1, "seconds": seconds}) == seconds
    with refused("unsupported_version"):
        parse_lease({"version": 2, "seconds": seconds})
    with refused("malformed"):
        parse_lease({"version": 1, "seconds": seconds, "id": "r"})


def test_a_lease_on_what_is_not_known(worker, clock):
    run(worker, [("r", 0, 17)])
    clock.turn(LEASE)
    for id in ("never", "r"):
        with refused("unknown_request"):
            worker.lease(id, 5.0)
    assert not is_known(worker)


# -- the end -------------------------------------------------------------------------------------------------------


def test_an_expired_request_is_gone_before_the_reaper_comes(worker, clock):
    """For every call: unknown, its handles stale, its id free, and releasing it is harmless."""
    run(worker, [("r", 0, 17)], draft_tokens=[3])
    exported, handles = export(worker, "r"), pages(worker)
    clock.turn(LEASE)
    assert ("", "r") in worker.requests
    for call in (
        lambda: worker.request("r"),
        lambda: worker.truncate("r", 16),
        lambda: export(worker, "r"),
        lambda: worker.lease("r", 1.0),
    ):
        with refused("unknown_request"):
            call()
    with refused("stale_handle"):
        worker.verify(handles)
    run(worker, [("r", 0, 4)])
    clock.turn(LEASE)
    with refused("position_gap", expected=0):
        run(worker, [("r", 4, 1)])
    run(worker, [("r", 0, 4)])
    clock.turn(LEASE)
    import_(worker, "r", exported)
    assert committed(worker, "r", CSA) == 17
    for name in NAMES:
        assert_entries(worker, "r", name)
    clock.turn(LEASE)
    worker.release("r")
    assert not worker.requests
    assert (worker.totals["expired"], worker.totals["released"]) == (3, 1)


@pytest.mark.parametrize("call", ["step", "import"])
def test_what_has_expired_makes_room(start, clock, call):
    """Slots and pages, for the very call that needs them."""
    worker = start(max_requests=1, pages=6, lease_seconds=LEASE, clock=clock)
    giver = start()
    feed(giver, "new", [40])
    exported = export(giver, "new")
    run(worker, [("r", 0, 40)])
    with refused("pool_exhausted", pool="requests"):
        run(worker, [("new", 0, 40)])
    clock.turn(LEASE)
    if call == "step":
        run(worker, [("new", 0, 40)])
    else:
        import_(worker, "new", exported)
    for name in NAMES:
        assert_entries(worker, "new", name)
    assert not is_known(worker)


def test_the_reaper(worker, clock):
    """It takes those whose time has come and no others; their pages and slots are free, their handles stale."""
    empty = snapshot(worker)
    run(worker, [("r", 0, 40)])
    clock.turn(3)
    run(worker, [("s", 0, 40)], tenant="tenant")
    run(worker, [("t", 0, 40)])
    worker.lease("t", 1.0)
    handles = pages(worker) + pages(worker, id="t")
    assert worker.reap() == 0
    clock.turn(1.0)
    assert worker.reap() == 1
    assert [id for _, id in worker.requests] == ["r", "s"]
    clock.turn(6.0)
    assert [worker.reap(), worker.reap()] == [1, 0]
    assert worker.totals["expired"] == 2
    for handle in handles:
        with refused("stale_handle"):
            read(worker, [handle])
    assert len(worker.request("s", "tenant")["compressors"][HCA]["pages"]) == 3
    clock.turn(LEASE)
    assert worker.reap() == 1
    after = snapshot(worker)
    assert {what: after[what] for what in ("state", "slots", "free", "pools")} == {
        what: empty[what] for what in ("state", "slots", "free", "pools")
    }


# -- while steps wait ----------------------------------------------------------------------------------------------


async def _queued(clock: Clock, worker: Worker, gate: Gate, *bodies: dict[str, Any]) -> tuple[int, list[Any]]:
    """Steps that wait behind a kernel while all leases end and the reaper comes: how many it took; what came of it."""
    gate.go.clear()
    gate.entered.clear()
    engine = Engine(worker)
    try:
        running = asyncio.create_task(engine.step(parse_step(step_body([("busy", 0, 4)]), worker.rules), ""))
        await gate.running()
        reaped = asyncio.create_task(engine.call(worker.reap))
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(engine.step(parse_step(body, worker.rules), "")) for body in bodies]
        await asyncio.sleep(0.01)
        assert set(worker.queued) == {("", id) for body in bodies for id in _ids(body)} | {("", "busy")}
        clock.turn(2 * LEASE)
        gate.go.set()
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        await running
        assert not worker.queued
        return await reaped, outcomes
    finally:
        gate.go.set()
        await asyncio.to_thread(engine.stop)


def _ids(body: dict[str, Any]) -> list[str]:
    return [request["id"] for request in body["requests"]]


def test_a_step_that_waits_keeps_its_requests_alive(start, clock, backend: Backend):
    gate = Gate(backend.name)
    worker = start(gate.backend, lease_seconds=LEASE, clock=clock)
    gate.go.set()
    run(worker, [("r", 0, 17), ("s", 0, 17), ("t", 0, 17)])
    step = step_body([("r", 17, 12), ("s", 17, 0)], step_id="waits")
    refused_step = step_body([("r", 3, 1)], step_id="refused")
    reaped, (outcome, error) = asyncio.run(_queued(clock, worker, gate, step, refused_step))
    assert reaped == 1  # t, which no step named
    assert outcome[0]["step_id"] == "waits"
    assert error.code == "position_conflict"
    assert sorted(id for _, id in worker.requests) == ["busy", "r", "s"]
    for name in NAMES:
        assert_entries(worker, "r", name)
    assert ends_after(worker, clock, LEASE)
    assert worker.reap() == 3


@pytest.mark.parametrize("num_tokens", [0, 1])
def test_a_step_that_comes_too_late_revives_nothing(start, clock, num_tokens):
    """Its request is unknown, though no reaper came: to go on is a gap, to begin anew is right."""
    worker = start(lease_seconds=LEASE, clock=clock)
    run(worker, [("r", 0, 17)])
    handles = pages(worker, CSA)
    clock.turn(LEASE)

    async def steps() -> None:
        engine = Engine(worker)
        with pytest.raises(ServiceError) as caught:
            await engine.step(parse_step(step_body([("r", 17, num_tokens)]), worker.rules), "")
        assert (caught.value.code, caught.value.details["expected"]) == ("position_gap", 0)
        await engine.step(parse_step(step_body([("r", 0, 17)], step_id="anew"), worker.rules), "")
        await asyncio.to_thread(engine.stop)

    asyncio.run(steps())
    with pytest.raises(ServiceError, match="freed or has changed"):
        worker.read_pages(handles, "")
    assert_entries(worker, "r", CSA)


def test_the_service_reaps_by_itself(start, clock):
    """Nobody calls: within about a second of the lease's end the request is gone."""
    worker = start(lease_seconds=LEASE, clock=clock)
    run(worker, [("r", 0, 17)])
    settings = options.read(["--manifest", "tiny", "--weights", "random:1"])

    async def serve() -> None:
        service = apps.Service(settings, Engine(worker), Tokens(None))
        async with apps.build(service).router.lifespan_context(service):
            await asyncio.sleep(1.1)
            assert worker.requests
            clock.turn(LEASE)
            for _ in range(300):
                await asyncio.sleep(0.01)
                if not worker.requests:
                    break
        await asyncio.to_thread(service.engine.stop)

    asyncio.run(serve())
    assert not worker.requests
    assert worker.totals["expired"] == 1
