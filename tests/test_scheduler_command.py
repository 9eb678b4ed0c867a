"""`kvfold simulate`: on paper, over a worker process, over a fleet; what it refuses; how it shows that it goes on."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvfold_client.scheduler import command, extra, progress, runs
from kvfold_client.scheduler.lane import Tally
from kvfold_client.scheduler.trace import read_trace
from tests.fleet_cases import Town, towns
from tests.service_cases import SMALL, Process

town = pytest.fixture(towns)
SHORT = ["--requests", "6", "--input", "60", "--output", "8", "--longest", "200", "--rate", "50", "--budget", "64"]
CASES = Path(__file__).parents[1]


def result(path: Path, *argv: str) -> dict[str, Any]:
    assert command.run([*argv, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_on_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same again from the trace that it wrote."""
    written = tmp_path / "trace.jsonl"
    first = result(tmp_path / "1.json", *SHORT, "--manifest", "tiny", "--write-trace", str(written), "--drafts", "2")
    printed = capsys.readouterr().out
    assert "6 requests" in printed
    assert "hand-overs" in printed
    assert "ttft p50 ms" in printed
    assert len(read_trace(written)) == 6
    again = result(
        tmp_path / "2.json", "--trace", str(written), "--budget", "64", "--manifest", "tiny", "--drafts", "2"
    )
    assert again == first
    summary = first["runs"]["as given"]
    assert summary["hand_overs"]["requests"] == sum(arrival.output_length > 1 for arrival in read_trace(written))
    assert summary["launches"] == summary["measured"]["call_us_a_step"] == 0
    assert first["clock"] == "virtual"


def test_what_is_left_out_costs_time(tmp_path: Path) -> None:
    told = result(tmp_path / "c.json", *SHORT, "--compare", "--manifest", "deepseek-v4-flash")["runs"]
    assert list(told) == [
        *("as given", "whole prompts", "without skip", "without split", "without hand-over"),
        *("eager", "eager, without skip"),
    ]

    def compress_us(name: str) -> float:
        return told[name]["model"]["compress_us_a_step"]

    assert (
        compress_us("as given")
        < compress_us("without skip")
        < compress_us("eager")
        < compress_us("eager, without skip")
    )
    assert compress_us("as given") <= compress_us("without split")
    assert told["as given"]["hand_overs"]["requests"] > 0 == told["without hand-over"]["hand_overs"]["requests"]
    eager = told["eager"]["per_token_ms"]["p50"], told["eager, without skip"]["per_token_ms"]["p50"]
    assert told["as given"]["per_token_ms"]["p50"] < eager[0] < eager[1]
    alone = result(tmp_path / "d.json", *SHORT, "--compare", "--decode-workers", "0", "--eager")["runs"]
    assert list(alone) == ["as given", "whole prompts", "without skip", "without split"]


def test_over_a_worker_process(tmp_path: Path) -> None:
    """As a user starts it, and every entry is the reference's."""
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-sixteen team step,pull\n")
    with Process(tmp_path, "--token-file", str(tokens)) as worker:
        argv = [sys.executable, "-m", "kvfold_client.cli", "simulate", "--url", worker.url, "--check", "random:1"]
        argv[4:4] = ["--token-file", str(tokens)]
        done = subprocess.run(
            [*argv, *SHORT, "--drafts", "3", "--clock", "real"], capture_output=True, text=True, timeout=120, cwd=CASES
        )
        assert done.returncode == 0, done.stderr
        assert "entries of 6 requests are the reference's" in done.stdout
        wrong = [*argv[4:-1], "random:2", *SHORT]
        assert command.run(wrong) == 2
        assert worker.end() == 0


