"""bench: wrong kernels are found before they are timed, figures are what was measured, noise is not news."""

from __future__ import annotations

import json
import random
import re
import statistics
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from kvfold_kernels import backends
from kvfold_kernels import plan as p
from kvfold_kernels.backends import Backend
from kvfold_kernels.bench import command, copying, measured
from kvfold_kernels.bench import plans as plan_bench
from kvfold_kernels.bench import result as results
from kvfold_kernels.bench.cases import step_cases
from kvfold_kernels.bench.check import WrongResultError, check
from kvfold_kernels.bench.compare import comparison, differences
from kvfold_kernels.bench.problem import Problem
from kvfold_kernels.bench.result import BenchResult, Row, interval
from kvfold_kernels.bench.tables import markdown
from kvfold_kernels.bench.timing import in_turns
from tests.service_cases import changed

ROOT = Path(__file__).parents[1]
CASES = {case.name: case for kind in ("hca", "csa", "indexer") for case in step_cases(kind, (128, 1024), (1, 32))}


def problem(name: str, dtype: str = "bf16") -> Problem:
    torch.manual_seed(0)
    return Problem(CASES[name], dtype, "cpu")


@pytest.mark.parametrize("name", CASES)
def test_cases_are_what_their_names_say(name):
    case, made = CASES[name], problem(name)
    closed = made.plan.num_windows
    assert case.num_windows == closed
    ratio = made.geometry.ratio
    if "prefill" in name:
        assert closed == case.num_tokens // ratio
    elif name.endswith("none"):
        assert closed == 0
    elif name.endswith("all"):
        assert closed == len(case.starts) == case.num_tokens
    else:
        assert closed == sum((start + 1) % ratio == 0 for start in case.starts)
    slots = made.plan.windows[p.SLOT]
    assert len(set(slots.tolist())) == closed, "every entry has a place of its own"
    assert closed == 0 or slots.max() < len(made.pages) * made.compressor.layout.entries


def test_bytes_that_must_move():
    """One hca window from 128 bf16 rows of 1024 columns; and one that takes 127 rows from the ring and keeps one."""
    entry = 7 * 64 + 2 * 64 + 8
    assert problem("hca prefill 128").min_bytes == 128 * 1024 * 2 + entry + 0 * 1024 * 2
    decode = problem("hca decode 1 all")
    assert decode.min_bytes == (1 + 127 + decode.plan.num_appends) * 1024 * 2 + entry
    csa = problem("csa decode 1 all", "fp32")
    # 7 rows from the ring, of each of which half of the columns are read
    assert csa.min_bytes == (1 + 7 / 2 + csa.plan.num_appends) * 2048 * 4 + entry


@pytest.mark.parametrize("name", ["hca prefill 1024", "hca decode 32 all", "csa decode 32 rand", "indexer prefill 128"])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_good_backends_pass(name, backend):
    check(problem(name, "fp32"), backends.load(backend))


def spoilt(spoil) -> Backend:
    """The cpu backend, after which `spoil(windows, appends, rows, rings, pages, compressor)` is called."""

    def compress(real, *operands):
        launches = real(*operands)
        spoil(*operands)
        return launches

    return changed(backends.load("cpu"), compress)


def flip_an_entry(windows, appends, rows, rings, pages, compressor):
    page, place = divmod(int(windows[p.SLOT, -1]), compressor.layout.entries)
    pages[page, compressor.layout.value_slice(place)] ^= 1


def lose_a_row(windows, appends, rows, rings, pages, compressor):
    rings.view(-1, rings.shape[-1])[int(appends[p.APPEND_RING, 0])] += 1


@pytest.mark.parametrize(("spoil", "words"), [(flip_an_entry, "bytes of 8 entries differ"), (lose_a_row, "kept rows")])
def test_wrong_backends_are_found_before_they_are_timed(spoil, words, monkeypatch):
    monkeypatch.setattr(measured, "in_turns", lambda *_: pytest.fail("it was timed"))
    work = measured.Work([CASES["csa prefill 1024"]], ["bf16"], [spoilt(spoil)], {}, passes=1, rounds=1, plans=False)
    with pytest.raises(WrongResultError, match=words):
        measured.measure(work, lambda done, what: None)


def test_turns():
    order = []

    def sleeper(name, seconds):
        def run():
            order.append(name)
            time.sleep(seconds)

        return run

    times = in_turns({"a": sleeper("a", 0.004), "b": sleeper("b", 0.012)}, 3, "cpu")
    assert order[-6:] == ["a", "b"] * 3
    assert all(len(samples) == 3 for samples in times.values())
    assert 4000 <= statistics.median(times["a"]) < statistics.median(times["b"])
    quick = in_turns({"quick": lambda: None}, 5, "cpu")["quick"]
    assert all(0 < us < 100 for us in quick)


def test_plans_are_right_before_they_are_timed(monkeypatch):
    found = dict(plan_bench.time_plans(1))
    assert list(found) == [
        f"{kind}, {what}" for kind in ("hca", "csa") for what in ("one request of 65,536", "1,024 requests of 1")
    ]
    assert found["csa, 1,024 requests of 1"]["loop"][0] > 2 * found["csa, 1,024 requests of 1"]["plan"][0]
    monkeypatch.setattr(plan_bench, "by_request", lambda *_: [])
    with pytest.raises(AssertionError):
        dict(plan_bench.time_plans(1))


def test_the_copy_rate_counts_what_is_read_and_what_is_written(monkeypatch):
    took = iter([1.0, 0.25, 0.5])

    def seconds(copy, num_calls):
        assert not copy().any(), "zeros are copied over ones"
        return next(took)

    monkeypatch.setitem(copying._BYTES, "cpu", 1 << 20)
    monkeypatch.setattr(copying, "seconds", seconds)
    assert copying.copy_rate("cpu", rounds=3) == pytest.approx(2 * (1 << 20) / 0.5), "the median"


