"""CPU kernel part: one normed and rotated row → the bytes of its entry, as `entry.encode` defines them."""

from __future__ import annotations

import math

import numpy as np

from kvfold_kernels import geometry as g
from kvfold_kernels.compress.cpu_jit import (
    BIAS,
    F32,
    MAGNITUDE,
    MANTISSA,
    MANTISSA_BITS,
    ONE,
    SIGN,
    U32,
    f32_at,
    from_bits,
    jit,
    power_of_two,
    prefer_wide_vectors,
    to_bits,
    u8_at,
    u16_at,
)

FORMATS = ("fp32", "bf16", "fp8", "fp8_ds_mla", "indexer_fp8", "indexer_mxfp4")
"""`SPEC.format` is an index of these."""
_FP32, _BF16, _FP8, _PACKED, _INDEXER_FP8, _INDEXER_MXFP4 = range(len(FORMATS))


def _limit(value: float) -> tuple[np.float32, int, int]:
    """A format's largest value: as fp32, its mantissa bits, its biased exponent."""
    bits = int(F32(value).view(U32))
    return F32(value), bits & int(MANTISSA), bits >> MANTISSA_BITS


_E4M3_MAX, _E4M3_MANTISSA, _E4M3_EXPONENT = _limit(g.E4M3_MAX)
_E2M1_MAX, _E2M1_MANTISSA, _E2M1_EXPONENT = _limit(g.E2M1_MAX)
_E4M3_DROPPED, _E2M1_DROPPED = U32(MANTISSA_BITS - 3), U32(MANTISSA_BITS - 1)
_E4M3_REBIAS, _E2M1_REBIAS = U32((BIAS - 7) << 3), U32((BIAS - 1) << 1)
_E4M3_NORMAL, _E2M1_NORMAL = F32(2.0**-6), ONE
# Adding these rounds to a multiple of the smallest subnormal, 2^−9 and 1/2, and leaves the multiple in the low bits.
_E4M3_STEPS, _E2M1_STEPS = F32(2.0 ** (MANTISSA_BITS - 9)), F32(2.0 ** (MANTISSA_BITS - 1))


@jit
def _shift_to_nearest(bits, dropped):
    """bits >> dropped, to nearest, ties to even."""
    odd = U32(U32(bits >> dropped) & U32(1))
    half = U32(U32(U32(1) << U32(dropped - U32(1))) - U32(1))
    return U32(U32(bits + U32(half + odd)) >> dropped)


@jit
def _bf16(x):
    return _shift_to_nearest(to_bits(x), U32(16))


@jit
def _e4m3(x):
    """fp32 → e4m3fn byte, saturating at ±448; NaN counts as the largest."""
    size = from_bits(U32(to_bits(x) & MAGNITUDE))
    size = size if size < _E4M3_MAX else _E4M3_MAX
    normal = U32(_shift_to_nearest(to_bits(size), _E4M3_DROPPED) - _E4M3_REBIAS)
    subnormal = U32(to_bits(size + _E4M3_STEPS) - to_bits(_E4M3_STEPS))
    code = normal if size >= _E4M3_NORMAL else subnormal
    return np.uint8(U32(code | U32(U32(to_bits(x) & SIGN) >> U32(24))))


@jit
def _e2m1(x):
    """fp32 → 4-bit code, saturating at ±6."""
    size = from_bits(U32(to_bits(x) & MAGNITUDE))
    size = size if size < _E2M1_MAX else _E2M1_MAX
    normal = U32(_shift_to_nearest(to_bits(size), _E2M1_DROPPED) - _E2M1_REBIAS)
    subnormal = U32(to_bits(size + _E2M1_STEPS) - to_bits(_E2M1_STEPS))
    code = normal if size >= _E2M1_NORMAL else subnormal
    return np.uint8(U32(code | U32(U32(to_bits(x) & SIGN) >> U32(28))))


@jit
def _hadamard(x):
    """H·x / √n in place: butterflies with ascending distance, one scaling last."""
    distance = 1
    while distance < x.size:
        for start in range(0, x.size, 2 * distance):
            for i in range(start, start + distance):
                a, b = x[i], x[i + distance]
                x[i], x[i + distance] = a + b, a - b
        distance *= 2
    scale = F32(1 / math.sqrt(x.size))
    for i in range(x.size):
        x[i] *= scale


@jit
def _round_to_bf16(x, size):
    prefer_wide_vectors()
    for j in range(size):
        x[j] = from_bits(U32(_bf16(x[j]) << U32(16)))


