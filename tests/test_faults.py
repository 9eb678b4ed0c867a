"""faults: real workers on bad days. Nothing is lost, nothing wrong is served, and the one who asks is told."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from kvfold_client import Client, errors
from kvfold_kernels import backends
from kvfold_service.errors import BrokenDeviceError
from kvfold_service.runner import HostRunner
from tests.faulty import PHASES
from tests.http_cases import assert_refused, services
from tests.service_cases import HCA, NAMES, Process, alone, make_worker, page_entries, stream

serve = pytest.fixture(services)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class BadDay:
    """A worker of `tests.faulty`, and the file that brings its faults on."""

    def __init__(self, folder: Path, *flags: str, log: str | None = None) -> None:
        self.file = folder / "fault"
        self.set("")
        flags = ("--max-requests=6", "--pages=16", "--lease-seconds=60", *flags)
        self.process = Process(folder, *flags, module="tests.faulty", log=log, FAULT_FILE=str(self.file))
        self.client = Client(self.process.url, retries=0)

    def set(self, fault: str) -> None:
        self.file.write_text(fault)

    def step(self, id: str, start: int, end: int, **options: Any) -> Any:
        rows = {name: stream(name, "r")[start:end] for name in NAMES}
        return self.client.step([(id, start, end - start)], rows, **options)

    def end(self) -> int:
        self.client.close()
        return self.process.end()

    def integrity(self) -> dict[str, Any]:
        return httpx.get(f"{self.process.url}/v1/integrity").raise_for_status().json()


@pytest.fixture(scope="module")
def bad_day(tmp_path_factory) -> Iterator[BadDay]:
    """Its log disk is full, too."""
    made = BadDay(tmp_path_factory.mktemp("worker"), "--canary-seconds=0", "--log-level=debug", log="/dev/full")
    with made.process:
        yield made
        assert made.end() == 0


def assert_reads(client: Client, id: str) -> None:
    """Every page of the request, byte for byte what a worker without faults has."""
    layouts = make_worker(backends.load("cpu")).caches.by_name
    for name, state in client.request(id).items():
        rows = [
            page_entries(layouts[name], {"num_entries": page.num_entries, "shape": [len(page.data)], "data": page.data})
            for page in client.read_pages(state.pages)
        ]
        np.testing.assert_array_equal(np.concatenate(rows), alone(backends.load("cpu"), "r", name)[: state.num_entries])


@pytest.mark.parametrize("phase", PHASES)
def test_a_step_that_fails_in_any_phase_leaves_nothing(bad_day, phase):
    """Not of an old request, not of a new one; the worker proves itself and goes on, and the same step then runs."""
    old, new = f"old-{phase}", f"new-{phase}"
    bad_day.step(old, 0, 21)
    for id, start, end in ((old, 21, 40), (new, 0, 19)):
        if phase == "slots" and id == old:
            continue  # it has one
        before = bad_day.client.stats()
        bad_day.set(f"{phase} once")
        with pytest.raises(errors.StepFailed):
            bad_day.step(id, start, end, step_id=id)
        after = bad_day.client.stats()
        assert (before["pools"], before["requests"]) == (after["pools"], after["requests"])
        assert bad_day.integrity() == {"status": "ok", "bodies": 0, "staging_bytes": 0, "replies": 0}
        bad_day.step(id, start, end, step_id=id)
    for id in (old, new):
        assert_reads(bad_day.client, id)
        bad_day.client.release(id)
    assert bad_day.client.ready()


def test_a_full_pool_is_told_and_comes_back(bad_day):
    for i in range(2):
        bad_day.step(f"r{i}", 0, 40)
    with pytest.raises(errors.PoolExhausted) as refused:
        bad_day.step("r2", 0, 96)
    assert refused.value.details["needed"] > refused.value.details["free"]
    assert bad_day.client.stats()["requests"]["live"] == 2
    assert_reads(bad_day.client, "r0")
    assert bad_day.integrity()["status"] == "ok"
    for i in range(2):
        bad_day.client.release(f"r{i}")
    assert {pool["used"] for pool in bad_day.client.stats()["pools"].values()} == {0}


def test_leases_do_not_look_at_the_wall_clock(bad_day):
    """It goes back and forth by ten years all the time (see `faulty`)."""
    for id in ("stays", "goes"):
        bad_day.step(id, 0, 9)
    bad_day.client.lease("goes", 0.3)
    time.sleep(1.5)
    assert bad_day.client.stats()["requests"]["live"] == 1
    assert_reads(bad_day.client, "stays")
    with pytest.raises(errors.UnknownRequest):
        bad_day.client.request("goes")
    bad_day.client.release("stays")


def test_killed_amid_a_step_and_started_again(bad_day, tmp_path):
    """Old handles are stale under the old key, unknown under another. A step that never ends is cut off at the end."""
    (tmp_path / "key").write_bytes(b"k" * 32)
    flags = (f"--handle-key-file={tmp_path / 'key'}", "--worker-id=w")
    first = BadDay(tmp_path, *flags)
    handles = first.step("r", 0, 30).requests["r"][HCA].pages
    first.set("slow")
    lost = ThreadPoolExecutor(1).submit(first.step, "r", 30, 50)
    while not (tmp_path / "entered").exists():
        time.sleep(0.01)
    first.process.process.kill()
    assert isinstance(lost.exception(), errors.TransportError)
    assert first.process.wait() == -9
    first.client.close()

    again = BadDay(tmp_path, *flags)
    with pytest.raises(errors.StaleHandle):
        again.client.read_pages(handles)
    with pytest.raises(errors.UnknownHandle):
        bad_day.client.read_pages(handles)
    with pytest.raises(errors.PositionGap) as gap:
        again.step("r", 30, 50)
    assert gap.value.details["expected"] == 0
    again.step("r", 0, 50)
    assert_reads(again.client, "r")
    assert again.integrity()["status"] == "ok"
    (tmp_path / "entered").unlink()
    again.set("slow")
    lost = ThreadPoolExecutor(1).submit(again.step, "r", 50, 60)
    while not (tmp_path / "entered").exists():
        time.sleep(0.01)
    began = time.monotonic()
    assert again.end() == 1
    assert time.monotonic() - began < 1 + 3 + 3
    assert isinstance(lost.exception(), errors.TransportError)


def test_a_device_that_is_broken(bad_day):
    """The step fails, so does the proof that follows, and nothing is served any more. (This worker's last test.)"""
    handles = bad_day.step("r", 0, 30).requests["r"][HCA].pages
    bad_day.set("launch")
    with pytest.raises(errors.StepFailed):
        bad_day.step("r", 30, 40)
    while bad_day.client.ready():
        time.sleep(0.01)
    reason = httpx.get(f"{bad_day.process.url}/readyz").json()["reason"]
    assert "canary" in reason
    assert "injected" not in reason
    for call in (lambda: bad_day.step("r", 30, 40), lambda: bad_day.client.read_pages(handles)):
        with pytest.raises(errors.NotReady, match="canary"):
            call()
    assert bad_day.client.live()
    assert bad_day.client.stats()["requests"]["live"] == 1
    assert bad_day.integrity()["status"] == "ok"


# -- in process ----------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_runner_that_knows_its_device_is_broken(serve, monkeypatch):
    def run(self, work):
        raise BrokenDeviceError("CUDA error: an illegal memory access")

    api = serve()
    monkeypatch.setattr(HostRunner, "run", run)
    assert_refused(await api.step([("r", 0, 9)]), "step_failed")
    assert (await api.get("/readyz")).json()["reason"] == "CUDA error: an illegal memory access"
    assert_refused(await api.step([("r", 0, 9)]), "not_ready")


@pytest.mark.anyio
async def test_the_engine_outlives_a_fault_of_its_own(serve, monkeypatch):
    api = serve()
    with monkeypatch.context() as broken:
        broken.setattr(api.service.worker, "reap", lambda: 1 / 0)
        assert_refused(await api.step([("r", 0, 9)]), "step_failed")
    assert api.service.suspect.is_set()
    assert (await api.step([("r", 0, 9)])).status_code == 200


@pytest.mark.anyio
async def test_books_that_do_not_agree(serve):
    api = serve()
    await api.step([("r", 0, 9)])
    pool = api.service.worker.caches.groups[0].pool
    pool.num_free -= 1
    assert_refused(await api.get("/v1/integrity"), "not_ready")
    pool.num_free += 1
    assert "books" in (await api.get("/readyz")).json()["reason"]
