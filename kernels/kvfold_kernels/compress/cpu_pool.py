"""CPU kernel part: one window of rows → its pooled, normed and rotated row, in `reference`'s order of every sum."""

from __future__ import annotations

import numpy as np

from kvfold_kernels import geometry as g
from kvfold_kernels import plan as p
from kvfold_kernels.compress.cpu_jit import (
    BIAS,
    F32,
    MANTISSA_BITS,
    ONE,
    U32,
    ZERO,
    f32_at,
    fma,
    from_bits,
    jit,
    prefer_wide_vectors,
    prefetch,
    to_bits,
    u16_at,
    widen,
)

TILE = 512
"""Most columns pooled at once: what a group of 16 rows needs of them stays in the second-level cache."""
_PART_GAP = 16
"""Columns between two parts of a state, so that they do not lie a multiple of 4 KiB apart."""

_MAX = F32(np.finfo(F32).max)
_INF = F32(np.inf)

_LOG2_E = F32(1.44269504)
_LN2_HIGH, _LN2_LOW = F32(0.693359375), F32(-2.12194440e-4)  # high: few enough bits for n · high to be exact
_TO_INTEGER = F32(1.5 * 2.0**23)
_LOWEST = F32(-104)
_UP = 64


@jit
def exp(x):
    """exp(x) for x ≤ 0, at most 1.01 ulp off, subnormal results included; 1 at 0; 0 below −104, at −∞ and for NaN.

    x = n·ln 2 + r, |r| ≤ ln 2 / 2. Adding 1.5·2^23 leaves n in the low bits. e^r = 1 + r + r²·q(r), with q of degree 4
    fitted for the least relative error (3e-9); times 2^(n + 64), times 2^−64.
    """
    inside = x > _LOWEST
    y = x if inside else ZERO
    shifted = fma(y, _LOG2_E, _TO_INTEGER)
    n = shifted - _TO_INTEGER
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, y))
    q = fma(r, F32(1.3820662e-3), F32(8.368675e-3))
    q = fma(q, r, F32(4.1668266e-2))
    q = fma(q, r, F32(1.6666521e-1))
    q = fma(q, r, F32(0.49999994))
    e = fma(r * r, q, r) + ONE
    power = from_bits(U32(U32(to_bits(shifted) << U32(MANTISSA_BITS)) + U32((BIAS + _UP) << MANTISSA_BITS)))
    return (e * power) * F32(2.0**-_UP) if inside else ZERO


@jit
def _larger(a, b):
    return a if a > b else b


@jit
def _finite(x):
    """x, clamped to ±max."""
    x = x if x < _MAX else _MAX
    return x if x > -_MAX else -_MAX


@jit
def _raise_maximum(score_at, bf16, ape_at, maximum):
    """maximum = max(maximum, score + ape)"""
    prefer_wide_vectors()
    ape = f32_at(ape_at, maximum.size)
    if bf16:
        narrow = u16_at(score_at, maximum.size)
        for j in range(maximum.size):
            maximum[j] = _larger(widen(narrow[j]) + ape[j], maximum[j])
    else:
        score = f32_at(score_at, maximum.size)
        for j in range(maximum.size):
            maximum[j] = _larger(score[j] + ape[j], maximum[j])


@jit
def _accumulate(score_at, kv_at, bf16, ape_at, maximum, total, output):
    """e = exp(score + ape − maximum); total += e; output = fma(e, kv, output). −∞ − −∞ gives e = 0."""
    prefer_wide_vectors()
    size = maximum.size
    ape = f32_at(ape_at, size)
    if bf16:
        narrow_score, narrow_kv = u16_at(score_at, size), u16_at(kv_at, size)
        for j in range(size):
            e = exp((widen(narrow_score[j]) + ape[j]) - maximum[j])
            total[j] += e
            output[j] = fma(e, widen(narrow_kv[j]), output[j])
    else:
        score, kv = f32_at(score_at, size), f32_at(kv_at, size)
        for j in range(size):
            e = exp((score[j] + ape[j]) - maximum[j])
            total[j] += e
            output[j] = fma(e, kv[j], output[j])


@jit
def state_size(groups, size):
    """fp32 columns of a state: each group's maximum, total and output, then one group's place to merge in."""
    return (groups + 1) * 3 * (size + _PART_GAP)


@jit
def _parts(state, group, size):
    """Maximum, total and output of a group, `[size]` each."""
    part = size + _PART_GAP
    first = 3 * group * part
    return (
        state[first : first + size],
        state[first + part : first + part + size],
        state[first + 2 * part : first + 2 * part + size],
    )


@jit
def _clear(parts):
    maximum, total, output = parts
    for j in range(maximum.size):
        maximum[j], total[j], output[j] = -_INF, ZERO, ZERO