def test_over_a_fleet(town: Town, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    town.add("p0", "prefill")
    town.add("d0", "decode")
    told = result(tmp_path / "f.json", "--peers", str(town.file), "--check", "random:1", *SHORT, "--keep-copies")
    assert told["workers"] == {"p0": "prefill", "d0": "decode"}
    assert told["runs"]["as given"]["checked"]["requests"] == 6
    assert "hand-overs" in capsys.readouterr().out


def test_a_seed_gives_the_same_over_several_workers(
    town: Town, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the byte, twice over one fleet, and what paper says of workers of these names."""
    (tmp_path / "small.json").write_text(json.dumps(SMALL))
    for name in ("prefill-0", "decode-0", "decode-1"):
        town.add(name, "prefill" if name[0] == "p" else "decode", max_requests=32)
    argv = ["--requests", "16", "--input", "40", "--output", "20", "--longest", "150", "--rate", "200"]
    printed = []
    for where in (["--peers", str(town.file)],) * 2 + (["--manifest", str(tmp_path / "small.json")],):
        assert command.run([*argv, *where, "--drafts", "2", "--budget", "64", "--decode-workers", "2"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] == printed[2]
    assert all(worker.worker.totals["steps"] > 10 for worker in town.workers.values())


def test_runs_of_one_seed_at_a_time(town: Town, capsys: pytest.CaptureFixture[str]) -> None:
    """They keep out of each other's requests."""
    town.add("p0", "prefill", max_requests=32)
    town.add("d0", "decode", max_requests=32)
    argv = ["--peers", str(town.file), "--check", "random:1", *SHORT]
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(command.run, (argv, argv))) == [0, 0]
    assert capsys.readouterr().out.count("entries of 6 requests are the reference's") == 2


REFUSED = [
    (["--url", "http://x:1", "--peers", "f"], "not both"),
    (["--clock", "real"], "paper has no real clock"),
    (["--drafts", "9"], "--drafts is 9, and the model's draft_slack 8"),
    (["--budget", "0"], "token budget of at least 1"),
    (["--trace", "nowhere.jsonl"], "cannot be read"),
    (["--requests", "0"], "--requests must be from 1 to 10000000, not 0"),
    (["--speed", "0"], "--speed must be from 0.001 to 1000000, not 0"),
    (["--link-gb-s", "0"], "--link-gb-s must be from 1e-06 to"),
    (["--step-us", "-1"], "--step-us must be from 0 to"),
    (["--token-us", "1e300"], "--token-us must be from 0 to 1000000000, not 1e+300"),
    (["--rate", "inf"], "--rate must be from 1e-06 to 1000000, not inf"),
    (["--rate", "nan"], "not nan"),
    (["--rate", "1e-6", "--requests", "1000"], "1000 requests at 1e-06 a second take longer than 1e+10 ms"),
    (["--input", "1e300"], "--input must be from 1 to 1000000000"),
    (["--longest", "0"], "--longest must be from 1 to"),
    (["--seed", "-1"], "--seed must be from 0 to 18446744073709551615, not -1"),
    (["--json", "/nowhere/result.json"], "--json /nowhere/result.json cannot be written: No such file"),
    (["--write-trace", "/nowhere/trace"], "trace trace cannot be written: No such file"),
    (["--manifest", "nothing"], "no preset 'nothing'"),
    (["--manifest", "tiny", "--input", "9000", "--requests", "3"], "give --longest 8192"),
    (["--prefill-workers", "0"], "must be 1 or more"),
    (["--check", "random:1"], "paper has no entry to check"),
    (["--url", "http://127.0.0.1:9"], "GET /v1/manifest"),
    (["--peers", "nowhere"], "nowhere"),
]


@pytest.mark.parametrize(("argv", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_what_is_refused(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(argv) == 2
    printed = capsys.readouterr()
    assert words in printed.err
    assert printed.err.startswith("kvfold simulate: ")
    assert printed.err.count("\n") == 1


def test_a_result_that_cannot_be_kept_is_told_before_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a run that fails leaves nothing in its place, but what was there before."""
    monkeypatch.setattr(runs.Scene, "run", lambda self: pytest.fail("it ran"))
    assert command.run([*SHORT, "--json", str(tmp_path)]) == 2
    kept, new = tmp_path / "kept", tmp_path / "new"
    kept.write_text("what was there")
    for path in (kept, new):
        assert command.run([*SHORT, "--manifest", "nothing", "--json", str(path)]) == 2
    assert kept.read_text() == "what was there"
    assert not new.exists()


def test_a_fleet_of_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "peers").write_text("w0 http://127.0.0.1:9 any\n")
    assert command.run(["--peers", str(tmp_path / "peers")]) == 2
    assert "no worker of peers takes steps" in capsys.readouterr().err


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(extra, "entry_points", lambda **wanted: ())
    for argv in ([], ["--scale"]):
        assert command.run(argv) == 2
        assert "pip install 'kvfold[worker]'" in capsys.readouterr().err


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(self: runs.Scene) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs.Scene, "run", stop)
    assert command.run(SHORT) == 130
    assert "stopped" in capsys.readouterr().err


def test_nothing_heavy_is_imported() -> None:
    code = "import sys, kvfold_client.scheduler.command; print({'torch', 'pydantic', 'numba'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "set()\n", done.stderr


# -- progress ------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(steps: int = 3) -> None:
    with progress.shown("a run", 7) as update:
        for i in range(steps):
            update(i, Tally(steps=10 * i, rows=99, refusals={"queue_full": 2}), 5e6)  # type: ignore[arg-type]


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    show()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    show()
    assert capsys.readouterr().err.splitlines()[2] == "a run: 2 of 7 requests, 20 steps, 99 rows, 5.0 s, 2 refused"


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    show()
    assert "a run" in terminal.getvalue()
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(sys, "stderr", plain := Terminal())
    show()
    assert plain.getvalue().startswith("a run: 0 of 7 requests")
