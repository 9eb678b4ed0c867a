"""Assertions about bytes: equal, or different for a reason that can be named."""

from __future__ import annotations

import math

import numpy as np
import torch

from kvfold_kernels import geometry as g
from kvfold_kernels.compressor import Compressor
from kvfold_kernels.entry import ceil_log2, e2m1, e4m3, hadamard

UNIT = 2.0**-24
"""Half the distance of fp32 numbers at 1: the relative error of one rounding."""


def assert_bits(a: torch.Tensor, b: torch.Tensor) -> None:
    """Same shape, dtype and bytes; NaNs and signs of zeros count."""
    assert a.shape == b.shape
    assert a.dtype == b.dtype
    if a.numel() == 0:
        return
    a_bytes, b_bytes = (t.contiguous().view(torch.uint8).flatten() for t in (a, b))
    different = (a_bytes != b_bytes).nonzero().flatten()
    if len(different):
        first = int(different[0]) // a.element_size()
        where = tuple(int(i) for i in np.unravel_index(first, a.shape))
        raise AssertionError(
            f"{len(different)} of {len(a_bytes)} bytes differ, first at {list(where)}: {a[where]} ≠ {b[where]}"
        )


def row_error(rows_fp64: np.ndarray, units: float) -> np.ndarray:
    """`[n, 1]`: `units` fp32 roundings of each row's largest value; a row's values are sums of numbers of that size."""
    return units * UNIT * np.abs(rows_fp64).max(1, keepdims=True)


def assert_explained(
    actual: torch.Tensor, compressor: Compressor, rows_fp64: np.ndarray, error: np.ndarray | float
) -> int:
    """Each byte of the page-free rows `actual`, uint8 `[n, entry_bytes]`, is what some value within `error` (absolute,
    broadcast to `[n, head_dim]`) of `rows_fp64` `[n, head_dim]`, normed and rotated, becomes.

    Scales first: a stored scale must lie between those of the least and the largest amax within the error. Then values:
    quantisers are monotonic, so, under the stored scale, a code must lie between those of value − error and
    value + error. A code that differs from the exact value's is thus within `error` of the boundary between the two.
    Returns the number of codes and scales that differ from those of the fp64 rows.
    """
    fmt = compressor.layout.format
    error = np.broadcast_to(error, rows_fp64.shape)
    exact = torch.from_numpy(rows_fp64)
    slack = torch.from_numpy(np.ascontiguousarray(error))
    if compressor.indexer_profile == "sglang" and fmt.name.startswith("indexer"):
        n = exact.shape[1]
        rounding = math.log2(n) * UNIT * exact.abs().sum(1, keepdim=True)
        slack = (slack.sum(1, keepdim=True) + rounding).expand_as(exact) / math.sqrt(n)
        exact = hadamard(exact)
    low, high = _outward(exact - slack, exact + slack)
    middle = exact.to(torch.float32)
    values, stored = actual[:, : fmt.value_bytes], actual[:, fmt.value_bytes :]
    flips = 0
    scale = None
    if fmt.scale_bytes:
        least = torch.where((low < 0) & (high > 0), 0.0, torch.minimum(low.abs(), high.abs()))
        bounds = [_scales(x, compressor) for x in (least, torch.maximum(low.abs(), high.abs()), middle)]
        scale = _stored_scales(stored, compressor)
        _assert_between("scale", scale, *bounds[:2])
        flips += int((scale != bounds[2]).sum())
    codes = _stored_codes(values, compressor)
    bounds = [_codes(x, scale, compressor) for x in (low, high, middle)]
    _assert_between("value", codes, *bounds[:2])
    return flips + int((codes != bounds[2]).sum())


