"""scheduler.rows: the same row for a position in any chunk, other rows for everything else; what a manifest says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold_client.scheduler.rows import RowSource, Shape, draft_slack_of, shapes_of
from kvfold_kernels.geometry import DRAFT_SLACK, Geometry
from kvfold_service import manifest as manifests

SHAPES = (
    Shape("wide", "csa", 4, 2048, "bf16"),
    Shape("odd", "hca", 128, 6, "bf16"),
    Shape("f", "indexer", 4, 64, "fp32"),
)
SOURCE = RowSource(7, SHAPES)
NUM_TOKENS = 300
WHOLE = {shape.name: SOURCE.rows(3, shape.name, 0, NUM_TOKENS) for shape in SHAPES}


@given(st.sampled_from(SHAPES), st.integers(0, NUM_TOKENS - 1), st.integers(1, NUM_TOKENS))
def test_a_position_has_the_same_row_in_any_chunk(shape: Shape, start: int, length: int) -> None:
    stop = min(start + length, NUM_TOKENS)
    np.testing.assert_array_equal(SOURCE.rows(3, shape.name, start, stop), WHOLE[shape.name][start:stop])


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
def test_rows_are_what_a_step_may_hold_and_none_is_another(shape: Shape) -> None:
    rows = WHOLE[shape.name]
    assert rows.shape == (NUM_TOKENS, shape.row_width)
    assert rows.dtype == (np.uint16 if shape.dtype == "bf16" else np.float32)
    assert rows.nbytes == NUM_TOKENS * shape.row_bytes
    values = (rows.astype(np.uint32) << 16).view(np.float32) if shape.dtype == "bf16" else rows
    assert np.abs(values).min() >= 0.5
    assert np.abs(values).max() < 2
    assert 0.45 < (values < 0).mean() < 0.55
    others = [
        SOURCE.rows(4, shape.name, 0, NUM_TOKENS),
        SOURCE.rows(3, shape.name, 0, NUM_TOKENS, guessed=True),
        RowSource(8, SHAPES).rows(3, shape.name, 0, NUM_TOKENS),
    ]
    together = np.concatenate([rows, *others])
    assert len(np.unique(together, axis=0)) == len(together)


def test_no_rows() -> None:
    assert SOURCE.rows(3, "wide", 5, 5).shape == (0, 2048)


def test_guesses_have_a_draw_for_each_position() -> None:
    """The first wrong one ends them, wherever a step begins."""
    right = [SOURCE.accepted(1, position, 1, 0.6) for position in range(400)]
    assert 0.5 < np.mean(right) < 0.7
    for position in range(300):
        run = right[position : position + 8]
        assert SOURCE.accepted(1, position, 8, 0.6) == (run.index(0) if 0 in run else 8)
    assert SOURCE.accepted(1, 0, 8, 1.0) == 8
    assert SOURCE.accepted(1, 0, 8, 0.0) == 0
    assert SOURCE.accepted(1, 0, 0, 1.0) == 0


@pytest.mark.parametrize("preset", manifests.PRESETS)
def test_shapes_are_the_geometrys(preset: str) -> None:
    manifest = manifests.load(preset)
    shapes = {shape.name: shape for shape in shapes_of(manifest.to_json())}
    assert list(shapes) == [part.name for part in manifest.compressors]
    assert draft_slack_of(manifest.to_json()) == DRAFT_SLACK
    for part in manifest.compressors:
        geometry, shape = part.geometry(0), shapes[part.name]
        assert (shape.kind, shape.ratio, shape.row_width) == (geometry.kind, geometry.ratio, geometry.row_width)
    assert sum(len(group.names) for group in RowSource(0, list(shapes.values())).groups) == len(shapes)


def test_the_dtype_is_what_the_manifest_takes() -> None:
    part = {"name": "x", "kind": "hca", "ratio": 8, "head_dim": 64}
    for given_dtype, dtype in (("fp32", "fp32"), ("bf16", "bf16"), ("any", "bf16"), (None, "bf16")):
        extra = {} if given_dtype is None else {"input_dtype": given_dtype}
        (shape,) = shapes_of({"compressors": [part | extra]})
        assert (shape.dtype, shape.row_bytes) == (dtype, 128 * (4 if dtype == "fp32" else 2))
    assert draft_slack_of({"draft_slack": 0}) == 0


@given(st.sampled_from(["hca", "csa", "indexer"]), st.integers(1, 200), st.integers(0, 3000))
def test_open_rows_are_those_that_windows_still_need(kind: str, ratio: int, num_tokens: int) -> None:
    geometry = Geometry(kind, ratio, 64)
    assert Shape("x", kind, ratio, 64, "bf16").num_open(num_tokens) == num_tokens - geometry.live_start(num_tokens)
