"""The definition of `compress`: one window at a time, in numpy, fp32 in the canonical order or fp64. Never automatic.

Canonical order (fp32). fma(a, b, c) = a·b + c with one rounding; exp is rounded once; everything else rounds each step.

    pool      G groups of K / G consecutive rows (G = 8 for one half, else 1). Per column and group:
              m_g = max s;  rows ascending: e = exp(s − m_g), l_g = l_g + e, o_g = fma(e, kv, o_g), both from 0
              m = max m_g;  a_g = exp(m_g − m);  L = fma(l_g, a_g, L), O = fma(o_g, a_g, O), g ascending, both from 0
              c = O / L
              A maximum of −∞ counts as 0 in s − m (so e = 0); L = 0 gives c = 0; o_g and c are clamped to ±max fp32.
    norm      q = fma chain over 4 adjacent columns (first a plain product), then a binary tree over adjacent leaves;
              x = (c · (1 / √(q / D + eps))) · weight
    rotate    e' = fma(e, cos, −(o·sin)), o' = fma(e, sin, o·cos)
"""

from __future__ import annotations

import numpy as np
import torch

from kvfold_kernels import plan as p
from kvfold_kernels.compress import check_operands
from kvfold_kernels.compressor import Compressor
from kvfold_kernels.entry import encode
from kvfold_kernels.geometry import GROUPS, LEAF
from kvfold_kernels.pages import write_entries

Array = np.ndarray
_MAX = np.finfo(np.float32).max


def fma(a: Array, b: Array, c: Array) -> Array:
    """a·b + c, rounded once. fp32: the fp64 sum is rounded to odd first, so that rounding it again is harmless."""
    if c.dtype == np.float64:
        return a * b + c
    product = a.astype(np.float64) * b
    wide = c.astype(np.float64)
    total = product + wide
    with np.errstate(invalid="ignore"):
        back = total - product
        error = (product - (total - back)) + (wide - back)
        bits = total.view(np.int64)
        inexact = (error != 0) & np.isfinite(error) & (bits & 1 == 0)
        away = np.where((error > 0) == (total > 0), 1, -1)
    return np.where(inexact, (bits + away).view(np.float64), total).astype(np.float32)


def exp(x: Array) -> Array:
    return np.exp(x.astype(np.float64)).astype(x.dtype)


def pool(kv: Array, score: Array, groups: int) -> Array:
    """kv, score `[rows, columns]` of one dtype; a row of score −∞ has weight 0 → `[columns]`."""
    dtype = kv.dtype
    zero = np.zeros(kv.shape[1], dtype)
    maxima, sums, weighted = [], [], []
    for rows in np.split(np.arange(len(kv)), groups):
        maximum = score[rows].max(0)
        reference_point = np.where(maximum == -np.inf, zero, maximum)
        total, output = zero, zero
        for row in rows:
            e = exp(score[row] - reference_point)
            total = total + e
            output = fma(e, kv[row], output)
        maxima.append(maximum)
        sums.append(total)
        weighted.append(output.clip(-_MAX, _MAX) if dtype == np.float32 else output)
    overall = np.maximum.reduce(maxima)
    reference_point = np.where(overall == -np.inf, zero, overall)
    total, output = zero, zero
    for maximum, group_sum, group_output in zip(maxima, sums, weighted, strict=True):
        a = exp(maximum - reference_point)
        total = fma(group_sum, a, total)
        output = fma(group_output, a, output)
    pooled = np.divide(output, total, out=zero.copy(), where=total > 0)
    return pooled.clip(-_MAX, _MAX) if dtype == np.float32 else pooled


def sum_of_squares(c: Array) -> Array:
    leaves = c.reshape(-1, LEAF)
    q = leaves[:, 0] * leaves[:, 0]
    for i in range(1, LEAF):
        q = fma(leaves[:, i], leaves[:, i], q)
    while len(q) > 1:
        q = q[0::2] + q[1::2]
    return q[0]


