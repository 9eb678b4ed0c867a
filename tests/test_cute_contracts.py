"""The built kernels' host code, run without a GPU: what a launcher takes, refuses and would launch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from kvfold_kernels.compress import cute
from kvfold_kernels.compress.cute import device, library
from kvfold_kernels.compress.cute.variants import ARCHITECTURES, DTYPE_PAIRS, Variant, all_variants
from tests.cases import make_compressor
from tests.cute_cases import Runtime, built, on_gpu, operands, runtime

__all__ = ["runtime"]

SHAPES = ("append", "flags", "overlap", "layer", "tiles", "stream")
FREE = {"windows": {1}, "appends": {1}, "kv_score": {0}, "rings": {0, 1}, "pages": {0, 1}, "cos_sin": {0}}
"""Dimensions that may have any size."""
NAMES = ("windows", "appends", "counts", "kv_score", "rings", "pages", "ape", "norm_weight", "cos_sin")


@pytest.fixture(scope="module", params=ARCHITECTURES)
def opened(request: pytest.FixtureRequest, runtime: Runtime) -> Any:
    """A library, opened where no compiler is installed."""
    return library.open_library(built(request.param))


def names_of(variant: Variant) -> tuple[str, ...]:
    if variant.shape == "flags":
        return ("kv_score", "flag")
    return NAMES * 2 if variant.shape == "layer" else NAMES


def call(opened: Any, variant: Variant, changed: dict[int, Any] | None = None, **sizes: int) -> None:
    arguments: list[Any] = operands(variant, **sizes)
    arguments = [on_gpu(each) if isinstance(each, torch.Tensor) else each for each in arguments]
    for at, value in (changed or {}).items():
        arguments[at] = value
    opened[variant.name](*arguments)


def wrong(tensor: torch.Tensor, free: set[int]) -> dict[str, Any]:
    """The tensor spoilt in one way each, by the words of the refusal."""
    other = torch.float16 if tensor.dtype in (torch.float32, torch.bfloat16) else torch.int16
    found = {"dtype=": on_gpu(tensor.to(other)), "ndim=": on_gpu(tensor[None]), "device_type=cuda": tensor}
    for dim in set(range(tensor.ndim)) - free:
        found[f"shape[{dim}]"] = on_gpu(torch.cat([tensor, tensor], dim))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_a_wrong_operand_is_named_and_nothing_is_launched(opened, runtime, shape):
    before, refused = (runtime.num_loaded, runtime.num_launched), 0
    for variant in (variant for variant in all_variants() if variant.shape == shape):
        given = operands(variant)
        tensors = [at for at, operand in enumerate(given) if isinstance(operand, torch.Tensor)]
        for at, name in zip(tensors, names_of(variant), strict=True):
            for words, value in wrong(given[at], FREE.get(name, set())).items():
                with pytest.raises(ValueError, match=rf"argument #{at} ") as error:
                    call(opened, variant, {at: value})
                assert words in str(error.value)
                assert name in str(error.value)
                refused += 1
    assert refused > 10
    assert (runtime.num_loaded, runtime.num_launched) == before


def test_numbers_and_their_count_are_checked_too(opened, runtime):
    variant, before = Variant("append", "hca", "bf16", "bf16"), runtime.num_launched
    with pytest.raises(TypeError, match=r"argument #9 .* expected int"):
        call(opened, variant, {9: 1.5})
    with pytest.raises(TypeError, match="Expects 17 parameters"):
        opened[variant.name](1)
    with pytest.raises(ValueError, match=r"kv_score.* align"):
        call(opened, variant, {3: on_gpu(torch.zeros(9000, dtype=torch.bfloat16)[1:8193].view(8, 1024))})
    assert runtime.num_launched == before


@pytest.mark.parametrize("shape", SHAPES)
def test_every_variant_launches_once_and_may_start_early(opened, runtime, shape):
    for variant in (variant for variant in all_variants() if variant.shape == shape):
        before = runtime.num_launched
        call(opened, variant)
        assert runtime.num_launched == before + 1
        assert runtime.last["early"] == 1
        assert runtime.last["cluster"] == (8 if shape in ("tiles", "stream") else 1)
        assert runtime.last["shared_bytes"] <= 227 * 1024


BF16 = ("bf16", "bf16", "fp8_ds_mla")
GRIDS = [
    (Variant("append", "hca", "bf16", "bf16"), 0, 5, 15, 3, 256),  # 128 vectors a row
    (Variant("append", "csa", "fp32", "fp32"), 0, 5, 15, 10, 256),  # 512
    (Variant("overlap", "csa", *BF16), 20, 5, 15, 20 + 10, 128),  # a window a block
    (Variant("overlap", "indexer", "bf16", "bf16", "indexer_fp8"), 19, 3, 15, 5 + 2, 128),  # four windows a block
    (Variant("layer", "csa", *BF16, beside="indexer_fp8"), 20, 5, 15, 20 + 5 + 10 + 3, 128),
    (Variant("tiles", "hca", *BF16), 3, 0, 15, 3 * 8, 256),
    (Variant("tiles", "hca", *BF16), 3, 5, 15, (3 + 1) * 8, 256),
    (Variant("stream", "hca", *BF16), 512, 5, 15, 15 * 8, 384),
    (Variant("stream", "hca", *BF16), 512, 5, 18, 18 * 8, 384),
    (Variant("stream", "hca", *BF16), 3, 5, 15, 3 * 8, 384),
    (Variant("flags", "hca", "bf16", "bf16"), 0, 0, 15, 38, 256),  # 300 rows of 128 vectors, 1024 a block
]


@pytest.mark.parametrize(("variant", "windows", "appends", "clusters", "blocks", "threads"), GRIDS)
def test_how_many_blocks_a_launch_has(opened, runtime, variant, windows, appends, clusters, blocks, threads):
    call(opened, variant, windows=windows, appends=appends, clusters=clusters)
    assert (runtime.last["blocks"], runtime.last["threads"]) == (blocks, threads)


@pytest.mark.parametrize(("windows", "fit"), [(1, 1), (15, 1), (16, 2), (30, 2), (31, 3), (45, 3)])
@pytest.mark.parametrize(("given", "ring"), DTYPE_PAIRS)
def test_few_windows_have_their_multiprocessors_to_themselves(opened, runtime, given, ring, windows, fit):
    """Where 15 clusters find room with one block on each. A block takes 7 KiB and one of the system's, too."""
    call(opened, Variant("tiles", "hca", given, ring, "fp8_ds_mla"), windows=windows, clusters=15)
    fitting = (228 << 10) // (runtime.last["shared_bytes"] + (8 << 10))
    assert fitting == fit or fitting > fit == 3


