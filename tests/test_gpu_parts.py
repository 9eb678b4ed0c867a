"""tests/gpu as one command: what runs is there and takes the options it is given, and what fails is told."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.bench.bench_gpu import cases
from tests.gpu import bound
from tests.gpu.__main__ import ROOT, Part, main, parts, run_all


@pytest.mark.parametrize("part", parts(Path("peers")), ids=lambda part: part.name)
def test_a_part_is_there_and_has_these_options(part):
    words = part.command.split()
    if words[:2] == ["-m", "pytest"]:
        assert (ROOT / words[-1]).is_file()
        return
    path = ROOT / (words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0])
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    known = {ast.literal_eval(call.args[0]) for call in calls if getattr(call.func, "attr", "") == "add_argument"}
    assert {word for word in words if word.startswith("--")} <= known


def test_what_fails_hangs_or_is_fine_is_told_and_kept(tmp_path, capsys):
    (tmp_path / "hang.py").write_text("import time; time.sleep(60)")
    (tmp_path / "bad.py").write_text("print('this is why'); raise SystemExit(3)")
    (tmp_path / "good.py").write_text("import sys; open(sys.argv[1] + '/raw.json', 'w').write('{}')")
    chosen = [
        Part(name, f"{tmp_path / name}.py {{out}}", limit) for name, limit in (("hang", 0.5), ("bad", 30), ("good", 30))
    ]
    assert run_all(chosen, tmp_path / "out") == 1
    told = re.findall(r"^(\w+) +[\d.]+ s  (.+)$", capsys.readouterr().out, re.MULTILINE)
    assert told == [("hang", "not over after 0.5 s"), ("bad", "exit code 3"), ("good", "ok")]
    assert (tmp_path / "out" / "bad.log").read_text() == "this is why\n"
    assert (tmp_path / "out" / "raw.json").exists()
    assert run_all(chosen[2:], tmp_path / "out") == 0


def test_a_part_that_is_none(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([f"--out={tmp_path}", "--only", "nothing"])
    assert "check_cute" in capsys.readouterr().err


def test_what_ncu_counts_is_read():
    """Its CSV has a line of names, one of units, then a launch a line; the watched program's own lines stand before."""
    names = ["ID", "Kernel Name", *bound.METRICS.values(), *map(bound.stall_metric, bound.STALLS)]
    line = ["0", "kernel_cutlass_kernel"] + ["1,234.5"] * len(bound.METRICS) + ["0.01"] * len(bound.STALLS)
    line[names.index(bound.stall_metric("long_scoreboard"))] = "7.125"
    line[names.index(bound.stall_metric("barrier"))] = "0.4"
    rows = [names, [""] * len(names), line, line]
    report = "==PROF== Connected\n" + "\n".join(",".join(f'"{value}"' for value in row) for row in rows) + "\n"
    first, second = bound.launches(report)
    assert first == second
    assert (first["us"], first["dram_percent"]) == (1.2345, 1234.5)
    assert list(first["stalls"].items()) == [("long_scoreboard", 7.12), ("barrier", 0.4)]


def test_rows_that_are_profiled_are_rows():
    assert {name for name, _ in bound.ROWS} <= {case[0] for case in cases()}
