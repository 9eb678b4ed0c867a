"""Device code, first half: rows of windows → pooled rows, in `reference`'s order of every sum.

A tile is `[X, columns]`: with one group of rows X are windows, else the groups of one window. Either way each of the X
takes consecutive rows in ascending order, and groups are merged in ascending order. Offsets into tensors are int64.
"""
# ruff: noqa: N803, N806, RUF005  constants are in capitals

import triton
import triton.language as tl

from kvfold_kernels import plan as p

INPUT_END = tl.constexpr(p.INPUT_END)
NUM_PAD = tl.constexpr(p.NUM_PAD)
NUM_RING = tl.constexpr(p.NUM_RING)
RING_SLOT = tl.constexpr(p.RING_SLOT)
RING_FIRST = tl.constexpr(p.RING_FIRST)
MAX_FP32 = tl.constexpr(3.4028234663852886e38)
UNROLLED_ROWS = tl.constexpr(16)
"""Most rows of a group that are held in registers; longer groups are read twice."""


@triton.jit
def _or_zero(maximum):
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _finite(x):
    return tl.minimum(tl.maximum(x, -MAX_FP32), MAX_FP32)


@triton.jit
def _row(
    row,
    source,
    kv_score,
    rings,
    column,
    RING_ROWS: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ONCE: tl.constexpr,
):
    """Score and kv `[X, columns]` of row `[X, 1]` of each window: from the ring where that has it, else from the input.

    A padding row is not read: its score is −∞. PADDED: whether the row may be one.
    """
    input_first, ring_offset, ring_row, first_live, first_input = source
    index = ring_offset + row
    index = tl.where(index >= RING_ROWS, index - RING_ROWS, index)
    in_ring = rings + (ring_row + index) * (2 * HALF_WIDTH)
    in_input = kv_score + (input_first + row).to(tl.int64) * (2 * HALF_WIDTH)
    kept, live = row < first_input, row >= first_live
    if kv_score.dtype == rings.dtype:
        at = tl.where(kept, in_ring, in_input) + column
        if PADDED:
            mask = tl.broadcast_to(live, at.shape)
            score = tl.load(at + HALF_WIDTH, mask=mask, other=float("-inf"), eviction_policy=ONCE)
            kv = tl.load(at, mask=mask, other=0.0, eviction_policy=ONCE)
        else:
            score = tl.load(at + HALF_WIDTH, eviction_policy=ONCE)
            kv = tl.load(at, eviction_policy=ONCE)
    else:
        in_ring += column
        in_input += column
        kept = tl.broadcast_to(kept, in_ring.shape)
        from_ring = kept & live
        from_input = (kept == 0) & live
        ring_score = tl.load(in_ring + HALF_WIDTH, mask=from_ring, other=float("-inf")).to(tl.float32)
        input_score = tl.load(in_input + HALF_WIDTH, mask=from_input, other=float("-inf")).to(tl.float32)
        ring_kv = tl.load(in_ring, mask=from_ring, other=0.0).to(tl.float32)
        input_kv = tl.load(in_input, mask=from_input, other=0.0).to(tl.float32)
        score = tl.where(kept, ring_score, input_score)
        kv = tl.where(kept, ring_kv, input_kv)
    return score, kv