def test_the_backend_passes_the_refusal_on(opened, runtime, monkeypatch):
    """The tensors of this test are on the CPU, and the kernel says so."""
    monkeypatch.setattr(cute, "kernel", lambda variant: opened[variant.name])
    monkeypatch.setattr(cute, "max_clusters", lambda: 15)
    compressor = make_compressor("hca")
    geometry, before = compressor.geometry, runtime.num_launched
    plan = torch.zeros(7, 1, dtype=torch.int32), torch.zeros(2, 0, dtype=torch.int32)
    rows = torch.zeros(200, geometry.row_width)
    rings = torch.zeros(1, geometry.ring_rows, geometry.row_width)
    pages = torch.zeros(4, compressor.layout.page_bytes, dtype=torch.uint8)
    for given, ring in itertools.product((torch.float32, torch.bfloat16), repeat=2):
        message = "expected device_type=cuda" if (given, ring) != (torch.float32, torch.bfloat16) else "cannot go into"
        with pytest.raises(ValueError, match=message):
            cute.compress(*plan, rows.to(given), rings.to(ring), pages, compressor)
    assert runtime.num_launched == before


def test_the_device_says_how_many_clusters_fit(runtime):
    runtime.answer(13)
    assert device.occupancy() == 13
    assert runtime.asked == (8, 384, 232448, 8)


@pytest.mark.parametrize(("clusters", "status"), [(0, 0), (13, 1)])
def test_without_an_answer_there_is_a_cautious_number(runtime, monkeypatch, caplog, clusters, status):
    runtime.answer(clusters, status)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    properties = type("Properties", (), {"multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    device.max_clusters.cache_clear()
    assert device.max_clusters() == 15
    device.max_clusters.cache_clear()
    assert "taking 15" in caplog.text
    assert "cudaOccupancyMaxActiveClusters" in caplog.text
