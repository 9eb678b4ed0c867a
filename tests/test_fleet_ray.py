"""The Ray plane: actors that run workers, found by name, started again after a death; and its parts without Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest

from kvfold_service.control import command
from kvfold_service.control.directory import FORGET_S, Directory
from kvfold_service.control.keeper import Keeper, WorkerNotReadyError
from kvfold_service.control.ray import Slot
from tests.ray_fleet import SLOTS, alive

ROOT = Path(__file__).parents[1]
TOKEN = "0123456789abcdef" * 2


# -- a cluster -----------------------------------------------------------------------------------------------------


def run(folder: Path, token: str) -> subprocess.CompletedProcess[str]:
    """The story in a process of its own; whatever it started is gone when this returns."""
    command = [sys.executable, "-m", "tests.ray_fleet", str(folder)]
    given = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, "RAY_USAGE_STATS_ENABLED": "0"}
    return subprocess.run(command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=240)


def test_three_workers_on_ray(tmp_path_factory):
    """Hand-over, kill −9 of a worker and of its actor, on a cluster that asks for a token."""
    folder = tmp_path_factory.mktemp("r")  # sockets below it have long names
    done = run(folder, TOKEN)
    assert done.returncode == 0, done.stderr[-4000:]
    told = json.loads(done.stdout.splitlines()[-1])
    print(told)
    assert told["found"] == {slot.name: [True, slot.role] for slot in SLOTS}
    assert told["free_slots"] == 0  # each actor took its share
    assert told["started_again"] == 2
    assert told["orphan"] is False  # a worker ends with its actor
    assert told["object_store_bytes"] < 100_000  # no tensor: 90 tokens of one request have 300,000 bytes of rows
    assert told["codes"] == {"d": 0, "e": 0, "p": 0}
    _no_place(told["no_place"])
    assert told["left"] == []
    assert not any(alive(pid) for pid in told["pids"])


def _no_place(told: dict) -> None:
    """What is said of a worker that finds no slot: by start, at its end and at Ctrl-C, by list and by stop."""
    waits = "worker x waits for a place: it asks for 1 slot (0 of 3 free)"
    assert told["end"] == f"after 1 s {waits}"
    assert told["names"] == ["d", "e", "p"]
    assert told["taken"] == "there is a worker d in this fleet already"
    assert told["ctrl_c"] == [
        130,
        [f"kvfold fleet: {waits}", "kvfold fleet: interrupted; no worker of this call is left"],
    ]
    assert told["ctrl_c_s"] < 30
    assert told["fails"] == "worker x did not start: kvfold serve ended with status 2 before it was ready; see its log"
    assert told["listed"]["x"] == "waiting: its actor has no place yet, or does not answer"
    assert told["listed"]["d"].startswith("http://127.0.0.1:")
    assert told["unknown"] == "there is no worker nobody in this fleet"
    assert told["stopped"] == {"x": None}
    assert told["stopped_s"] < 10


# -- the directory -------------------------------------------------------------------------------------------------


def test_the_directory_forgets_who_is_not_reported():
    now = [0.0]
    directory = Directory(lambda: now[0])
    assert directory.report("b", "http://b:1", "decode") == {"b": ("http://b:1", "decode")}
    now[0] = FORGET_S - 1
    assert list(directory.report("a", "http://a:1", "prefill")) == ["a", "b"]
    now[0] = FORGET_S + 1
    assert directory.table() == {"a": ("http://a:1", "prefill")}
    directory.report("a", "http://a:2", "prefill")
    assert directory.table()["a"][0] == "http://a:2"
    directory.leave("a")
    directory.leave("nobody")
    assert directory.table() == {}


# -- the keeper ----------------------------------------------------------------------------------------------------

FAKE = """
import os, signal, sys, time
parent, mode = sys.argv[1:3]
lives = len(open(mode).read()) if os.path.exists(mode) else 0
open(mode, "a").write("x")
if "never" in mode: sys.exit(2)
if "once" in mode and lives == 1: sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(f"ready http://127.0.0.1:{1000 + lives} backend=none compat=none", flush=True)
if "brief" in mode and lives == 0: sys.exit(4)
time.sleep(60)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Path:
    """A module that looks like a worker to a keeper."""
    (tmp_path / "fake_worker.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("kvfold_service.control.keeper._FIRST_PAUSE_S", 0.05)
    return tmp_path


class Kept:
    """A keeper and the addresses that it told of."""

    def __init__(self, file: Path) -> None:
        self.urls: list[str | None] = []
        self._changed = threading.Condition()
        self.keeper = Keeper([str(file)], self._note, module="fake_worker")

    def _note(self) -> None:
        with self._changed:
            self.urls.append(self.keeper.url)
            self._changed.notify_all()

    def until(self, *urls: str | None) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.urls == list(urls), 20), self.urls


