"""loadtest: whole runs against a service in process, and against a worker's process; nothing outlives a run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvfold_client import Client
from kvfold_client.loadtest import Sample, Traffic, command, options, precise_loop
from kvfold_client.loadtest.held import Held
from kvfold_client.loadtest.page import TITLES
from kvfold_client.loadtest.perform import perform
from kvfold_client.loadtest.record import write_files
from kvfold_client.loadtest.report import text_report
from kvfold_client.loadtest.result import LoadtestError, Result, Stop, Watcher
from kvfold_client.loadtest.workers import Workers
from kvfold_kernels import backends
from kvfold_service import app as apps
from tests.http_cases import services
from tests.service_cases import Process, changed

SHORT = ("--seconds=0.4", "--warmup=0.1", "--batch=2", "--context=8", "--output=24", "--prompt=8", "--drain=3")

ROOM = {"max_requests": 24, "max_step_tokens": 256, "staging_bytes": 8_000_000}
"""So much that nothing is refused, however slow this machine is today."""


class Target:
    """A service in this process, what was asked of it, and a test against it."""

    def __init__(self, service: apps.Service) -> None:
        self.service, self.calls = service, []
        self.app = apps.build(service)

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        self.calls.append((scope["method"], scope["path"], scope["server"]))
        await self.app(scope, receive, send)

    async def test(self, *flags: str, watcher: Watcher | None = None, stop: Stop | None = None) -> Result:
        given = options.read(["http://worker:1", *SHORT, *flags])
        transport = lambda: httpx.ASGITransport(self)  # noqa: E731
        async with Workers(given.urls, encoding=given.encoding, transport=transport) as workers:
            return await perform(given, workers, watcher or Watcher(), stop or Stop())

    @property
    def num_live(self) -> int:
        return len(self.service.worker.requests)


def on_service(use: Callable[[Target], Any], backend: Any = None, **limits: Any) -> Any:
    """The result of `use(target)`; afterwards the service is whole, and holds no request."""

    async def main() -> Any:
        makers = services()
        make = await anext(makers)
        target = Target(make(backend, **ROOM | limits).service)
        try:
            return await use(target)
        finally:
            assert target.num_live == 0
            async for _ in makers:
                pass

    with asyncio.Runner(loop_factory=precise_loop) as runner:
        return runner.run(main())


@pytest.mark.parametrize("profile", ["decode", "prefill", "mixed", "speculative"])
def test_a_profile_at_a_rate(profile):
    seen = {}

    async def use(target: Target) -> Result:
        result = await target.test(f"--profile={profile}", "--rate=40,20", "--arrivals=even", "--accept=0.5")
        seen.update(target.service.worker.totals)
        return result

    result = on_service(use)
    assert [point["name"] for point in result.points] == ["40/s", "20/s"]
    assert [point["due"] for point in result.points] == [16, 8]
    for point in result.points:
        assert point["outcomes"] == {"ok": point["due"]}
        assert point["latency_ms"]["p50"] >= point["call_ms"]["p50"] > 0
        assert {"wait", "recv", "queue", "plan", "kernel", "rest"} <= set(point["phases_us"])
        assert sum(point["phases_us"].values()) == pytest.approx(point["latency_ms"]["mean"] * 1e3, rel=0.01)
    tokens = {"decode": 2, "prefill": 8, "mixed": 10, "speculative": 8}[profile]
    steps = [s for samples in result.samples for s in samples if s.op == "step"]
    assert {s.num_tokens for s in steps} == {tokens}
    assert {s.row_bytes for s in steps} == {tokens * 2 * (256 + 512 + 256)}, "bf16 rows of three compressors"
    assert (profile == "speculative") == any(point.get("truncates") for point in result.points)
    assert seen["released"] > 0
    assert result.not_released == {}
    assert result.after[0]["stats"]["requests"]["live"] == 0


def test_without_a_rate_the_capacity_is_found_first():
    result = on_service(lambda target: target.test())
    first, *others = result.points
    assert first["name"] == "closed 8"
    assert [point["rate"] / first["throughput_per_s"] for point in others] == pytest.approx([0.25, 0.5, 0.75, 0.9, 1.1])


def test_a_closed_loop_sweep():
    result = on_service(lambda target: target.test("--concurrency=1,3", "--encoding=msgpack"))
    assert [point["name"] for point in result.points] == ["closed 1", "closed 3"]
    assert [set(point["outcomes"]) for point in result.points] == [{"ok"}, {"ok"}]


def test_a_worker_that_stalls_is_reported_by_the_open_loop_only():
    """The kernels stand still once, for 0.5 s of 2 s: a quarter of all callers come amid that."""
    stall_s, calls = 0.5, {"http": 0.0}

    def once(real: Callable[..., int], *arguments: Any) -> int:
        if time.perf_counter() > calls["http"] > 0:
            calls["http"] = 0.0
            time.sleep(stall_s)
        return real(*arguments)

    def stall_soon(point: Any, traffic: Traffic) -> None:
        calls["http"] = time.perf_counter() + 0.6

    async def use(target: Target) -> list[Result]:
        long = ("--seconds=2", "--warmup=0")
        watcher = Watcher(began=stall_soon)
        opened = await target.test(*long, "--rate=60", "--arrivals=even", watcher=watcher)
        return [opened, await target.test(*long, "--concurrency=1", watcher=watcher)]

    opened, closed = (result.points[0] for result in on_service(use, changed(backends.load("reference"), once)))
    assert opened["latency_ms"]["p99"] > 0.85 * stall_s * 1e3
    assert opened["latency_ms"]["p90"] > 0.4 * stall_s * 1e3
    assert opened["within_slo"] < 0.85
    assert closed["latency_ms"]["max"] > stall_s * 1e3, "it was there, once"
    assert closed["due"] > 100
    assert closed["latency_ms"]["p99"] < 0.5 * stall_s * 1e3


def test_refusals_are_counted_by_reason_and_do_not_flatter():
    result = on_service(
        lambda target: target.test("--profile=prefill", "--rate=30", "--prompt=100", "--arrivals=even"),
        max_step_tokens=64,
    )
    (point,) = result.points
    assert point["outcomes"] == {"step_too_large": 12}
    assert point["throughput_per_s"] == point["goodput_per_s"] == 0
    assert point["latency_ms"] == {}
    assert "step_too_large 12" in text_report(result, options.read(["http://worker:1"]))


def test_requests_that_decode_are_replaced_when_they_are_old():
    async def use(target: Target) -> int:
        await target.test("--rate=100", "--sessions=2", "--output=9", "--context=1", "--seconds=0.6")
        return target.service.worker.totals["released"]

    released = on_service(use)
    assert released >= 4 * 2, "about 70 steps of two sessions that end after 9"


def test_whoever_was_due_first_is_sent_first():
    """Three times as many steps as one session can do: they queue up, and none overtakes another."""

    def slow(real: Callable[..., int], *arguments: Any) -> int:
        time.sleep(0.003)
        return real(*arguments)

    async def use(target: Target) -> Result:
        return await target.test("--rate=150", "--sessions=1", "--seconds=0.5")

    ((*_, samples),) = [on_service(use, changed(backends.load("reference"), slow)).samples]
    waited = [s.sent_s - s.scheduled_s for s in samples]
    assert waited[-1] > 0.2, "they had to wait"
    assert sorted(samples, key=lambda s: s.sent_s) == samples


def test_a_session_that_the_worker_forgot_is_replaced():
    async def use(target: Target) -> Result:
        def forget(point: Any, traffic: Traffic) -> None:
            for _, id in list(target.service.worker.requests):
                asyncio.get_running_loop().create_task(released(id))

        async def released(id: str) -> None:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(target), base_url="http://worker:1") as http:
                await http.delete(f"/v1/requests/{id}")

        return await target.test(
            "--rate=50",
            "--sessions=2",
            watcher=Watcher(began=forget),
        )

    outcomes = on_service(use).points[0]["outcomes"]
    assert outcomes["ok"] > 10
    assert outcomes.get("position_gap", 0) <= 2


def test_only_the_given_address_is_asked_and_ids_are_of_this_run():
    asked = []

    async def use(target: Target) -> Result:
        result = await target.test("--profile=mixed", "--rate=20")
        asked.extend(target.calls)
        return result

    result = on_service(use)
    assert {server for _, _, server in asked} == {("worker", 1)}
    paths = {path for _, path, _ in asked}
    named = {path for path in paths if path.startswith("/v1/requests/")}
    assert paths - named == {"/v1/manifest", "/v1/stats", "/v1/step"}
    assert all(path.startswith(f"/v1/requests/{result.run}-") for path in named)
    assert Held().run != Held().run


@pytest.mark.parametrize(
    ("flags", "reason"),
    [(["--max-steps=10"], "--max-steps were sent"), (["--max-seconds=0.5"], "--max-seconds were over")],
)
def test_a_run_is_bounded(flags, reason):
    began = time.monotonic()
    result = on_service(lambda target: target.test("--rate=30,30,30,30,30,30,30,30,30,30", *flags))
    assert result.stopped == reason
    assert len(result.points) < 4
    assert sum(len(samples) for samples in result.samples) <= 30
    assert time.monotonic() - began < 5


def test_a_stop_keeps_what_there_is():
    async def use(target: Target) -> Result:
        stop = Stop()

        def enough(point: Any, sample: Sample) -> None:
            if sample.idx == 12:
                stop("enough")

        return await target.test("--rate=50,50", "--seconds=30", watcher=Watcher(step=enough), stop=stop)

    result = on_service(use)
    assert result.stopped == "enough"
    (point,) = result.points
    assert point["outcomes"] == {"ok": point["due"]}
    assert len(result.samples[0]) >= 13
    assert point["seconds"] < 10
    assert "stopped before its end: enough" in text_report(result, options.read(["http://worker:1"]))


TRACE = [
    {"timestamp": 5000, "input_length": 60, "output_length": 4},
    {"timestamp": 5200, "input_length": 10, "output_length": 3},
    {"timestamp": 5100, "input_length": 300, "output_length": 2},
]


def test_a_trace_is_replayed(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text("".join(json.dumps(request) + "\n" for request in TRACE))
    result = on_service(
        lambda target: target.test(f"--trace={file}", "--speed=2", "--chunk=64", "--pace-ms=20", "--slo-ms=5000")
    )
    (point,), (samples,) = result.points, result.samples
    assert point["outcomes"] == {"ok": 1 + 3 + 4 + 1 + 1 + 2}
    assert result.num_shortened == 1, "301 tokens are more than the 256 of the model"
    assert sum(s.num_tokens for s in samples) == 60 + 3 + 256 + 10 + 2, "the last token is never fed back"
    first_of = {s.num_tokens: s.scheduled_s for s in reversed(samples)}
    assert [first_of[n] for n in (60, 64, 10)] == pytest.approx([0, 0.05, 0.1]), "in order of time, at twice the speed"
    assert point["within_slo"] == 1


def test_a_trace_is_bounded_too(tmp_path):
    file = tmp_path / "trace.jsonl"
    file.write_text(json.dumps({"timestamp": 0, "input_length": 4, "output_length": 200}) + "\n")
    result = on_service(lambda target: target.test(f"--trace={file}", "--max-steps=20"))
    assert result.stopped == "--max-steps were sent"
    assert [len(samples) for samples in result.samples] == [20]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--prompt=300", "--profile=prefill"], "the model has 256 positions; lower --prompt or --context"),
        (["--drafts=4", "--profile=speculative"], "the model allows 3 guessed tokens in a step; lower --drafts"),
        (["--compressors=layers.9.hca"], "the worker has no compressor 'layers.9.hca'; it has layers.0.hca"),
        (["--trace=/no/such/file"], "file cannot be read"),
        (["--batch=30"], "cannot be prepared: pool_exhausted"),
    ],
)
def test_what_cannot_work_is_one_sentence(flags, sentence):
    async def use(target: Target) -> None:
        with pytest.raises(LoadtestError, match=sentence.replace("(", r"\(")):
            await target.test(*flags)

    on_service(use)


def test_the_files_of_a_run(tmp_path, monkeypatch):
    given = options.read(["http://worker:1", *SHORT, "--rate=60,120", "--token=secret-token", f"--out={tmp_path}"])

    async def use(target: Target) -> Result:
        result = await command.measure(given, tmp_path, transport=lambda: httpx.ASGITransport(target))
        assert not asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)
        return result

    result = on_service(use)
    names = {path.name for path in write_files(result, given, tmp_path)}
    assert names == {*(f"{name}.png" for name in TITLES), "report.html", "summary.json", "steps.jsonl"}
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert len(lines) == sum(map(len, result.samples))
    assert {line["point"] for line in lines} == {"60/s", "120/s"}
    assert all(line["latency_ms"] >= line["done_ms"] - line["sent_ms"] > 0 for line in lines)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["points"] == json.loads(json.dumps(result.points))
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 4
    for banned in ('src="http', 'href="http', "<script", "@import"):
        assert banned not in page
    assert "secret-token" not in page + json.dumps(summary) + "".join(map(str, lines))
    for name in TITLES:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_are_still_figures(tmp_path, monkeypatch, capsys):
    result = on_service(lambda target: target.test("--rate=20"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    names = {path.name for path in write_files(result, options.read(["http://worker:1"]), tmp_path)}
    assert names == {"steps.jsonl", "summary.json"}
    assert "pip install 'kvfold[load]'" in capsys.readouterr().out


@contextlib.contextmanager
def running(folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """`kvfold loadtest`, which has sent its first steps; it does not outlive the block."""
    command = [sys.executable, "-m", "kvfold_client.cli", "loadtest", "--batch=2", "--context=8", "--out=out", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder) as process:
        try:
            steps, deadline = folder / "out" / "steps.jsonl", time.monotonic() + 60
            while not (steps.exists() and steps.stat().st_size) and time.monotonic() < deadline:
                time.sleep(0.05)
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def two_workers(folder: Path) -> Iterator[list[Process]]:
    """Started at the same time: most of it is importing."""
    folders = [folder / "a", folder / "b"]
    for each in folders:
        each.mkdir()
    start = functools.partial(Process, backend="reference")
    with ThreadPoolExecutor() as threads, contextlib.ExitStack() as stack:
        starting = [threads.submit(start, each, "--max-requests=24") for each in folders]
        yield [stack.enter_context(process.result()) for process in starting]


def test_ctrl_c_stops_a_fleets_test_with_a_report_and_releases(tmp_path):
    with two_workers(tmp_path) as (a, b):
        (tmp_path / "peers").write_text(f"one {a.url} any\ntwo {b.url} any\n")
        with running(tmp_path, "--peers=peers", "--rate=60", "--seconds=60", "--output=16") as process:
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
        assert process.returncode == 130, err
        assert "stopped before its end: it was interrupted" in out
        assert "report.html" in out
        for url in (a.url, b.url):
            with Client(url) as client:
                assert client.stats()["requests"]["live"] == 0
        summary = json.loads((tmp_path / "out" / "summary.json").read_text())
        assert summary["points"][0]["outcomes"].keys() == {"ok"}
        lines = [json.loads(line) for line in (tmp_path / "out" / "steps.jsonl").read_text().splitlines()]
        assert {line["worker"] for line in lines} == {a.url, b.url}


def test_a_worker_that_is_not_there_is_one_sentence(tmp_path, capsys):
    assert command.run(["http://127.0.0.1:9", "--quiet", f"--out={tmp_path}"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvfold loadtest: the worker does not answer as one: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "give the URL"),
        (["http://a", "--peers=x"], "give the URL"),
        (["127.0.0.1:8787"], "is no URL"),
        (["http://a", "--rate=3", "--concurrency=4"], "exclude each other"),
        (["http://a", "--rate=3,0"], "must be above 0"),
        (["http://a", "--accept=1.5"], "between 0 and 1"),
        (["http://a", "--batch=0"], "1 or more"),
        (["http://a", "--token-file=/no/such/file"], "cannot be read"),
    ],
)
def test_options_that_cannot_be_meant(argv, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        options.read(argv)
    assert words in capsys.readouterr().err


def test_the_token_of_a_workers_own_token_file(tmp_path):
    file = tmp_path / "tokens"
    file.write_text("# token   tenant   roles\n\nsecret-token-of-16   team-a   step,admin\n")
    assert options.read(["http://a", f"--token-file={file}"]).token == "secret-token-of-16"
