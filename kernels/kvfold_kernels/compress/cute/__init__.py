"""`compress` on NVIDIA GPUs: kernels in the CuTe DSL, one launch a step.

The sums follow `reference`'s order in every variant; see `step` for what differs from its arithmetic. Kernels come from
the library that was compiled ahead, or from the compiler on first use, see `loading`.
"""

from __future__ import annotations

import functools
import logging
import pathlib

import torch

from kvfold_kernels import geometry as g
from kvfold_kernels import plan as p
from kvfold_kernels.compress import check_operands
from kvfold_kernels.compress.cute import loading
from kvfold_kernels.compress.cute.device import architecture, max_clusters
from kvfold_kernels.compress.cute.variants import ARCHITECTURES, Variant, choose, choose_layer
from kvfold_kernels.compressor import Compressor

log = logging.getLogger("kvfold")

LIBRARIES = pathlib.Path(__file__).with_name("lib")
"""Folder of the libraries and their manifests, kvfold_cute_<architecture>.so and .json."""

_DTYPE_NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_NO_LIMIT = 2**31 - 1
NO_FLAG = 2**63 - 1
"""What a flag holds while no bad value was seen."""
_KIND_OF_WIDTH = {g.Geometry(name, kind.ratio, kind.head_dim).row_width: name for name, kind in g.KINDS.items()}


def why_not() -> str | None:
    """Why the kernels cannot run on the current device, or None."""
    if torch.version.hip is not None or architecture() not in ARCHITECTURES:
        return f"has kernels for {', '.join(ARCHITECTURES)} only"
    try:
        kernels()
    except loading.NoKernelsError as error:
        return str(error)
    return None


def start() -> None:
    """Find the kernels and ask the device what a step would else have to ask, and say where the kernels come from."""
    log.info("backend cute: %s; %d clusters at once", kernels().origin, max_clusters())


@functools.cache
def kernels() -> loading.Kernels:
    return loading.find(LIBRARIES, architecture())


@functools.cache
def kernel(variant: Variant):
    """The launcher of a variant."""
    return kernels().get(variant)


@functools.cache
def _no_limits(device: torch.device) -> torch.Tensor:
    return torch.full((2,), _NO_LIMIT, dtype=torch.int32, device=device)


@functools.cache
def _nothing(device: torch.device, num_fields: int) -> torch.Tensor:
    """Stands in for a plan array without columns."""
    return torch.zeros(num_fields, 1, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=4096)
def _floors(cache_format: str, scale_floor: str) -> tuple[float, int]:
    """Floor of a block's maximum, and of its biased exponent."""
    if cache_format == "indexer_mxfp4":
        return g.MXFP4_AMAX_FLOOR, 0
    if scale_floor == "scale":  # 2^e ≥ 1e-4: e ≥ −13
        return 2.0**-126, g.UE8M0_BIAS - 13
    return g.AMAX_FLOOR, 0


@functools.cache
def _require_compiled(geometry: g.Geometry) -> None:
    kind = g.KINDS[geometry.kind]
    if (geometry.ratio, geometry.head_dim) != (kind.ratio, kind.head_dim):
        raise ValueError(
            f"the cute kernels of kind {kind.name} are for ratio {kind.ratio} and head_dim {kind.head_dim},"
            f" not {geometry.ratio} and {geometry.head_dim}"
        )


def _operands(
    windows: torch.Tensor,
    appends: torch.Tensor,
    kv_score: torch.Tensor,
    rings: torch.Tensor,
    pages: torch.Tensor,
    compressor: Compressor,
    counts: torch.Tensor | None,
) -> tuple[tuple, tuple, tuple]:
    """A call's tensors, its two bounds and its numbers, in the kernels' order. Raises ValueError, see `compress`."""
    check_operands(windows, appends, kv_score, rings, pages, compressor)
    _require_compiled(compressor.geometry)
    device, layout = kv_score.device, compressor.layout
    max_windows, max_appends = windows.shape[1], appends.shape[1]
    tensors = (
        windows if max_windows else _nothing(device, p.WINDOW_FIELDS),
        appends if max_appends else _nothing(device, p.APPEND_FIELDS),
        _no_limits(device) if counts is None else counts,
        kv_score,
        rings,
        pages,
        compressor.ape,
        compressor.norm_weight,
        compressor.cos_sin,
    )
    amax_floor, exponent_floor = _floors(layout.format.name, compressor.scale_floor)
    numbers = (layout.entries, compressor.rms_eps, amax_floor, exponent_floor, 1.0 / compressor.fp8_scale)
    return tensors, (max_windows, max_appends), numbers