def test_a_worker_that_ends_is_started_again(fake):
    kept = Kept(fake / "lives")
    kept.keeper.start()
    kept.until("http://127.0.0.1:1000")
    kept.keeper.process.kill()
    kept.until("http://127.0.0.1:1000", None, "http://127.0.0.1:1001")
    assert kept.keeper.stop(10) == 7
    assert kept.keeper.url is None
    assert kept.keeper.starts == 2


def test_a_worker_that_cannot_start(fake):
    with pytest.raises(WorkerNotReadyError, match="status 2"):
        Kept(fake / "never").keeper.start()


def test_a_worker_that_once_does_not_come_up_again(fake):
    """Later failures are waited out, longer each time."""
    kept = Kept(fake / "once")
    kept.keeper.start()
    began = time.monotonic()
    kept.keeper.process.kill()
    kept.until("http://127.0.0.1:1000", None, None, "http://127.0.0.1:1002")
    assert time.monotonic() - began > 0.05 + 0.1
    assert kept.keeper.starts == 3
    kept.keeper.stop(10)


def test_a_worker_ends_with_whoever_started_it(tmp_path):
    """The kernel sees to it, whatever kills the parent."""
    code = """
import os, sys, time
from kvfold_service.control import tied
sys.argv = ["tied", sys.argv[1]]
tied.serve.run = lambda argv: print(os.getpid(), flush=True) or time.sleep(60)
tied.main()
"""
    (tmp_path / "child.py").write_text(code)
    parent = f"""
import os, subprocess, sys, time
subprocess.Popen([sys.executable, {str(tmp_path / "child.py")!r}, str(os.getpid())])
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        pid = int(process.stdout.readline())
        assert alive(pid)
        process.kill()
    end = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < end
        time.sleep(0.01)
    orphan = subprocess.run([sys.executable, "-m", "kvfold_service.control.tied", "1"], timeout=60)
    assert orphan.returncode == 1  # its parent is not who it says


# -- kvfold fleet --------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(monkeypatch) -> list[tuple]:
    """Calls that the command makes."""
    made: list[tuple] = []
    monkeypatch.setattr("ray.init", lambda address, **options: made.append(("init", address, options["namespace"])))
    for name in ("start_workers", "stop_workers"):
        record = partial(lambda name, *args, **options: made.append((name, *args, options)), name)
        monkeypatch.setattr(f"kvfold_service.control.ray.{name}", record)
    monkeypatch.setattr("kvfold_service.control.ray.describe_workers", lambda namespace: {"d0": "http://h:1"})
    return made


def test_the_command(cluster, capsys):
    serve = ["--manifest", "tiny"]
    words = ["start", "--worker", "p0=prefill", "--worker", "d0", "--gpus", "1", "--resource", "slot=2"]
    words += ["--namespace", "n", "--host", "127.0.0.1", "--"]
    assert command.run([*words, *serve]) == 0
    slots = [Slot("p0", "prefill", 1, 1, {"slot": 2}), Slot("d0", "any", 1, 1, {"slot": 2})]
    assert cluster == [
        ("init", "auto", "n"),
        (
            "start_workers",
            slots,
            serve,
            {"namespace": "n", "host": "127.0.0.1", "wait_seconds": 300, "say": command._say},
        ),
    ]
    assert capsys.readouterr().out == "d0 http://h:1\n"
    cluster.clear()
    assert command.run(["stop", "--worker", "d0", "--address", "10.0.0.1:6379"]) == 0
    assert command.run(["stop"]) == 0
    assert command.run(["list"]) == 0
    assert cluster == [
        ("init", "10.0.0.1:6379", "kvfold"),
        ("stop_workers", ["d0"], "kvfold", {}),
        ("init", "auto", "kvfold"),
        ("stop_workers", None, "kvfold", {}),
        ("init", "auto", "kvfold"),
    ]


@pytest.mark.parametrize("words", ["start --worker a", "start -- --manifest tiny", "list -- --manifest tiny"])
def test_a_command_that_lacks_something(cluster, capsys, words):
    assert command.run(words.split()) == 2
    assert "start wants --worker" in capsys.readouterr().err
    assert cluster == []


@pytest.mark.parametrize("seconds", ["0", "nan", "inf", "soon"])
def test_a_time_that_is_none(capsys, seconds):
    with pytest.raises(SystemExit, match="2"):
        command.run(["start", "--worker", "a", "--wait-seconds", seconds, "--", "--manifest", "tiny"])
    assert "--wait-seconds" in capsys.readouterr().err


def test_no_cluster_is_one_sentence(monkeypatch, capsys):
    def fail(*args, **options):
        raise ConnectionError("Could not find any running Ray instance.\nPlease specify one.")

    monkeypatch.setattr("ray.init", fail)
    assert command.run(["list"]) == 1
    assert capsys.readouterr().err == (
        "kvfold fleet: no Ray cluster at auto: give --address, or `ray start --head` "
        "(Could not find any running Ray instance.)\n"
    )