@jit
def _merge(state, groups, pooled):
    """The groups' parts → pooled columns."""
    prefer_wide_vectors()
    size = pooled.size
    merged = _parts(state, groups, size)
    _clear(merged)
    overall, total, output = merged
    for group in range(groups):
        maximum = _parts(state, group, size)[0]
        for j in range(size):
            overall[j] = _larger(maximum[j], overall[j])
    for group in range(groups):
        maximum, group_total, group_output = _parts(state, group, size)
        for j in range(size):
            a = exp(maximum[j] - overall[j])
            total[j] = fma(group_total[j], a, total[j])
            output[j] = fma(_finite(group_output[j]), a, output[j])
    for j in range(size):
        quotient = _finite(output[j] / total[j])
        pooled[j] = quotient if total[j] > ZERO else ZERO


@jit
def pool(window, kv_score_at, bf16, rings_at, ring_bf16, spec, state, c):
    """Pooled columns c `[head_dim]` of one window; window `[7]` is a column of the plan's."""
    ratio, dim = spec.ratio, spec.head_dim
    rows, width, size = spec.halves * ratio, spec.halves * dim, min(dim, TILE)
    item, ring_item = 2 if bf16 else 4, 2 if ring_bf16 else 4
    row_bytes, ring_row_bytes = 2 * width * item, 2 * width * ring_item
    num_pad = np.int64(window[p.NUM_PAD])
    first_input = num_pad + window[p.NUM_RING]
    input_at = kv_score_at + (np.int64(window[p.INPUT_END]) - (rows - 1)) * row_bytes
    ring_at = rings_at + np.int64(window[p.RING_SLOT]) * spec.ring_rows * ring_row_bytes
    ring_first = np.int64(window[p.RING_FIRST]) - num_pad
    per_group = rows // spec.groups
    soon = per_group // spec.halves  # rows from one group's (or window's) to the next one's
    for column in range(0, dim, size):
        for group in range(spec.groups):
            parts = _parts(state, group, size)
            _clear(parts)
            maximum, total, output = parts
            for sweep in range(2):  # the maximum, then the sums
                for row in range(max(group * per_group, num_pad), (group + 1) * per_group):
                    half = row // ratio
                    start = half * dim + column
                    ape_at = spec.ape_at + ((row - half * ratio) * width + start) * 4
                    if row < first_input:
                        index = ring_first + row
                        index -= spec.ring_rows if index >= spec.ring_rows else 0
                        row_at, narrow, step = ring_at + index * ring_row_bytes, ring_bf16, ring_item
                    else:
                        row_at, narrow, step = input_at + row * row_bytes, bf16, item
                    kv_at = row_at + start * step
                    score_at = kv_at + width * step
                    ahead = soon * 2 * width * step
                    if sweep == 0:
                        prefetch(score_at + ahead, size * step)
                        _raise_maximum(score_at, narrow, ape_at, maximum)
                    else:
                        prefetch(kv_at + ahead, size * step)
                        _accumulate(score_at, kv_at, narrow, ape_at, maximum, total, output)
        _merge(state, spec.groups, c[column : column + size])


@jit
def normalise(c, sums, spec):
    """c = (c · (1 / √(mean(c²) + eps))) · weight; sums `[head_dim / 4]` is work space."""
    prefer_wide_vectors()
    leaves = c.size // g.LEAF
    for i in range(leaves):
        first = i * g.LEAF
        q = c[first] * c[first]
        for j in range(1, g.LEAF):
            q = fma(c[first + j], c[first + j], q)
        sums[i] = q
    while leaves > 1:
        leaves //= 2
        for i in range(leaves):
            sums[i] = sums[2 * i] + sums[2 * i + 1]
    factor = ONE / np.sqrt(sums[0] * spec.inverse_dim + spec.rms_eps)
    weight = f32_at(spec.norm_weight_at, c.size)
    for j in range(c.size):
        c[j] = (c[j] * factor) * weight[j]


@jit
def rotate(x, position, spec):
    """Interleaved pairs of the last rope_dim columns."""
    prefer_wide_vectors()
    half = spec.rope_dim // 2
    cos_at = spec.cos_sin_at + np.int64(position) * spec.rope_dim * 4
    cos, sin = f32_at(cos_at, half), f32_at(cos_at + half * 4, half)
    pairs = x[x.size - spec.rope_dim :]
    for i in range(half):
        even, odd = pairs[2 * i], pairs[2 * i + 1]
        pairs[2 * i] = fma(even, cos[i], -(odd * sin[i]))
        pairs[2 * i + 1] = fma(even, sin[i], odd * cos[i])