def normalise(c: Array, weight: Array, eps: float) -> Array:
    mean = sum_of_squares(c) * c.dtype.type(1 / len(c))
    return c * (c.dtype.type(1) / np.sqrt(mean + c.dtype.type(eps))) * weight.astype(c.dtype)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Interleaved pairs of the last 2·len(cos) columns."""
    even, odd = x[-2 * len(cos) :: 2], x[-2 * len(cos) + 1 :: 2]
    rotated = x.copy()
    rotated[-2 * len(cos) :: 2] = fma(even, cos, -(odd * sin))
    rotated[-2 * len(cos) + 1 :: 2] = fma(even, sin, odd * cos)
    return rotated


def window(field: Array, kv_score: Array, ring: Array, compressor: Compressor, dtype: type) -> Array:
    """One window's normed and rotated row `[head_dim]`. field int32 `[7]`, one column of `Plan.windows`."""
    geometry = compressor.geometry
    dim, ratio, rows = geometry.head_dim, geometry.ratio, geometry.window_rows
    num_pad, num_ring = int(field[p.NUM_PAD]), int(field[p.NUM_RING])
    kv = np.zeros((rows, dim), dtype)
    score = np.full((rows, dim), -np.inf, dtype)
    ape = compressor.ape.numpy()
    for row in range(num_pad, rows):
        if row < num_pad + num_ring:
            source = ring[(field[p.RING_FIRST] + row - num_pad) % geometry.ring_rows]
        else:
            source = kv_score[field[p.INPUT_END] - (rows - 1) + row]
        half = slice(row // ratio * dim, (row // ratio + 1) * dim)
        kv[row] = source[: geometry.half_width][half]
        score[row] = source[geometry.half_width :][half].astype(dtype) + ape[row % ratio, half].astype(dtype)
    groups = GROUPS if geometry.halves == 1 and rows % GROUPS == 0 else 1
    with np.errstate(over="ignore"):
        x = normalise(pool(kv, score, groups), compressor.norm_weight.numpy(), compressor.rms_eps)
    cos, sin = np.split(compressor.cos_sin[field[p.POSITION]].numpy().astype(dtype), 2)
    return rotate(x, cos, sin)


def compress_rows(
    windows: torch.Tensor, kv_score: torch.Tensor, rings: torch.Tensor, compressor: Compressor, dtype: type = np.float32
) -> Array:
    """Normed and rotated rows `[num_windows, head_dim]` before quantising, in `dtype` (np.float32 or np.float64)."""
    rows, ring = kv_score.float().numpy(), rings
    result = np.empty((windows.shape[1], compressor.geometry.head_dim), dtype)
    for i, field in enumerate(windows.numpy().T):
        result[i] = window(field, rows, ring[field[p.RING_SLOT]].float().numpy(), compressor, dtype)
    return result


def compress(
    windows: torch.Tensor,
    appends: torch.Tensor,
    kv_score: torch.Tensor,
    rings: torch.Tensor,
    pages: torch.Tensor,
    compressor: Compressor,
) -> int:
    """See `kvfold_kernels.compress.CompressFn`."""
    check_operands(windows, appends, kv_score, rings, pages, compressor)
    if windows.shape[1]:
        rows = compress_rows(windows, kv_score, rings, compressor)
        values, scales = encode(torch.from_numpy(rows), compressor)
        write_entries(pages, windows[p.SLOT].long(), compressor.layout, values, scales)
    flat = rings.view(-1, rings.shape[-1])
    flat[appends[p.APPEND_RING].long()] = kv_score[appends[p.APPEND_INPUT].long()].to(rings.dtype)
    return int(appends.shape[1] > 0) + int(windows.shape[1] > 0)


def find_non_finite(kv_score: torch.Tensor, num_tokens: int) -> tuple[int, int] | None:
    """See `kvfold_kernels.compress.FindNonFiniteFn`."""
    rows = kv_score[:num_tokens]
    bad = ~torch.isfinite(rows)
    half = rows.shape[1] // 2
    bad[:, half:] &= rows[:, half:] != float("-inf")
    found = bad.nonzero()
    return (int(found[0, 0]), int(found[0, 1])) if len(found) else None
