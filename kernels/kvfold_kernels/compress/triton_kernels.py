"""Kernels of the `triton` backend: one source for CUDA, ROCm and the interpreter.

    append_rows     input rows that later windows need → rings
    close_windows   windows → entries, whole, in one program; then the appends
    pool_windows    first launch of two: a column tile of one window → fp32 scratch; then the appends
    finish_windows  second launch: scratch → entries
    flag_values     the smallest index of a value that no step may hold

`counts`, where given, says how many windows and appends there are; programs past them leave at once. EARLY: a kernel
may start before the stream's earlier ones have ended. It reads its plan and the weights, which no kernel writes, then
waits; every program waits, so that the end of a kernel means the end of all before it.
"""
# ruff: noqa: N803, N806  constants are in capitals

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kvfold_kernels import plan as p
from kvfold_kernels.compress.triton_encode import entry_operands, finish
from kvfold_kernels.compress.triton_pool import pool_groups, quotient, source_of, weigh

APPEND_INPUT = tl.constexpr(p.APPEND_INPUT)
APPEND_RING = tl.constexpr(p.APPEND_RING)
NONE = tl.constexpr(2**31 - 1)


@triton.jit
def _wait(EARLY: tl.constexpr):
    """With early launches: let the next kernel start, then wait until the earlier ones have ended."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _append(program, appends, stride, num_appends, kv_score, rings, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    """One input row → its ring row."""
    if program < num_appends:
        column = tl.arange(0, WIDTH)
        source = tl.load(appends + APPEND_INPUT * stride + program).to(tl.int64) * WIDTH
        target = tl.load(appends + APPEND_RING * stride + program).to(tl.int64) * WIDTH
        _wait(EARLY)
        tl.store(rings + target + column, tl.load(kv_score + source + column).to(rings.dtype.element_ty))
    else:
        _wait(EARLY)


@triton.jit(do_not_specialize=["stride", "num_appends"], do_not_specialize_on_alignment=["appends", "counts"])
def append_rows(appends, stride, num_appends, counts, kv_score, rings, WIDTH: tl.constexpr, EARLY: tl.constexpr):
    if counts is not None:
        num_appends = tl.load(counts + 1)
    _append(tl.program_id(0), appends, stride, num_appends, kv_score, rings, WIDTH, EARLY)


@triton.jit(
    do_not_specialize=[
        "windows_stride", "appends_stride", "num_windows", "num_appends", "window_programs", "page_entries"
    ],
    do_not_specialize_on_alignment=["windows", "appends", "counts"],
)  # fmt: skip
def close_windows(
    windows,
    windows_stride,
    num_windows,
    window_programs,
    appends,
    appends_stride,
    num_appends,
    counts,
    kv_score,
    rings,
    ape,
    norm_weight,
    cos_sin,
    rms_eps,
    inverse_scale,
    pages,
    page_stride,
    page_entries,
    scratch,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    HALVES: tl.constexpr,
    RING_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    WINDOWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STREAM: tl.constexpr,
    FORMAT: tl.constexpr,
    SGLANG: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    LOWEST: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs [0, window_programs) close WINDOWS windows each, the others append a row each.

    With several groups a program pools one window, COLUMNS at a time, by way of the window's row of the scratch.
    """
    WIDTH: tl.constexpr = 2 * HALVES * DIM
    program = tl.program_id(0)
    if counts is not None:
        num_windows = tl.load(counts)
        num_appends = tl.load(counts + 1)
    if program >= window_programs:
        _append(program - window_programs, appends, appends_stride, num_appends, kv_score, rings, WIDTH, EARLY)
    elif program * WINDOWS < num_windows:
        # The last program may repeat the last window: the same bytes to the same place.
        window = tl.minimum(program * WINDOWS + tl.arange(0, WINDOWS), num_windows - 1)
        column = tl.arange(0, DIM)[None, :]
        if not STREAM:  # early: a shorter chain of loads; late: fewer registers, so more programs at once
            operands = entry_operands(
                windows, windows_stride, window, norm_weight, cos_sin, pages, page_stride, page_entries,
                DIM, ROPE, VALUE_BYTES, SCALE_BYTES,
            )  # fmt: skip
        if GROUPS == 1:
            source = source_of(windows, windows_stride, window, HALVES * RATIO, RING_ROWS)
            _wait(EARLY)
            parts = weigh(
                tl.zeros((WINDOWS, 1), tl.int32), source, kv_score, rings, ape, column,
                RATIO, DIM, HALVES, RING_ROWS, HALVES * RATIO, STREAM,
            )  # fmt: skip
            c = quotient(parts[1], parts[2])
        else:
            source = source_of(windows, windows_stride, program + tl.zeros((GROUPS,), tl.int32), RATIO, RING_ROWS)
            _wait(EARLY)
            row = scratch + program.to(tl.int64) * DIM
            for start in range(0, DIM, COLUMNS):
                pooled = pool_groups(
                    source, start, kv_score, rings, ape, RATIO, DIM, RING_ROWS, GROUPS, COLUMNS, STREAM
                )
                tl.store(row + start + tl.arange(0, COLUMNS), pooled)
            tl.debug_barrier()
            c = tl.load(row + column)
        if STREAM:
            operands = entry_operands(
                windows, windows_stride, window, norm_weight, cos_sin, pages, page_stride, page_entries,
                DIM, ROPE, VALUE_BYTES, SCALE_BYTES,
            )  # fmt: skip
        finish(c, operands, rms_eps, inverse_scale, FORMAT, SGLANG, AMAX_FLOOR, LOWEST, ROPE)
    else:
        _wait(EARLY)