@jit
def _amax_bits(x, floor):
    """Bits of max(|x|, floor): non-negative numbers are in the order of their bits."""
    prefer_wide_vectors()
    largest = to_bits(floor)
    for j in range(x.size):
        size = U32(to_bits(x[j]) & MAGNITUDE)
        largest = size if size > largest else largest
    return largest


@jit
def _scale_exponent(amax_bits, limit_mantissa, limit_exponent):
    """Smallest e with limit · 2^e ≥ amax."""
    above = 1 if np.int64(amax_bits & MANTISSA) > limit_mantissa else 0
    return np.int64(amax_bits >> MANTISSA_BITS) - limit_exponent + above


@jit
def _store_bf16(x, values_at):
    prefer_wide_vectors()
    values = u16_at(values_at, x.size)
    for j in range(x.size):
        values[j] = _bf16(x[j])


@jit
def _store_e4m3(x, factor, values_at):
    prefer_wide_vectors()
    values = u8_at(values_at, x.size)
    for j in range(x.size):
        values[j] = _e4m3(x[j] * factor)


@jit
def _store_e4m3_divided(x, divisor, values_at):
    prefer_wide_vectors()
    values = u8_at(values_at, x.size)
    for j in range(x.size):
        values[j] = _e4m3(x[j] / divisor)


@jit
def _packed(x, values_at, scales_at, spec):
    nope = x.size - spec.rope_dim
    _store_bf16(x[nope:], values_at + nope)
    _round_to_bf16(x, nope)
    scales = u8_at(scales_at, spec.scale_bytes)
    for i in range(nope // g.FP8_BLOCK):
        block = x[i * g.FP8_BLOCK : (i + 1) * g.FP8_BLOCK]
        e = _scale_exponent(_amax_bits(block, spec.amax_floor), _E4M3_MANTISSA, _E4M3_EXPONENT)
        e = max(e, spec.lowest_exponent)
        scales[i] = e + g.UE8M0_BIAS
        _store_e4m3(block, power_of_two(-e), values_at + i * g.FP8_BLOCK)
    scales[spec.scale_bytes - 1] = 0


@jit
def _indexer_fp8(x, values_at, scales_at, spec):
    scale = f32_at(scales_at, 1)
    amax_bits = _amax_bits(x, spec.amax_floor)
    if spec.hadamard:
        scale[0] = from_bits(amax_bits) / _E4M3_MAX
        _store_e4m3_divided(x, scale[0], values_at)
    else:
        e = max(_scale_exponent(amax_bits, _E4M3_MANTISSA, _E4M3_EXPONENT), spec.lowest_exponent)
        scale[0] = power_of_two(e)
        _store_e4m3(x, power_of_two(-e), values_at)


@jit
def _indexer_mxfp4(x, values_at, scales_at, spec):
    prefer_wide_vectors()
    scales, half = u8_at(scales_at, spec.scale_bytes), g.MXFP4_BLOCK // 2
    for i in range(spec.scale_bytes):
        block = x[i * g.MXFP4_BLOCK : (i + 1) * g.MXFP4_BLOCK]
        e = _scale_exponent(_amax_bits(block, spec.amax_floor), _E2M1_MANTISSA, _E2M1_EXPONENT)
        scales[i] = e + g.UE8M0_BIAS
        factor = power_of_two(-e)
        pairs = u8_at(values_at + i * half, half)
        for j in range(half):
            pairs[j] = _e2m1(block[2 * j] * factor) | (_e2m1(block[2 * j + 1] * factor) << 4)


@jit
def encode(x, values_at, scales_at, spec):
    """Store one row; uses x `[head_dim]` up."""
    if spec.format == _FP32:
        values = f32_at(values_at, x.size)
        for j in range(x.size):
            values[j] = x[j]
    elif spec.format == _BF16:
        _store_bf16(x, values_at)
    elif spec.format == _FP8:
        _round_to_bf16(x, x.size)
        _store_e4m3(x, spec.inverse_scale, values_at)
    elif spec.format == _PACKED:
        _packed(x, values_at, scales_at, spec)
    else:
        if spec.hadamard:
            _hadamard(x)
        else:
            _round_to_bf16(x, x.size)
        if spec.format == _INDEXER_FP8:
            _indexer_fp8(x, values_at, scales_at, spec)
        else:
            _indexer_mxfp4(x, values_at, scales_at, spec)