def compress(
    windows: torch.Tensor,
    appends: torch.Tensor,
    kv_score: torch.Tensor,
    rings: torch.Tensor,
    pages: torch.Tensor,
    compressor: Compressor,
    counts: torch.Tensor | None = None,
) -> int:
    """See `kvfold_kernels.compress.CompressFn`; all tensors on one CUDA device, launched on the current stream.

    counts  int32 `[2]` on the device: how many of the windows and appends are real. None: all. A captured graph is
            launched for the most there can be; blocks past the counts leave at once.
    Raises ValueError for another ratio or head_dim than the kind's usual ones, or operands of another shape, dtype or
    device; then nothing was launched. Windows, appends and counts must have been written by a copy (not by a kernel
    launched with an early trigger): they are read before the earlier kernels of the stream have ended.
    """
    tensors, bounds, numbers = _operands(windows, appends, kv_score, rings, pages, compressor, counts)
    if not any(bounds):
        return 0
    given, ring = _DTYPE_NAMES[kv_score.dtype], _DTYPE_NAMES[rings.dtype]
    fmt, profile = compressor.layout.format.name, compressor.indexer_profile
    variant = choose(compressor.geometry.kind, fmt, profile, given, ring, bounds[0])
    kernel(variant)(*tensors, *bounds, max_clusters(), *numbers)
    return 1


def compress_layer(main: tuple, indexer: tuple) -> int:
    """A csa layer's main and indexer compressor: `compress(*main)` and `compress(*indexer)`, in one launch where their
    formats have a kernel for it. Each side with or without counts. Returns the launches; raises as `compress` does."""
    sides = [_operands(*side, *([None] * (7 - len(side)))) for side in (main, indexer)]
    given, ring = _DTYPE_NAMES[main[2].dtype], _DTYPE_NAMES[main[3].dtype]
    formats = (main[5].layout.format.name, indexer[5].layout.format.name)
    variant = choose_layer(given, ring, *formats, indexer[5].indexer_profile)
    if variant is None:
        return compress(*main) + compress(*indexer)
    if not any(bound for _, bounds, _ in sides for bound in bounds):
        return 0
    kernel(variant)(*(operand for tensors, bounds, numbers in sides for operand in (*tensors, *bounds, *numbers)))
    return 1


def flag_non_finite(kv_score: torch.Tensor, num_tokens: int, flag: torch.Tensor) -> None:
    """See `kvfold_kernels.compress.FlagNonFiniteFn`. Raises ValueError for rows of another width or dtype."""
    if num_tokens == 0:
        return
    kind, dtype = _KIND_OF_WIDTH.get(kv_score.shape[-1]), _DTYPE_NAMES.get(kv_score.dtype)
    if kind is None or dtype is None:
        raise ValueError(f"rows of no kind: {kv_score.dtype} {list(kv_score.shape)}")
    kernel(Variant("flags", kind, dtype, dtype))(kv_score, num_tokens, flag)


def find_non_finite(kv_score: torch.Tensor, num_tokens: int) -> tuple[int, int] | None:
    """See `kvfold_kernels.compress.FindNonFiniteFn`. Waits for the device."""
    flag = torch.full((1,), NO_FLAG, dtype=torch.int64, device=kv_score.device)
    flag_non_finite(kv_score, num_tokens, flag)
    found = int(flag)
    return None if found == NO_FLAG else divmod(found, kv_score.shape[1])


__all__ = ["compress", "compress_layer", "find_non_finite", "flag_non_finite"]
