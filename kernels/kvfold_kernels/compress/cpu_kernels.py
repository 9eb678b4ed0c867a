"""The CPU backend's kernels: what Python calls, without the GIL. Each works on a range [lo, hi), so that a caller may
share one out to threads. Offsets are int64."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from kvfold_kernels import geometry as g
from kvfold_kernels import plan as p
from kvfold_kernels.compress.cpu_encode import encode
from kvfold_kernels.compress.cpu_jit import (
    aligned,
    f32_at,
    jit,
    kernel,
    plan_at,
    pointer,
    prefer_wide_vectors,
    source_digest,
    spec_at,
    u16_at,
    u32_at,
    widen,
)
from kvfold_kernels.compress.cpu_pool import TILE, normalise, pool, rotate, state_size

_INFINITY_BF16, _INFINITY_FP32 = 0x7F80, 0x7F800000
# Bits without the sign, one less for a negative score: at least +∞'s if the value is bad, for −∞ in score is not.


@jit
def _worst_bf16(bits, is_score):
    prefer_wide_vectors()
    worst = np.int16(0)
    for j in range(bits.size):
        size = np.int16(np.int16(bits[j] & np.int16(0x7FFF)) + np.int16(np.int16(bits[j] >> 15) * is_score))
        worst = size if size > worst else worst
    return worst


@jit
def _worst_fp32(bits, is_score):
    prefer_wide_vectors()
    worst = np.int32(0)
    for j in range(bits.size):
        size = np.int32(np.int32(bits[j] & np.int32(0x7FFFFFFF)) + np.int32(np.int32(bits[j] >> 31) * is_score))
        worst = size if size > worst else worst
    return worst


def _kernels(digest: str) -> tuple[Any, Any, Any]:
    """The kernels name `digest` to have it in the key of their disk cache."""

    @kernel
    def close_windows(
        lo, hi, windows_at, stride, kv_score_at, bf16, rings_at, ring_bf16, pages_at, page_stride, compressor_at
    ):
        """Windows [lo, hi) of the plan → entries in their pages."""
        _ = digest
        prefer_wide_vectors()
        spec = spec_at(compressor_at)
        windows = plan_at(windows_at, p.WINDOW_FIELDS, stride)
        row, sums = aligned(spec.head_dim), aligned(spec.head_dim // g.LEAF)
        state = aligned(state_size(spec.groups, min(spec.head_dim, TILE)))
        for i in range(lo, hi):
            window = windows[:, i]
            pool(window, kv_score_at, bf16, rings_at, ring_bf16, spec, state, row)
            normalise(row, sums, spec)
            rotate(row, window[p.POSITION], spec)
            page = window[p.SLOT] // spec.page_entries
            entry = window[p.SLOT] - page * spec.page_entries
            page_at = pages_at + page * page_stride
            scales_at = page_at + spec.scale_offset + entry * spec.scale_bytes
            encode(row, page_at + entry * spec.value_bytes, scales_at, spec)

    @kernel
    def append_rows(lo, hi, appends_at, stride, kv_score_at, bf16, rings_at, ring_bf16, row_width):
        """Appends [lo, hi) of the plan: input rows → ring rows, bf16 widened if the ring is fp32."""
        _ = digest
        prefer_wide_vectors()
        appends = plan_at(appends_at, p.APPEND_FIELDS, stride)
        for i in range(lo, hi):
            source = np.int64(appends[p.APPEND_INPUT, i]) * row_width
            target = np.int64(appends[p.APPEND_RING, i]) * row_width
            if bf16 and not ring_bf16:
                narrow, wide = u16_at(kv_score_at + 2 * source, row_width), f32_at(rings_at + 4 * target, row_width)
                for j in range(row_width):
                    wide[j] = widen(narrow[j])
            else:
                item = 2 if bf16 else 4
                words = row_width * item // 4
                old, new = u32_at(kv_score_at + item * source, words), u32_at(rings_at + item * target, words)
                for j in range(words):
                    new[j] = old[j]

    @kernel
    def find_non_finite(lo, hi, kv_score_at, bf16, row_width):
        """Flat index of the first value of rows [lo, hi) that no step may hold, or −1."""
        _ = digest
        size = row_width // 2
        for part in range(2 * lo, 2 * hi):  # kv and score of a row in turn
            is_score, first = part % 2, part * size
            if bf16:
                narrow = numba.carray(pointer(kv_score_at + 2 * first, np.int16), (size,))
                if _worst_bf16(narrow, is_score) >= _INFINITY_BF16:
                    for j in range(size):
                        if _worst_bf16(narrow[j : j + 1], is_score) >= _INFINITY_BF16:
                            return first + j
            else:
                wide = numba.carray(pointer(kv_score_at + 4 * first, np.int32), (size,))
                if _worst_fp32(wide, is_score) >= _INFINITY_FP32:
                    for j in range(size):
                        if _worst_fp32(wide[j : j + 1], is_score) >= _INFINITY_FP32:
                            return first + j
        return -1

    return close_windows, append_rows, find_non_finite


close_windows, append_rows, find_non_finite = _kernels(source_digest())