def test_intervals_hold_the_true_median():
    """Of 400 samples of a skewed distribution with a known median: in 95 % of all, within what chance allows."""
    chance = np.random.default_rng(0)
    for num in (9, 15, 45):
        draws = chance.lognormal(0, 0.7, (400, num))
        held = np.mean([low <= 1 <= high for low, high in map(interval, draws.tolist())])
        assert held > 0.92, num
    assert interval([3.0]) == (3.0, 3.0)


def made(scale: dict[str, float], *, seed: int, rate: float = 1e10) -> BenchResult:
    """Noise of 5 % around 100 µs for each case, times its scale."""
    chance = random.Random(seed)
    result = BenchResult(
        results.environment(), {"cpu": [rate]}, {"hca, one": {"plan": [20 + chance.random() for _ in range(15)]}}
    )
    for case, factor in scale.items():
        us = {name: [100 * factor * chance.lognormvariate(0, 0.05) for _ in range(15)] for name in ("cpu", "reference")}
        result.rows.append(Row(case, "bf16", 3, 1_000_000, us))
    return result


def test_noise_is_not_news_and_a_change_is():
    before = made({"a": 1.0, "b": 1.0, "c": 1.0}, seed=1)
    same, slower = made({"a": 1.0, "b": 1.0, "c": 1.0}, seed=2), made({"a": 1.3, "b": 1.0, "c": 0.7}, seed=3)
    assert {d.verdict for d in differences(before, same)} == {"same"}
    verdicts = {(d.case, d.what): d.verdict for d in differences(before, slower)}
    assert verdicts["a", "cpu bf16"] == verdicts["a", "reference bf16"] == "slower"
    assert verdicts["b", "cpu bf16"] == verdicts["hca, one", "plan"] == "same"
    assert verdicts["c", "cpu bf16"] == "faster"
    text, worse = comparison(before, slower)
    assert worse
    assert text.splitlines()[2].startswith("| a ")
    assert text.endswith("2 slower, 3 same, 2 faster\n")
    assert comparison(before, same)[1] is False


def test_a_machine_at_another_speed_is_not_a_change():
    before, after = made({"a": 1.0}, seed=1, rate=1e10), made({"a": 1.3}, seed=2, rate=0.75e10)
    assert {d.verdict for d in differences(before, after)} == {"same"}
    assert "ran at another speed: its copy rates differ by a factor of 1.33" in comparison(before, after)[0]


def test_tables():
    result = made({"hca prefill 128": 1.0}, seed=1)
    result.rows[0].us = {"reference": [4000.0, 5000.0, 4500.0], "cpu": [200.0, 190.0, 210.0]}
    result.left_out = {"triton": "backend triton needs a GPU"}
    text = markdown(result)
    (row,) = (line for line in text.splitlines() if line.startswith("| hca prefill 128"))
    # 1 MB at 10 GB/s: 100 µs
    cells = ["hca prefill 128", "bf16", "3", "977", "100", "200", "50", "4500", "2"]
    assert [cell.strip() for cell in row.strip("|").split("|")] == cells
    assert "`cpu`" in text.split("`reference`")[0], "in the order of the backends"
    assert "needs a GPU" in text
    assert "| hca, one" in text


def test_the_command(tmp_path, capsys):
    first, again, table = tmp_path / "a.json", tmp_path / "b.json", tmp_path / "table.md"
    given = ["--only=indexer decode 1 ", "--quick", "--kinds=indexer", "--backends=cpu", "--dtypes=bf16"]
    assert command.run([*given, f"--json={first}", f"--markdown={table}"]) == 0
    printed = capsys.readouterr().out
    assert table.read_text() == printed
    assert printed.count("| indexer decode 1 ") == 3
    kept = json.loads(first.read_text())
    assert kept["environment"]["versions"]["torch"] == torch.__version__
    assert [len(row["us"]["cpu"]) for row in kept["rows"]] == [3, 3, 3]
    assert command.run([f"--from={first}"]) == 0
    assert capsys.readouterr().out == printed
    kept["rows"][0]["us"]["cpu"] = [100.0, 101.0, 102.0]
    first.write_text(json.dumps(kept))
    assert command.run(["--compare", str(first), str(first)]) == 0
    kept["rows"][0]["us"]["cpu"] = [150.0, 151.0, 152.0]
    again.write_text(json.dumps(kept))
    assert command.run(["--compare", str(first), str(again)]) == 1
    assert "1 slower" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--backends=nothing"], "there is no backend 'nothing'"),
        (["--only=nothing"], "no case has 'nothing' in its name"),
        (["--from=/no/such/file"], "No such file"),
        (["--compare", __file__, __file__], "test_bench.py is not a result of kvfold bench"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(argv, sentence, capsys):
    assert command.run(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("kvfold bench: ")
    assert sentence in error
    assert error.count("\n") == 1


def test_all_backends_that_can_run_are_taken():
    chosen, left_out = measured.choose(None)
    assert {backend.name for backend in chosen} | set(left_out) == set(backends.NAMES)
    assert {"cpu", "reference"} <= {backend.name for backend in chosen}
    assert all("backend" in reason for reason in left_out.values())


def test_the_table_of_the_readme_is_the_kept_result():
    kept = markdown(results.load(ROOT / "tests/bench/results/kernels_cpu.json")).splitlines()
    readme = (ROOT / "README.md").read_text().splitlines()
    rows = [line for line in readme if re.match(r"\| \w+ (prefill|decode) ", line)]
    assert len(rows) == 12
    assert set(rows) <= set(kept)