def _outward(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp64 interval → the least fp32 interval around it."""
    low32, high32 = low.to(torch.float32), high.to(torch.float32)
    inf = torch.tensor(math.inf)
    return (
        torch.where(low32.double() > low, torch.nextafter(low32, -inf), low32),
        torch.where(high32.double() < high, torch.nextafter(high32, inf), high32),
    )


def _assert_between(what: str, actual: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> None:
    bad = ((actual < low) | (actual > high)).nonzero()
    if len(bad):
        row, column = (int(i) for i in bad[0])
        raise AssertionError(
            f"{len(bad)} of {actual.numel()} {what}s are unexplained, first in row {row}, column {column}: "
            f"{actual[row, column]} is not in [{low[row, column]}, {high[row, column]}]"
        )


def _ordered(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Sign-and-magnitude codes as int64 in the order of their values; −0 just below +0."""
    codes = codes.to(torch.int64) & ((1 << bits) - 1)
    sign = 1 << (bits - 1)
    return torch.where(codes >= sign, -1 - (codes - sign), codes)


def _is_raw(compressor: Compressor) -> bool:
    return compressor.indexer_profile == "sglang"


def _scales(x: torch.Tensor, compressor: Compressor) -> torch.Tensor:
    """Scales of fp32 rows x: exponents, or the fp32 scale itself where that is stored raw."""
    fmt = compressor.layout.format
    if fmt.name == "indexer_fp8":
        blocks = x.unsqueeze(1)
    elif fmt.name == "indexer_mxfp4":
        blocks = x.unflatten(1, (-1, g.MXFP4_BLOCK))
    else:
        blocks = x[:, : compressor.geometry.nope_dim].unflatten(1, (-1, g.FP8_BLOCK))
    amax = (blocks if _is_raw(compressor) else blocks.to(torch.bfloat16).float()).abs().amax(-1)
    if fmt.name == "indexer_mxfp4":
        return ceil_log2(amax.clamp(min=g.MXFP4_AMAX_FLOOR), g.E2M1_MAX)
    if compressor.scale_floor == "scale":
        return ceil_log2(amax.clamp(min=torch.finfo(torch.float32).tiny), g.E4M3_MAX).clamp(min=-13)  # 2^−13 ≥ 1e-4
    amax = amax.clamp(min=g.AMAX_FLOOR)
    return amax / g.E4M3_MAX if _is_raw(compressor) else ceil_log2(amax, g.E4M3_MAX)


def _stored_scales(stored: torch.Tensor, compressor: Compressor) -> torch.Tensor:
    name = compressor.layout.format.name
    if name == "indexer_fp8":
        scale = stored.contiguous().view(torch.float32)
        if _is_raw(compressor):
            return scale
        mantissa, exponent = torch.frexp(scale)
        assert (mantissa == 0.5).all(), "a scale is not a power of two"
        return exponent - 1
    if name == "fp8_ds_mla":
        assert (stored[:, -1] == 0).all(), "the last scale byte is not 0"
        stored = stored[:, :-1]
    return stored.to(torch.int32) - g.UE8M0_BIAS


def _codes(x: torch.Tensor, scale: torch.Tensor | None, compressor: Compressor) -> torch.Tensor:
    """fp32 rows → int64 codes in the order of their values, under the stored scales."""
    name = compressor.layout.format.name
    rounded = x.to(torch.bfloat16)
    if name == "fp32":
        return _ordered(x.view(torch.int32), 32)
    if name == "bf16":
        return _ordered(rounded.view(torch.int16), 16)
    if name == "fp8":
        return _ordered(e4m3(rounded.float() * (torch.tensor(1.0) / compressor.fp8_scale)), 8)
    y = x if _is_raw(compressor) else rounded.float()
    if name == "indexer_fp8" and _is_raw(compressor):
        return _ordered(e4m3(y / scale), 8)
    power = torch.exp2(-scale.double()).float()
    if name == "indexer_fp8":
        return _ordered(e4m3(y * power), 8)
    if name == "indexer_mxfp4":
        return _ordered(e2m1(y * power.repeat_interleave(g.MXFP4_BLOCK, 1)), 4)
    nope = compressor.geometry.nope_dim
    values = _ordered(e4m3(y[:, :nope] * power.repeat_interleave(g.FP8_BLOCK, 1)), 8)
    return torch.cat((values, _ordered(rounded[:, nope:].view(torch.int16), 16)), 1)


def _stored_codes(values: torch.Tensor, compressor: Compressor) -> torch.Tensor:
    name = compressor.layout.format.name
    values = values.contiguous()
    if name == "fp32":
        return _ordered(values.view(torch.int32), 32)
    if name == "bf16":
        return _ordered(values.view(torch.int16), 16)
    if name == "indexer_mxfp4":
        return _ordered(torch.stack((values & 15, values >> 4), -1).flatten(1), 4)
    if name == "fp8_ds_mla":
        nope = compressor.geometry.nope_dim
        rope = values[:, nope:].contiguous().view(torch.int16)
        return torch.cat((_ordered(values[:, :nope], 8), _ordered(rope, 16)), 1)
    return _ordered(values, 8)
