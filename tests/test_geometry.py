"""The byte facts: row widths, ring sizes, where entry i of a page lies, and what is refused."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest
import torch

from kvfold_kernels.geometry import CACHE_FORMATS, KINDS, Geometry, PageLayout, entry_format
from kvfold_kernels.pages import read_entries, write_entries
from tests.cases import make_compressor


def geometry_of(kind: str, **changes) -> Geometry:
    return Geometry(**{"kind": kind, "ratio": KINDS[kind].ratio, "head_dim": KINDS[kind].head_dim, **changes})


def layout_of(kind: str, cache_format: str, entries: int, page_bytes: int | None = None) -> PageLayout:
    return PageLayout.of(entry_format(cache_format, geometry_of(kind)), entries, page_bytes)


@pytest.mark.parametrize(
    ("kind", "window_rows", "row_width", "nope_dim", "ring_rows"),
    [("hca", 128, 1024, 448, 270), ("csa", 8, 2048, 448, 30), ("indexer", 8, 512, 64, 30)],
)
def test_rows_of_the_kinds(kind, window_rows, row_width, nope_dim, ring_rows):
    geometry = geometry_of(kind)
    assert (geometry.window_rows, geometry.row_width, geometry.nope_dim) == (window_rows, row_width, nope_dim)
    assert geometry.ring_rows == ring_rows == 2 * (window_rows - 1 + geometry.draft_slack)


@pytest.mark.parametrize(
    ("kind", "ratio", "window_rows", "page_entries"),
    [
        ("hca", 1, 1, 256),
        ("hca", 2, 2, 128),
        ("csa", 1, 2, 256),
        ("csa", 2, 4, 128),
        ("hca", 256, 256, 1),
        ("hca", 512, 512, 1),
    ],
)
def test_other_ratios(kind, ratio, window_rows, page_entries):
    geometry = geometry_of(kind, ratio=ratio, draft_slack=0)
    assert geometry.window_rows == window_rows
    assert geometry.default_page_entries == page_entries
    assert geometry.ring_rows == max(1, 2 * (window_rows - 1))
    # Rows that a window closing later can need, by looking at each window.
    for num_tokens in range(3 * ratio + 2):
        closing = next(q for q in range(num_tokens, num_tokens + ratio) if (q + 1) % ratio == 0)
        assert geometry.live_start(num_tokens) == max(0, closing - window_rows + 1)
        assert geometry.num_entries(num_tokens) == sum((q + 1) % ratio == 0 for q in range(num_tokens))


@pytest.mark.parametrize(
    ("kind", "cache_format", "entries", "page_bytes"),
    [
        ("csa", "fp8_ds_mla", 64, 37_440),
        ("hca", "fp8_ds_mla", 2, 1_728),
        ("hca", "fp8_ds_mla", 64, 37_440),
        ("hca", "fp8_ds_mla", 1, 1_152),
        ("csa", "fp8_ds_mla", 5, 3_456),
        ("csa", "fp8_ds_mla", 256, 149_760),
        ("indexer", "indexer_fp8", 64, 8_448),
        ("indexer", "indexer_mxfp4", 64, 4_352),
        ("indexer", "indexer_fp8", 1, 132),
        ("indexer", "bf16", 64, 16_384),
        ("csa", "bf16", 64, 65_536),
        ("csa", "fp8", 64, 32_768),
        ("hca", "fp32", 2, 4_096),
    ],
)
def test_page_bytes(kind, cache_format, entries, page_bytes):
    layout = layout_of(kind, cache_format, entries)
    assert layout.page_bytes == page_bytes
    if kind == "hca" and entries == 64:
        assert page_bytes / entries == 585


def test_a_default_page_is_always_a_legal_one():
    """Of any head_dim, format and number of entries: packed, then as few bytes as alignment wants."""
    for kind, formats in CACHE_FORMATS.items():
        for cache_format in formats:
            for head_dim in (64, 128, 256, 512, 1024):
                fmt = entry_format(cache_format, geometry_of(kind, head_dim=head_dim))
                for entries in (1, 2, 3, 5, 7, 64):
                    layout = PageLayout.of(fmt, entries)
                    assert PageLayout.of(fmt, entries, layout.page_bytes) == layout
                    spare = layout.page_bytes - entries * fmt.entry_bytes
                    assert 0 <= spare < max(fmt.page_multiple, fmt.alignment)


def test_default_page_entries():
    assert [geometry_of(kind).default_page_entries for kind in KINDS] == [2, 64, 64]


def value_and_scale_bytes(cache_format: str, head_dim: int) -> tuple[int, int]:
    return {
        "fp8_ds_mla": (448 + 128, 8),
        "bf16": (2 * head_dim, 0),
        "fp8": (head_dim, 0),
        "fp32": (4 * head_dim, 0),
        "indexer_fp8": (128, 4),
        "indexer_mxfp4": (64, 4),
    }[cache_format]


@pytest.mark.parametrize("entries", [1, 2, 5, 64, 256])
@pytest.mark.parametrize(("kind", "cache_format"), [(k, f) for k, formats in CACHE_FORMATS.items() for f in formats])
def test_where_an_entry_lies(kind, cache_format, entries):
    """Values of entry i at i · value_bytes of its page, scales behind all values; nothing else is written."""
    value_bytes, scale_bytes = value_and_scale_bytes(cache_format, KINDS[kind].head_dim)
    layout = layout_of(kind, cache_format, entries)
    assert layout.page_bytes >= entries * (value_bytes + scale_bytes)
    rng = np.random.default_rng(entries)
    rows = rng.integers(0, 255, (3, value_bytes + scale_bytes), dtype=np.uint8)  # never the guard byte
    slots = np.array([entries - 1, 3 * entries, 2 * entries + entries // 2])
    expected = np.full((4, layout.page_bytes), 0xFF, np.uint8)
    for slot, row in zip(slots, rows, strict=True):
        page, i = divmod(int(slot), entries)
        expected[page, i * value_bytes : (i + 1) * value_bytes] = row[:value_bytes]
        scale = entries * value_bytes + i * scale_bytes
        expected[page, scale : scale + scale_bytes] = row[value_bytes:]
        assert layout.value_slice(i) == slice(i * value_bytes, (i + 1) * value_bytes)
        assert layout.scale_slice(i) == slice(scale, scale + scale_bytes)

    pages = torch.full((4, layout.page_bytes), 0xFF, dtype=torch.uint8)
    torch_slots, torch_rows = torch.from_numpy(slots), torch.from_numpy(rows)
    write_entries(pages, torch_slots, layout, torch_rows[:, :value_bytes], torch_rows[:, value_bytes:])
    np.testing.assert_array_equal(pages.numpy(), expected)
    np.testing.assert_array_equal(read_entries(pages, torch_slots, layout).numpy(), rows)


def test_given_page_bytes():
    assert layout_of("indexer", "indexer_fp8", 64, 8_640).page_bytes == 8_640  # vLLM's own, rounded up to 576
    assert layout_of("csa", "fp8_ds_mla", 64, 37_376).page_bytes == 37_376  # 64 · 584, no rounding


@pytest.mark.parametrize(
    ("kind", "cache_format", "entries", "page_bytes", "message"),
    [
        ("csa", "fp8_ds_mla", 64, 37_360, "at least 37376"),
        ("csa", "fp8_ds_mla", 64, 37_377, "multiple of 16"),
        ("indexer", "indexer_fp8", 64, 8_450, "multiple of 4"),
        ("csa", "fp8_ds_mla", 0, None, "page_entries"),
        ("csa", "fp8_ds_mla", 65_537, None, "page_entries"),
        ("csa", "indexer_fp8", 64, None, "must be one of fp8_ds_mla, bf16, fp8, fp32, not 'indexer_fp8'"),
        ("indexer", "fp8_ds_mla", 64, None, "must be one of indexer_fp8, indexer_mxfp4, bf16, fp32"),
        ("hca", "nvfp4", 64, None, "must be one of"),
    ],
)
def test_refused_layouts(kind, cache_format, entries, page_bytes, message):
    with pytest.raises(ValueError, match=message):
        layout_of(kind, cache_format, entries, page_bytes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "mla"}, "kind must be one of hca, csa, indexer, not 'mla'"),
        ({"ratio": 0}, "ratio"),
        ({"ratio": 65_537}, "ratio"),
        ({"head_dim": 32}, "head_dim"),
        ({"head_dim": 192}, "head_dim"),
        ({"draft_slack": -1}, "draft_slack"),
        ({"draft_slack": 4_097}, "draft_slack"),
    ],
)
def test_refused_geometries(changes, message):
    with pytest.raises(ValueError, match=message):
        Geometry(**{"kind": "hca", "ratio": 128, "head_dim": 512, **changes})


@pytest.mark.parametrize(
    ("kind", "cache_format", "changes", "message"),
    [
        ("hca", "fp8_ds_mla", {"ape": torch.zeros(4, 512)}, r"ape must be fp32 \[128, 512\]"),
        ("hca", "fp8_ds_mla", {"ape": torch.zeros(128, 512, dtype=torch.bfloat16)}, "ape must be fp32"),
        ("csa", "bf16", {"norm_weight": torch.ones(128)}, r"norm.weight must be fp32 \[512\]"),
        ("csa", "bf16", {"cos_sin": torch.zeros(8, 32)}, r"cos_sin must be fp32 \[8, 64\]"),
        ("csa", "bf16", {"layout": layout_of("indexer", "bf16", 64)}, "head_dim 128, not 512"),
        ("csa", "bf16", {"scale_floor": "scale"}, "bf16 has no scale_floor"),
        ("indexer", "indexer_mxfp4", {"scale_floor": "scale"}, "indexer_mxfp4 has no scale_floor"),
        ("csa", "fp8_ds_mla", {"scale_floor": "none"}, "scale_floor must be one of amax, scale"),
        ("csa", "fp8_ds_mla", {"indexer_profile": "sglang"}, "csa has no indexer_profile"),
        ("indexer", "indexer_fp8", {"indexer_profile": "trt"}, "indexer_profile must be one of vllm, sglang"),
        ("csa", "fp8", {"fp8_scale": 0.0}, "fp8_scale"),
        ("csa", "fp8", {"fp8_scale": float("nan")}, "fp8_scale"),
        ("csa", "fp8", {"fp8_scale": float("inf")}, "fp8_scale"),
    ],
)
def test_refused_compressors(kind, cache_format, changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(make_compressor(kind, cache_format), **changes)


def test_geometry_imports_only_the_standard_library():
    """A client reads byte facts without torch, numpy or anything else that is installed."""
    command = "import sys, kvfold_kernels.geometry; print(*sorted({'torch', 'numpy', 'numba'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True).stdout == "\n"
