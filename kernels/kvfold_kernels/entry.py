"""Bytes of an entry: fp32 rows to stored values and scales, and back. Plain torch on the CPU; the definition.

Packed fp8 (`fp8_ds_mla`), columns [0, nope): y = bf16(x); per 64 columns amax = max |y|, floored;
e = ⌈log2(amax / 448)⌉, the exponent rule below; byte = e + 127, value = e4m3(clamp(y · 2^−e, ±448)).
Columns [nope, head_dim): bf16(x), once. The last scale byte is 0.

Indexer fp8: the whole row in bf16, one amax; the scale 2^e is stored as fp32. Profile `sglang`: H·x / √head_dim in fp32
first (Sylvester's Hadamard matrix), scale amax / 448 as it is, y / scale, no bf16 rounding.
Indexer MXFP4: bf16 row, per 32 columns amax floored at 6·2^−126, e = ⌈log2(amax / 6)⌉, e2m1(y · 2^−e), two columns a
byte, the even one low. Profile `sglang`: Hadamard first, no bf16 rounding, y / 2^e.
Plain: bf16(x); x in fp32; or e4m3(clamp(bf16(x) · (1 / fp8_scale), ±448)).

All roundings are to nearest, ties to even. Sources: DeepSeek-V4's reference quantiser; vLLM's and SGLang's pages.
"""

from __future__ import annotations

import math

import torch

from kvfold_kernels import geometry as g
from kvfold_kernels.compressor import Compressor

_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_E2M1_MIDPOINTS = (_E2M1[1:] + _E2M1[:-1]) / 2


def ceil_log2(amax: torch.Tensor, limit: float) -> torch.Tensor:
    """Smallest e with limit · 2^e ≥ amax, as int32, from the exponent and mantissa bits; amax > 0, normal.

    For limit = m · 2^k with 1 ≤ m < 2: e = exponent(amax) − k, plus 1 if amax's mantissa exceeds m.
    """
    mantissa, exponent = torch.frexp(amax)
    limit_mantissa, limit_exponent = math.frexp(limit)
    return exponent - limit_exponent + (mantissa > limit_mantissa).to(torch.int32)


def e4m3(x: torch.Tensor) -> torch.Tensor:
    """fp32 → e4m3fn bytes, saturating at ±448."""
    return x.clamp(-g.E4M3_MAX, g.E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8)


def e2m1(x: torch.Tensor) -> torch.Tensor:
    """fp32 → 4-bit codes (sign, then 3 bits), saturating at ±6."""
    size = x.abs()
    code = torch.bucketize(size, _E2M1_MIDPOINTS)  # a tie goes to the lower code …
    tie = (size[..., None] == _E2M1_MIDPOINTS).any(-1)
    code = code + (tie & (code % 2 == 1)).to(code.dtype)  # … unless that one is odd
    return (code | (torch.signbit(x).to(code.dtype) << 3)).to(torch.uint8)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """H·x / √n over the last dimension, Sylvester order, fp32 butterflies with ascending distance, one scaling last."""
    n = x.shape[-1]
    y = x
    distance = 1
    while distance < n:
        pairs = y.unflatten(-1, (-1, 2, distance))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        distance *= 2
    return y * torch.tensor(1.0 / math.sqrt(n), dtype=x.dtype)


def encode(rows: torch.Tensor, compressor: Compressor) -> tuple[torch.Tensor, torch.Tensor]:
    """fp32 rows `[n, head_dim]`, normed and rotated → uint8 values `[n, value_bytes]`, scales `[n, scale_bytes]`."""
    rows = rows.to(torch.float32)
    fmt = compressor.layout.format
    no_scales = torch.empty((len(rows), 0), dtype=torch.uint8)
    match fmt.name:
        case "fp32":
            return rows.contiguous().view(torch.uint8), no_scales
        case "bf16":
            return rows.to(torch.bfloat16).view(torch.uint8), no_scales
        case "fp8":
            inverse = torch.tensor(1.0, dtype=torch.float32) / compressor.fp8_scale
            return e4m3(_bf16(rows) * inverse), no_scales
        case "fp8_ds_mla":
            return _packed(rows, compressor)
        case "indexer_fp8":
            return _indexer_fp8(rows, compressor)
        case "indexer_mxfp4":
            return _indexer_mxfp4(rows, compressor)
        case other:
            raise AssertionError(other)


def _bf16(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.bfloat16).to(torch.float32)


def _scale_exponent(blocks: torch.Tensor, compressor: Compressor) -> torch.Tensor:
    """e of each block `[..., block]`, kept dimension, under the compressor's floor."""
    amax = blocks.abs().amax(-1, keepdim=True)
    if compressor.scale_floor == "amax":
        return ceil_log2(amax.clamp(min=g.AMAX_FLOOR), g.E4M3_MAX)
    lowest = ceil_log2(torch.tensor(g.AMAX_FLOOR), 1.0)
    return torch.maximum(ceil_log2(amax.clamp(min=torch.finfo(torch.float32).tiny), g.E4M3_MAX), lowest)


def _times_power(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """x · 2^exponent for −126 ≤ exponent ≤ 127, the power built from its bits."""
    return x * ((exponent + g.UE8M0_BIAS) << 23).to(torch.int32).view(torch.float32)


def _packed(rows: torch.Tensor, compressor: Compressor) -> tuple[torch.Tensor, torch.Tensor]:
    nope = compressor.geometry.nope_dim
    blocks = _bf16(rows[:, :nope]).unflatten(1, (-1, g.FP8_BLOCK))
    exponent = _scale_exponent(blocks, compressor)
    values = e4m3(_times_power(blocks, -exponent)).flatten(1)
    rope = rows[:, nope:].to(torch.bfloat16).contiguous().view(torch.uint8)
    scale = torch.nn.functional.pad((exponent[..., 0] + g.UE8M0_BIAS).to(torch.uint8), (0, 1))
    return torch.cat((values, rope), 1), scale


def _indexer_fp8(rows: torch.Tensor, compressor: Compressor) -> tuple[torch.Tensor, torch.Tensor]:
    if compressor.indexer_profile == "sglang":
        y = hadamard(rows)
        scale = y.abs().amax(-1, keepdim=True).clamp(min=g.AMAX_FLOOR) / g.E4M3_MAX
        return e4m3(y / scale), scale.view(torch.uint8)
    y = _bf16(rows)
    exponent = _scale_exponent(y, compressor)
    scale = _times_power(torch.ones_like(y[:, :1]), exponent)
    return e4m3(_times_power(y, -exponent)), scale.view(torch.uint8)


def _indexer_mxfp4(rows: torch.Tensor, compressor: Compressor) -> tuple[torch.Tensor, torch.Tensor]:
    y = hadamard(rows) if compressor.indexer_profile == "sglang" else _bf16(rows)
    blocks = y.unflatten(1, (-1, g.MXFP4_BLOCK))
    exponent = ceil_log2(blocks.abs().amax(-1, keepdim=True).clamp(min=g.MXFP4_AMAX_FLOOR), g.E2M1_MAX)
    codes = e2m1(_times_power(blocks, -exponent)).flatten(1)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), (exponent[..., 0] + g.UE8M0_BIAS).to(torch.uint8)
