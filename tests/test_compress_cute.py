"""The `cute` backend without a GPU: which kernel a step takes, and with which operands."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from kvfold_kernels import plan as p
from kvfold_kernels.compress import cute
from kvfold_kernels.compress.cute.variants import (
    DTYPE_PAIRS,
    INDEXER_PROFILES,
    LAYER_FORMATS,
    MIXED_STREAM_WINDOWS,
    PROFILED,
    STREAM_WINDOWS,
    Variant,
    all_variants,
    choose,
    choose_layer,
)
from kvfold_kernels.geometry import CACHE_FORMATS, KINDS, MXFP4_AMAX_FLOOR
from tests.cases import DTYPES, FORMATS, make_compressor, make_rows

SERVED = {"hca": "fp8_ds_mla", "csa": "fp8_ds_mla", "indexer": "indexer_fp8"}


# Which kernel.


@pytest.mark.parametrize(("given", "ring"), DTYPE_PAIRS)
def test_the_windows_of_a_step_choose_the_kernel(given, ring):
    def shape(kind, windows):
        return choose(kind, SERVED[kind], "vllm", given, ring, windows).shape

    assert shape("hca", 0) == shape("csa", 0) == shape("indexer", 0) == "append"
    assert shape("csa", 1) == shape("csa", 10**5) == shape("indexer", 7) == "overlap"
    until = STREAM_WINDOWS if given == ring else MIXED_STREAM_WINDOWS
    assert [shape("hca", n) for n in (1, until - 1, until, 10**5)] == ["tiles", "tiles", "stream", "stream"]


def test_whatever_a_step_takes_is_built():
    names = [variant.name for variant in all_variants()]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in names)
    for given, ring in DTYPE_PAIRS:
        for kind, formats in CACHE_FORMATS.items():
            for cache_format in formats:
                for profile in INDEXER_PROFILES if cache_format in PROFILED else INDEXER_PROFILES[:1]:
                    for windows in range(2 * STREAM_WINDOWS):
                        assert choose(kind, cache_format, profile, given, ring, windows).name in names
        for main in CACHE_FORMATS["csa"]:
            for beside in CACHE_FORMATS["indexer"]:
                variant = choose_layer(given, ring, main, beside, "vllm")
                assert (variant is not None) == (main in LAYER_FORMATS and beside in PROFILED)
                assert variant is None or variant.name in names


# With which operands: a launcher that writes down what it was given.


class Launches(list):
    def __call__(self, variant: Variant) -> Any:
        return lambda *operands: self.append((variant, operands))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    launches = Launches()
    monkeypatch.setattr(cute, "kernel", launches)
    monkeypatch.setattr(cute, "max_clusters", lambda: 15)
    return launches


def make_call(kind="csa", cache_format=None, given="bf16", ring="fp32", windows=3, appends=2, **options) -> list[Any]:
    compressor = make_compressor(kind, cache_format or SERVED[kind], **options)
    geometry = compressor.geometry
    return [
        torch.zeros(p.WINDOW_FIELDS, windows, dtype=torch.int32),
        torch.zeros(p.APPEND_FIELDS, appends, dtype=torch.int32),
        make_rows(geometry, 40, dtype=given),
        torch.zeros(2, geometry.ring_rows, geometry.row_width, dtype=DTYPES[ring]),
        torch.zeros(4, compressor.layout.page_bytes, dtype=torch.uint8),
        compressor,
    ]


@pytest.mark.parametrize(("given", "ring"), DTYPE_PAIRS)
@pytest.mark.parametrize(("kind", "cache_format"), FORMATS)
def test_a_step_is_one_launch_of_its_variant(launches, kind, cache_format, given, ring):
    call = make_call(kind, cache_format, given, ring, windows=6)
    assert cute.compress(*call) == 1
    ((variant, operands),) = launches
    assert variant == choose(kind, cache_format, "vllm", given, ring, 6)
    assert [operand is passed for operand, passed in zip(operands, call, strict=False)][:2] == [True, True]
    assert operands[2].tolist() == [2**31 - 1] * 2  # no counts: all windows and appends are real
    compressor = call[-1]
    tables = [compressor.ape, compressor.norm_weight, compressor.cos_sin]
    assert all(a is b for a, b in zip(operands[3:9], [*call[2:5], *tables], strict=True))
    assert operands[9:12] == (6, 2, 15)
    assert operands[12:14] == (compressor.layout.entries, compressor.rms_eps)


def test_counts_come_from_the_device(launches):
    counts = torch.tensor([1, 0], dtype=torch.int32)
    cute.compress(*make_call(), counts)
    assert launches[0][1][2] is counts


def test_a_step_without_a_window_only_appends(launches):
    assert cute.compress(*make_call(windows=0)) == 1
    ((variant, operands),) = launches
    assert variant == Variant("append", "csa", "bf16", "fp32")
    assert operands[0].shape == (p.WINDOW_FIELDS, 1)  # a stand-in: kernels take no array without columns
    assert operands[9:11] == (0, 2)


def test_a_step_without_anything_launches_nothing(launches):
    assert cute.compress(*make_call(windows=0, appends=0)) == 0
    assert cute.compress_layer(*[make_call(kind, windows=0, appends=0) for kind in ("csa", "indexer")]) == 0
    cute.flag_non_finite(make_call()[2], 0, torch.zeros(1, dtype=torch.int64))
    assert launches == []


@pytest.mark.parametrize(
    ("kind", "cache_format", "options", "floors"),
    [
        ("csa", "fp8_ds_mla", {}, (1e-4, 0, 1.0)),
        ("csa", "fp8_ds_mla", {"scale_floor": "scale"}, (2.0**-126, 127 - 13, 1.0)),
        ("csa", "fp8", {"fp8_scale": 0.5}, (1e-4, 0, 2.0)),
        ("indexer", "indexer_mxfp4", {}, (MXFP4_AMAX_FLOOR, 0, 1.0)),
    ],
)
def test_the_numbers_of_the_quantisers(launches, kind, cache_format, options, floors):
    cute.compress(*make_call(kind, cache_format, **options))
    assert launches[0][1][-3:] == floors


@pytest.mark.parametrize("beside", PROFILED)
@pytest.mark.parametrize("profile", INDEXER_PROFILES)
def test_a_layer_is_one_launch(launches, beside, profile):
    main, indexer = make_call(), make_call("indexer", beside, windows=4, appends=1, indexer_profile=profile)
    counts = torch.tensor([2, 1], dtype=torch.int32)
    assert cute.compress_layer(tuple(main), (*indexer, counts)) == 1
    ((variant, operands),) = launches
    assert variant == Variant("layer", "csa", "bf16", "fp32", "fp8_ds_mla", profile, beside)
    half = len(operands) // 2
    assert operands[3] is main[2]
    assert operands[half + 3] is indexer[2]
    assert (operands[9:11], operands[half + 9 : half + 11]) == ((3, 2), (4, 1))
    assert operands[half + 2] is counts


def test_a_layer_of_other_formats_is_two_launches(launches):
    assert cute.compress_layer(make_call("csa", "bf16"), make_call("indexer")) == 2
    assert [variant.kind for variant, _ in launches] == ["csa", "indexer"]


def test_the_input_check_takes_the_variant_of_the_rows(launches):
    flag = torch.zeros(1, dtype=torch.int64)
    for kind, given in (("hca", "bf16"), ("csa", "fp32"), ("indexer", "bf16")):
        rows = make_call(kind, given=given, ring=given)[2]
        cute.flag_non_finite(rows, 30, flag)
        assert launches[-1][0] == Variant("flags", kind, given, given)
        assert launches[-1][1] == (rows, 30, flag)


def spoilt(at: int, value: Any) -> list[Any]:
    return [value(operand) if i == at else operand for i, operand in enumerate(make_call())]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (spoilt(0, lambda t: t.long()), "windows must be int32"),
        (spoilt(1, lambda t: t[:1]), "appends must be int32"),
        (spoilt(2, lambda t: t[:, 1:]), "kv_score must be contiguous"),
        (spoilt(2, lambda t: t.half()), "torch.float16 rows cannot go into"),
        (spoilt(3, lambda t: t[:, 1:]), "rings must be contiguous"),
        (spoilt(4, lambda t: t[:, 1:]), "pages of fp8_ds_mla must be"),
        (make_call(given="fp32", ring="bf16"), "cannot go into torch.bfloat16 rings"),
        (make_call("hca", ratio=100), "ratio 128 and head_dim 512, not 100 and 512"),
    ],
)
def test_operands_that_no_kernel_is_for_are_refused(launches, call, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        cute.compress(*call)
    with pytest.raises(ValueError, match=re.escape(words)):
        cute.compress_layer(call, make_call("indexer"))
    assert launches == []


def test_rows_of_no_kind_are_not_checked(launches):
    flag = torch.zeros(1, dtype=torch.int64)
    for rows in (torch.zeros(3, 1000), torch.zeros(3, 1024, dtype=torch.float16)):
        with pytest.raises(ValueError, match="rows of no kind"):
            cute.flag_non_finite(rows, 3, flag)
    assert launches == []


def test_every_kind_has_kernels():
    assert {variant.kind for variant in all_variants()} == set(KINDS)
