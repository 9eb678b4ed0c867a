"""A scheduler's client of a worker in this process, and short simulations: what the scheduler's tests share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import httpx

from kvfold_client import Client
from kvfold_client.fleet import Fleet, StaticPlane
from kvfold_client.scheduler import (
    Arrival,
    Costs,
    FleetWorkers,
    OneWorker,
    Policy,
    RowSource,
    Simulation,
    VirtualClock,
    shapes_of,
)
from kvfold_client.scheduler.check import Checker
from kvfold_client.scheduler.clock import Clock
from kvfold_client.scheduler.progress import OnProgress
from kvfold_client.scheduler.report import summarise
from kvfold_client.scheduler.workers import Workers
from kvfold_service import manifest as manifests
from tests.fleet_cases import Town
from tests.http_cases import Api
from tests.service_cases import SMALL

WEIGHTS = "random:1"


Before = Callable[[httpx.Request], httpx.Response | None]


def pass_on(request: httpx.Request) -> None:
    """Answers nothing itself."""


class InProcess(httpx.BaseTransport):
    """Brings a blocking client's requests to the service of this thread's event loop; call it from another thread."""

    def __init__(self, http: httpx.AsyncClient, before: Before) -> None:
        """`before` may answer in place of the service, or raise."""
        self._http = http
        self._loop = asyncio.get_running_loop()
        self._before = before

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body = request.read()
        answer = self._before(request)
        if answer is not None:
            return answer
        copy = httpx.Request(request.method, request.url, headers=request.headers, content=body)
        response = asyncio.run_coroutine_threadsafe(self._http.send(copy), self._loop).result(60)
        return httpx.Response(response.status_code, headers=response.headers, content=response.content)


def client_of(api: Api, before: Before = pass_on) -> Client:
    """It tries nothing twice: what is refused is the scheduler's to handle."""
    return Client("http://kvfold", transport=InProcess(api.http, before), retries=0)


def arrivals(*lengths: tuple[int, int], every_ms: float = 5.0) -> tuple[Arrival, ...]:
    """(prompt, output) of each request."""
    return tuple(Arrival(i * every_ms, prompt, output) for i, (prompt, output) in enumerate(lengths))


def simulate(
    trace: Iterable[Arrival],
    workers: Workers,
    manifest: dict[str, Any],
    *,
    clock: Clock | None = None,
    seed: int = 1,
    check: bool = True,
    run_id: str = "run",
    on_progress: OnProgress | None = None,
    **policy: Any,
) -> tuple[Simulation, dict[str, Any]]:
    """A run to its end, every entry compared with the reference; (simulation, summary)."""
    source = RowSource(seed, shapes_of(manifest))
    checker = Checker(manifest, WEIGHTS, source) if check else None
    with clock or VirtualClock() as clock:
        simulation = Simulation(
            tuple(trace),
            workers,
            source,
            clock,
            policy=Policy(**({"token_budget": 48} | policy)),
            costs=Costs(),
            run_id=run_id,
            on_finish=checker,
            on_progress=on_progress,
        )
        simulation.run()
    summary = summarise(simulation.requests, simulation.tally)
    if checker is not None:
        summary["checked"] = {"requests": checker.checked.requests, "entries": checker.checked.entries}
    return simulation, summary


async def over(client: Client, trace: Iterable[Arrival], **options: Any) -> tuple[Simulation, dict[str, Any]]:
    """`simulate` on a thread, so that this loop may answer."""
    return await asyncio.to_thread(lambda: simulate(trace, OneWorker(client), client.manifest(), **options))


def over_town(
    town: Town,
    trace: tuple[Arrival, ...],
    *,
    keep_copies: bool = False,
    health_seconds: float = 600.0,
    **options: Any,
) -> tuple[Simulation, dict[str, Any]]:
    """A run over the town's fleet; nothing is left behind at workers that live."""
    manifest = manifests.parse(SMALL, "test").to_json()
    with Fleet(StaticPlane.from_file(town.file, health_seconds=health_seconds), retries=0) as fleet:
        simulation, summary = simulate(trace, FleetWorkers(fleet, keep_copies), manifest, **options)
    assert summary["checked"] == {"requests": len(trace), "entries": num_entries(trace)}
    return simulation, summary


def live(town: Town) -> int:
    """Requests that its workers know."""
    return sum(len(worker.worker.requests) for worker in town.workers.values())


def num_entries(trace: Iterable[Arrival]) -> int:
    """Entries that the requests of a trace have at their ends, in the small model."""
    return sum(arrival.num_rows // part["ratio"] for arrival in trace for part in SMALL["compressors"])