@triton.jit
def weigh(
    first_row,
    source,
    kv_score,
    rings,
    ape,
    column,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    HALVES: tl.constexpr,
    RING_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
    STREAM: tl.constexpr,
):
    """Maximum, Σ e and Σ e·kv of rows first_row … first_row + ROWS − 1 of each window, `[X, columns]` each."""
    ONCE: tl.constexpr = "evict_first" if STREAM else ""
    OFTEN: tl.constexpr = "evict_last" if STREAM else ""
    HALF_WIDTH: tl.constexpr = HALVES * DIM
    if ROWS <= UNROLLED_ROWS:
        rows = ()
        for i in tl.static_range(ROWS):
            at = column + i // RATIO * DIM
            may_pad = (HALVES == 2) & (i < RATIO)
            rows = rows + (_row(first_row + i, source, kv_score, rings, at, RING_ROWS, HALF_WIDTH, may_pad, ONCE),)
        scores = ()
        for i in tl.static_range(ROWS):
            at = ape + (first_row + (i % RATIO)) * HALF_WIDTH + (column + i // RATIO * DIM)
            scores = scores + (rows[i][0].to(tl.float32) + tl.load(at, eviction_policy=OFTEN),)
        maximum = scores[0]
        for i in tl.static_range(1, ROWS):
            maximum = tl.maximum(maximum, scores[i])
        origin = _or_zero(maximum)
        total = tl.zeros_like(maximum)
        output = tl.zeros_like(maximum)
        for i in tl.static_range(ROWS):
            e = tl.exp(scores[i] - origin)
            total = total + e
            output = tl.fma(e, rows[i][1].to(tl.float32), output)
    else:
        maximum = tl.full((first_row.shape[0], column.shape[1]), float("-inf"), tl.float32)
        for i in range(ROWS):
            at = column + i // RATIO * DIM
            score, kv = _row(first_row + i, source, kv_score, rings, at, RING_ROWS, HALF_WIDTH, HALVES == 2, "")
            bias = tl.load(ape + (first_row + i % RATIO) * HALF_WIDTH + at)
            maximum = tl.maximum(maximum, score.to(tl.float32) + bias)
        origin = _or_zero(maximum)
        total = tl.zeros_like(maximum)
        output = tl.zeros_like(maximum)
        for i in range(ROWS):
            at = column + i // RATIO * DIM
            score, kv = _row(first_row + i, source, kv_score, rings, at, RING_ROWS, HALF_WIDTH, HALVES == 2, "")
            bias = tl.load(ape + (first_row + i % RATIO) * HALF_WIDTH + at)
            e = tl.exp(score.to(tl.float32) + bias - origin)
            total = total + e
            output = tl.fma(e, kv.to(tl.float32), output)
    return maximum, total, _finite(output)


@triton.jit
def _eight(x):
    """`[8, columns]` → its eight rows."""
    COLUMNS: tl.constexpr = x.shape[1]
    even, odd = tl.split(tl.reshape(tl.trans(x), (COLUMNS, 4, 2)))
    x04, x26 = tl.split(tl.reshape(even, (COLUMNS, 2, 2)))
    x15, x37 = tl.split(tl.reshape(odd, (COLUMNS, 2, 2)))
    x0, x4 = tl.split(x04)
    x2, x6 = tl.split(x26)
    x1, x5 = tl.split(x15)
    x3, x7 = tl.split(x37)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _merge(maximum, total, output):
    """Groups `[8, columns]` in ascending order → L, O `[columns]`."""
    top = _or_zero(tl.max(maximum, axis=0))
    scale = _eight(tl.exp(maximum - top[None, :]))
    totals = _eight(total)
    outputs = _eight(output)
    merged_total = tl.zeros_like(top)
    merged_output = tl.zeros_like(top)
    for i in tl.static_range(8):
        merged_total = tl.fma(totals[i], scale[i], merged_total)
        merged_output = tl.fma(outputs[i], scale[i], merged_output)
    return merged_total, merged_output


@triton.jit
def quotient(total, output):
    """O / L, 0 where L is."""
    some = total > 0
    return tl.where(some, _finite(tl.div_rn(output, tl.where(some, total, 1.0))), 0.0)


@triton.jit
def source_of(windows, stride, window, ROWS: tl.constexpr, RING_ROWS: tl.constexpr):
    """Where the rows of windows `[X]` lie, `[X, 1]` each."""
    at = windows + window
    end = tl.load(at + INPUT_END * stride)
    num_pad = tl.load(at + NUM_PAD * stride)
    num_ring = tl.load(at + NUM_RING * stride)
    ring_row = tl.load(at + RING_SLOT * stride).to(tl.int64) * RING_ROWS
    ring_offset = tl.load(at + RING_FIRST * stride) - num_pad
    first = end - (ROWS - 1)
    return first[:, None], ring_offset[:, None], ring_row[:, None], num_pad[:, None], (num_pad + num_ring)[:, None]


@triton.jit
def pool_groups(
    source,
    start,
    kv_score,
    rings,
    ape,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    RING_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STREAM: tl.constexpr,
):
    """Columns [start, start + COLUMNS) of one window of a single-half kind, `[COLUMNS]`."""
    ROWS: tl.constexpr = RATIO // GROUPS
    first_row = (tl.arange(0, GROUPS) * ROWS)[:, None]
    column = start + tl.arange(0, COLUMNS)[None, :]
    parts = weigh(first_row, source, kv_score, rings, ape, column, RATIO, DIM, 1, RING_ROWS, ROWS, STREAM)
    total, output = _merge(parts[0], parts[1], parts[2])
    return quotient(total, output)
