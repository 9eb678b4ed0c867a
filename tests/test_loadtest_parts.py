"""loadtest's parts: traces, shapes, rows, the display, the tables and the plots."""

from __future__ import annotations

import io
import random
import sys
import time

import numpy as np
import pytest

from kvfold_client.loadtest import OK, UNFINISHED, Traffic, options, plots, progress, summarise
from kvfold_client.loadtest.fitting import UNTOLD, fitting_sessions
from kvfold_client.loadtest.points import Point
from kvfold_client.loadtest.record import StepFile
from kvfold_client.loadtest.report import table, text_report
from kvfold_client.loadtest.result import Result
from kvfold_client.loadtest.rows import Rows
from kvfold_client.loadtest.sessions import Life
from kvfold_client.loadtest.shape import shape_of
from tests.service_cases import SMALL


def test_as_many_guesses_are_rejected_as_chance_says():
    shape, chance = shape_of("speculative", 1, 0, 3, 0.5), random.Random(0)
    counts = np.bincount([shape.rejected(chance) for _ in range(8000)], minlength=4) / 8000
    # accepted k of 3: 0.5^k · 0.5, all three: 0.125
    assert counts == pytest.approx([0.125, 0.125, 0.25, 0.5], abs=0.02)
    assert shape_of("speculative", 1, 0, 3, 1.0).rejected(chance) == 0
    assert shape_of("speculative", 1, 0, 3, 0.0).rejected(chance) == 3


def test_rows_are_as_a_worker_wants_them():
    parts = [
        {"name": "a", "kind": "hca", "ratio": 8, "head_dim": 64, "input_dtype": "any"},
        {"name": "b", "kind": "csa", "ratio": 4, "head_dim": 64, "input_dtype": "fp32"},
        {"name": "c", "kind": "indexer", "ratio": 4, "head_dim": 128},
    ]
    manifest = {"compressors": parts}
    rows = Rows(manifest, None, "bf16", 10)
    first, second = rows.take(10), rows.take(10)
    assert {name: (array.shape, array.dtype.name) for name, array in first.items()} == {
        "a": ((10, 128), "uint16"),
        "b": ((10, 256), "float32"),
        "c": ((10, 512), "uint16"),
    }
    assert rows.row_bytes(10) == sum(array.nbytes for array in first.values())
    assert all(array.flags.c_contiguous for array in first.values())
    assert not np.array_equal(first["b"], second["b"])
    values = (first["c"].astype(np.uint32) << 16).view(np.float32)
    assert np.isfinite(values).all()
    assert np.std(values) == pytest.approx(1, abs=0.05)
    assert Rows(manifest, ["c"], "fp32", 1).take(1).keys() == {"c"}


def worker(max_requests: int, live: int, free: int) -> dict:
    pools = {"fp8_ds_mla.128x2": {"free": free}, "indexer_fp8.64x3": {"free": 1000}}
    return {"manifest": SMALL, "stats": {"requests": {"max": max_requests, "live": live}, "pools": pools}}


def test_as_many_sessions_as_there_is_room_for():
    # 24 tokens: 3 hca entries on 2 pages and 6 csa entries on 3, of one pool
    life = Life(num_requests=2, context_tokens=8, most_tokens=24, lease_seconds=1)
    assert fitting_sessions([worker(14, 4, 1000)], life, prompts=False) == 5
    assert fitting_sessions([worker(14, 4, 1000)], life, prompts=True) == 2
    assert fitting_sessions([worker(14, 4, 29)], life, prompts=False) == 2
    assert fitting_sessions([worker(14, 4, 29), worker(14, 4, 1000)], life, prompts=False) == 7
    assert fitting_sessions([worker(1000, 0, 1000)], life, prompts=False) == 16
    assert fitting_sessions([worker(4, 4, 0)], life, prompts=False) == 1
    assert fitting_sessions([{"manifest": SMALL}], life, prompts=False) == UNTOLD


