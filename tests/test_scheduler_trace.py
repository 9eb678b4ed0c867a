"""scheduler.trace: Mooncake's lines in and out, what is refused, and traces made from a seed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kvfold_client.scheduler.trace import Arrival, TraceError, fit, read_trace, shared_tokens, synthetic, write_trace

MOONCAKE = """\
{"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2353]}

{"timestamp": 0, "input_length": 512, "output_length": 1, "hash_ids": [46]}
"""


def test_mooncakes_lines_in_the_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    assert read_trace(path) == (Arrival(0, 512, 1, (46,)), Arrival(27482, 1100, 52, (46, 47, 2353)))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    trace = synthetic(50, seed=3)
    write_trace(tmp_path / "t.jsonl", trace)
    assert read_trace(tmp_path / "t.jsonl") == trace


GOOD = {"timestamp": 1, "input_length": 600, "output_length": 2, "hash_ids": [1, 2]}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "must be an object"),
        (json.dumps(GOOD | {"timestamp": None}), "timestamp must be a number"),
        ("[" * 100_000, "nested too deep"),
        (json.dumps(GOOD | {"timestamp": -1}), "from 0 to 1e+10 ms"),
        (json.dumps(GOOD | {"timestamp": 1e300}), "from 0 to 1e+10 ms"),
        (json.dumps(GOOD | {"timestamp": 10**400}), "from 0 to 1e+10 ms"),
        (json.dumps(GOOD | {"timestamp": float("inf")}), "from 0 to 1e+10 ms"),
        (json.dumps(GOOD | {"timestamp": "x" * 1000}), "must be a number, not 'xxxx"),
        (json.dumps(GOOD | {"input_length": 10**4000}), "whole numbers from 1 to"),
        (json.dumps(GOOD | {"timestamp": True}), "timestamp must be a number, not True"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "must be a number, not nan"),
        (json.dumps(GOOD | {"input_length": 0}), "whole numbers from 1 to 1000000000"),
        (json.dumps(GOOD | {"output_length": 1.5}), "whole numbers from 1 to 1000000000"),
        (json.dumps(GOOD | {"hash_ids": [1]}), "600 tokens have 2 hash_ids, not 1"),
        (json.dumps(GOOD | {"hash_ids": "12"}), "list of whole numbers"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + line + "\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert words in str(caught.value)
    assert "trace.jsonl, line 2" in str(caught.value)
    assert len(str(caught.value)) < 150


def test_no_request_and_no_file(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(TraceError, match="has no request"):
        read_trace(tmp_path / "empty")
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "none")


def test_a_seed_is_a_trace() -> None:
    assert synthetic(20, 1) == synthetic(20, 1)
    assert synthetic(20, 1) != synthetic(20, 2)
    trace = synthetic(4000, 5, rate=8, mean_input=300, mean_output=40)
    assert trace[0].timestamp == 0
    gaps = np.diff([arrival.timestamp for arrival in trace])
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(125, rel=0.1)
    assert gaps.std() == pytest.approx(125, rel=0.1)
    assert np.mean([arrival.input_length for arrival in trace]) == pytest.approx(300, rel=0.1)
    assert np.mean([arrival.output_length for arrival in trace]) == pytest.approx(40, rel=0.1)
    assert all(len(arrival.hash_ids) == -(-arrival.input_length // 512) for arrival in trace)


@pytest.mark.parametrize("wrong", [{"num_requests": 0}, {"rate": 0}, {"mean_input": 0.5}, {"spread": -1}])
def test_a_trace_of_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(TraceError, match="at least one request"):
        synthetic(**({"num_requests": 5, "seed": 1} | wrong))


def test_what_does_not_fit() -> None:
    trace = (Arrival(0, 1000, 25, (1, 2)),)
    assert fit(trace, 1024) == trace
    with pytest.raises(TraceError, match=r"request 0 of the trace has 1024 tokens, and 1023 fit: give --longest 1023"):
        fit(trace, 1023)
    (cut,) = fit(trace, 1023, longest=100)
    assert (cut.input_length, cut.output_length, cut.num_rows, cut.hash_ids) == (76, 25, 100, (1,))
    (cut,) = fit(trace, 8, longest=1023)
    assert (cut.input_length, cut.output_length, cut.num_rows) == (1, 8, 8)


def test_tokens_of_blocks_seen_before() -> None:
    trace = [
        Arrival(0, 1000, 1, (1, 2)),
        Arrival(1, 600, 1, (1, 3)),
        Arrival(2, 700, 1, (1, 3)),
        Arrival(3, 5, 1, (9,)),
    ]
    assert shared_tokens(trace) == 512 + 700
