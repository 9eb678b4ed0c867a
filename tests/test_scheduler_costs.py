"""scheduler.costs and launches: what a step takes by the model, and that its launch times are the measured ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvfold_client.scheduler.costs import Costs, Step
from kvfold_client.scheduler.launches import MEASURED, Curve, LaunchModel
from kvfold_client.scheduler.request import Chunk, Request
from kvfold_client.scheduler.rows import Shape, groups_of
from kvfold_client.scheduler.trace import Arrival
from kvfold_client.scheduler.workers import Handed

RAW = Path(__file__).parent / "gpu/results"
REQUEST = Request(0, "r0", Arrival(0, 100, 10), 0.0)
GROUPS = groups_of(
    [Shape("a", "hca", 128, 1024, "bf16"), Shape("b", "csa", 4, 2048, "bf16"), Shape("c", "csa", 4, 8, "bf16")]
)


def step(*lengths: tuple[int, int]) -> Step:
    return Step(tuple(Chunk(REQUEST, start, length) for start, length in lengths), GROUPS)


def test_windows_of_a_step() -> None:
    made = step((0, 130), (126, 1), (127, 1), (3, 0))
    assert made.num_rows == 132
    assert made.num_closed == (2, 33)
    assert made.num_windows == 2 + 2 * 33
    assert made.skipped == ()
    assert step((126, 1)).skipped == ("a", "b", "c")
    assert step((123, 1)).skipped == ("a",)
    assert step((0, 5)).row_bytes == 5 * 2 * (1024 + 2048 + 8)
    guessed = Step((Chunk(REQUEST, 126, 1, num_guesses=2),), GROUPS)
    assert guessed.num_closed == (1, 1)


def test_a_step_is_model_and_launches() -> None:
    costs = Costs(step_us=100, token_us=2, move_us=7, link_bytes_per_s=1e6)
    cost = costs.step(step((126, 1)))
    assert cost.model_us == 102
    assert cost.compress_us == pytest.approx(0.742 + 2 * 0.778)
    assert cost.us == cost.model_us + cost.compress_us
    assert costs.move(Handed("d", 20, 10, 0.5)) == 7 + 30


def test_left_in_or_left_out_one_pass_or_two() -> None:
    model, left_in, single = LaunchModel(), LaunchModel(skip=False), LaunchModel(split=False)
    assert left_in.launch_us("hca", 1, 0) == 1.672 > model.launch_us("hca", 1, 0) == 0.742
    assert left_in.launch_us("hca", 1, 1) == model.launch_us("hca", 1, 1)
    assert single.launch_us("hca", 1024, 8) == 13.309 > model.launch_us("hca", 1024, 8) == 3.807
    assert single.launch_us("hca", 128, 1) == model.launch_us("hca", 128, 1)
    assert single.launch_us("csa", 1024, 256) == model.launch_us("csa", 1024, 256)
    eager = LaunchModel(graphs=False)
    assert eager.launch_us("hca", 1, 0) == 4.688
    assert LaunchModel(graphs=False, skip=False).launch_us("hca", 1, 0) == 33.248
    assert eager.launch_us("csa", 65536, 16384) == model.launch_us("csa", 65536, 16384)


def test_a_curve_between_and_beyond() -> None:
    curve = Curve((1, 3, 5), (10, 20, 40))
    assert [curve(x) for x in (0, 1, 2, 4, 5, 7)] == [10, 10, 15, 30, 40, 60]
    assert Curve((1, 2), (3, 2))(9) == 2


def test_every_launch_time_is_in_the_raw_results() -> None:
    triton = json.loads((RAW / "triton_all.json").read_text())
    cute = json.loads((RAW / "cute_csa.json").read_text())["rows"]
    rows = triton["rows"]

    def same(curve: Curve, at: list[float], values: list[float]) -> None:
        assert curve.at == tuple(at)
        assert curve.us == tuple(round(value, 3) for value in values)

    for kind, name in (("hca", "C128"), ("csa", "C4")):
        none = [rows[f"{name} decode {n} none"] for n in (1, 32, 256)]
        same(MEASURED[kind].appended, [1, 32, 256], [row["fp32"] for row in none])
        same(MEASURED[kind].idle, [1, 32, 256], [row["fp32_full_graph"] for row in none])
    hca = [*("decode 1 all", "prefill 1024", "decode 32 all", "prefill 8192", "decode 256 all", "prefill 65536")]
    hca = [rows[f"C128 {name}"] for name in hca]
    same(MEASURED["hca"].closed, [row["windows"] for row in hca], [row["fp32"] for row in hca])
    split = [triton["split"][n]["single_us"] for n in ("1024", "8192", "65536")]
    assert MEASURED["hca"].single is not None
    same(MEASURED["hca"].single, [8, 64, 512], split)
    csa = [*("decode 1 all", "decode 32 rand", "decode 32 all", "prefill 1024", "prefill 8192", "prefill 65536")]
    csa = [rows[f"C4 {name}"] for name in csa]
    same(MEASURED["csa"].closed, [row["windows"] for row in csa], [row["fp32"] for row in csa])
    none = [cute[f"layer decode {n} none"]["fp32_indexer"] for n in (1, 32, 256)]
    same(MEASURED["indexer"].appended, [1, 32, 256], none)
    windows = {
        "decode 1 all": 1,
        "decode 32 all": 32,
        "prefill 1024": 256,
        "prefill 8192": 2048,
        "prefill 65536": 16384,
    }
    closed = [cute[f"layer {name}"]["fp32_indexer"] for name in windows]
    same(MEASURED["indexer"].closed, list(windows.values()), closed)
    appended, idle, closed_us = MEASURED["hca"].eager_us
    assert appended == round(triton["skip"]["skipped"]["eager_us"], 3)
    assert idle == round(triton["skip"]["not_skipped"]["eager_us"], 3)
    assert closed_us == round(rows["C128 decode 1 all"]["eager"], 3)
    one = rows["C4 decode 1 none"]["eager"], rows["C4 decode 1 all"]["eager"]
    assert MEASURED["csa"].eager_us == (round(one[0], 3), round(one[1], 3), round(one[1], 3))