def made_result() -> Result:
    """Two points of an open loop, the second one overloaded."""
    result = Result("loadtest-0", [])
    for rate, slow_ms in ((50.0, 5.0), (100.0, 400.0)):
        traffic = Traffic()
        chance = random.Random(1)
        for i in range(1200):
            sample = traffic.due(i / rate)
            sample.sent_s = sample.scheduled_s + slow_ms * 0.5e-3
            sample.done_s = sample.sent_s + slow_ms * 1e-3 * chance.lognormvariate(0, 0.5)
            sample.outcome = OK if i % 97 or rate < 60 else ("queue_full" if i % 2 else UNFINISHED)
            sample.num_tokens, sample.timings_us = 8, {"recv": 300.0, "queue": 200.0, "kernel": 900.0}
        summary = {"name": f"{rate:g}/s", "rate": rate, "concurrency": None, "sender_busy": 0.9, "sender_late_ms": {}}
        result.points.append(summary | summarise(traffic.samples, 2.0, 1200 / rate, 50.0))
        result.samples.append(traffic.samples)
    return result


def test_the_report_says_what_to_make_of_it():
    text = text_report(made_result(), options.read(["http://worker:1"]))
    assert "unfinished steps count with the time they had waited: 100/s" in text
    assert "the sender itself was busy at 50/s, 100/s" in text
    assert "queue_full 5, unfinished 5" in text
    assert "in parentheses" in text, "995 answers are too few for a p99.9"


def test_a_table_lines_up():
    lines = table(("name", "n"), [("a", "1"), ("longer", "1234")]).splitlines()
    assert lines == ["  name       n", "  ────────────", "  a          1", "  longer  1234"]


def test_the_plots_have_what_was_measured():
    result = made_result()
    figures = plots.draw(result, 50.0)
    assert list(figures) == ["latency_over_time", "latency_by_rate", "latency_by_percentile", "where_the_time_goes"]
    (over_time,) = figures["latency_over_time"].axes
    drawn = {part.get_label(): len(part.get_offsets()) for part in over_time.collections}
    assert sum(drawn.values()) == 2400
    assert {label.partition(" (")[0] for label in drawn} == {"in time", "too late", "refused", "unfinished"}
    left, right = figures["latency_by_rate"].axes
    for name in ("p50", "p99.9"):
        (line,) = (line for line in left.lines if line.get_label() == name)
        assert line.get_xydata().tolist() == [[p["rate"], p["latency_ms"][name]] for p in result.points]
    (goodput,) = (line for line in right.lines if line.get_label() == "within 50 ms")
    assert goodput.get_ydata().tolist() == [p["goodput_per_s"] for p in result.points]
    bars = figures["where_the_time_goes"].axes[0].containers
    widths = np.array([[bar.get_width() for bar in container] for container in bars])
    assert widths.sum(0) == pytest.approx(
        [p["phases_us"] and sum(p["phases_us"].values()) / 1e3 for p in result.points]
    )
    assert plots.draw(Result("loadtest-0", []), 50.0) == {}


def run_display(tmp_path, flags=()):
    point, traffic = Point(0.0, 1.0, rate=10.0), Traffic()
    with (
        StepFile(tmp_path) as steps,
        progress.display(options.read(["http://worker:1", *flags]), steps) as watcher,
    ):
        watcher.note("preparing")
        watcher.began(point, traffic)
        for outcome in (OK, OK, "queue_full"):
            sample = traffic.due()
            sample.begin()
            sample.end(outcome)
            watcher.step(point, sample)
        time.sleep(0.1)  # the display draws itself
        summary = {"name": point.name, "rate": 10.0, "concurrency": None}
        watcher.ended(point, summary | summarise(traffic.samples, 0.0, 1.0, 50.0))
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 3


def test_without_a_terminal_the_display_is_lines(tmp_path, capsys):
    run_display(tmp_path)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].split()[:3] == ["point", "due/s", "done/s"]
    assert lines[1] == "preparing"
    assert lines[2].split()[:3] == ["10/s", "3.0", "2.0"]
    assert lines[2].endswith("queue_full 1")
    run_display(tmp_path, ["--quiet"])
    assert capsys.readouterr().err == ""


def test_on_a_terminal_there_is_a_bar(tmp_path, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "_REFRESH_SECONDS", 0.01)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    before = sys.getswitchinterval()
    run_display(tmp_path)
    shown = terminal.getvalue()
    assert "━" in shown
    assert "2 done, 1 not, 0 on their way" in shown
    assert "queue_full 1" in shown
    assert sys.getswitchinterval() == before