@triton.jit(
    do_not_specialize=["windows_stride", "appends_stride", "num_windows", "num_appends", "window_programs", "band"],
    do_not_specialize_on_alignment=["windows", "appends", "counts"],
)
def pool_windows(
    windows,
    windows_stride,
    num_windows,
    window_programs,
    appends,
    appends_stride,
    num_appends,
    counts,
    kv_score,
    rings,
    ape,
    scratch,
    band,
    RATIO: tl.constexpr,
    DIM: tl.constexpr,
    RING_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STREAM: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Programs [0, window_programs) pool COLUMNS columns of a window each, the others append a row each.

    Adjacent programs take one column tile of `band` windows, then the next tile of these: a multiprocessor that gets
    several of them finds its tile of ape in the first-level cache.
    """
    SPLITS: tl.constexpr = DIM // COLUMNS
    program = tl.program_id(0)
    window = program // (SPLITS * band) * band + program % band
    if counts is not None:
        num_windows = tl.load(counts)
        num_appends = tl.load(counts + 1)
    if program >= window_programs:
        _append(program - window_programs, appends, appends_stride, num_appends, kv_score, rings, 2 * DIM, EARLY)
    elif window < num_windows:
        source = source_of(windows, windows_stride, window + tl.zeros((GROUPS,), tl.int32), RATIO, RING_ROWS)
        start = program // band % SPLITS * COLUMNS
        _wait(EARLY)
        pooled = pool_groups(source, start, kv_score, rings, ape, RATIO, DIM, RING_ROWS, GROUPS, COLUMNS, STREAM)
        tl.store(scratch + window.to(tl.int64) * DIM + start + tl.arange(0, COLUMNS), pooled)
    else:
        _wait(EARLY)


@triton.jit(
    do_not_specialize=["windows_stride", "num_windows", "page_entries"],
    do_not_specialize_on_alignment=["windows", "counts"],
)
def finish_windows(
    windows,
    windows_stride,
    num_windows,
    counts,
    scratch,
    norm_weight,
    cos_sin,
    rms_eps,
    inverse_scale,
    pages,
    page_stride,
    page_entries,
    DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    SGLANG: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    LOWEST: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """A program a window."""
    program = tl.program_id(0)
    if counts is not None:
        num_windows = tl.load(counts)
    if program < num_windows:
        operands = entry_operands(
            windows, windows_stride, program + tl.zeros((1,), tl.int32), norm_weight, cos_sin,
            pages, page_stride, page_entries, DIM, ROPE, VALUE_BYTES, SCALE_BYTES,
        )  # fmt: skip
        _wait(EARLY)
        c = tl.load(scratch + program.to(tl.int64) * DIM + tl.arange(0, DIM)[None, :])
        finish(c, operands, rms_eps, inverse_scale, FORMAT, SGLANG, AMAX_FLOOR, LOWEST, ROPE)
    else:
        _wait(EARLY)


@triton.jit(do_not_specialize=["num_values"])
def flag_values(kv_score, num_values, flag, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """flag = min(flag, flat index of the first NaN, ±∞ in kv or +∞ in score)."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(kv_score + index, mask=index < num_values, other=0.0).to(tl.float32)
    is_score = index % WIDTH >= WIDTH // 2
    bad = (x != x) | (x == float("inf")) | ((x == float("-inf")) & (is_score == 0))
    first = tl.min(tl.where(bad, index, NONE))
    if first != NONE:
        tl.atomic_min(flag, first.to(tl.int32))
