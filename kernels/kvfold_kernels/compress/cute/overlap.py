"""Overlapping windows (csa, indexer): pool, norm, rotate, quantise, store and append in one launch.

A window's columns lie side by side in a few warps, `columns` a lane; all its rows' loads are in flight at once. Windows
first, then blocks that append. Whatever no kernel writes (plan, ape, norm weight, cos and sin) is read before the grid
dependency is met.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64, const_expr, cute

from kvfold_kernels import plan as p
from kvfold_kernels.compress.cute import ops
from kvfold_kernels.compress.cute.encode import Writer, rotate
from kvfold_kernels.compress.cute.step import (
    LANES,
    Operands,
    Rows,
    append_blocks,
    append_vectors,
    divide,
    lane_sum,
    leaf_squares,
    normalise,
    pool_rows,
    ring_row,
    tree,
    window_fields,
)
from kvfold_kernels.geometry import Geometry


class _Opened(NamedTuple):
    """What one thread holds of a window before it computes."""

    lane: object
    column: object
    slot: object
    num_pad: object
    num_ring: object
    rows: list
    ape: list
    weight: list
    cos: list
    sin: list


@dataclass(frozen=True)
class OverlapKernel:
    """Compile-time numbers of one variant."""

    geometry: Geometry
    rows: Rows
    writer: Writer
    columns: int
    windows_per_block: int
    blocks_per_multiprocessor: int
    early_blocks: int
    """A larger grid lets the next one start only when the one before it has ended: where a multiprocessor has room for
    many blocks, those of three grids would crowd each other."""

    @property
    def threads_per_window(self) -> int:
        return self.geometry.head_dim // self.columns

    @property
    def threads(self) -> int:
        return self.threads_per_window * self.windows_per_block

    @cute.jit
    def __call__(
        self,
        windows: cute.Tensor,
        appends: cute.Tensor,
        counts: cute.Tensor,
        kv_score: cute.Tensor,
        rings: cute.Tensor,
        pages: cute.Tensor,
        ape: cute.Tensor,
        norm_weight: cute.Tensor,
        cos_sin: cute.Tensor,
        max_windows: Int32,
        max_appends: Int32,
        max_clusters: Int32,
        page_entries: Int32,
        eps: Float32,
        amax_floor: Float32,
        exponent_floor: Int32,
        inverse_scale: Float32,
        stream: cuda.CUstream,
    ):
        window_blocks = (max_windows + self.windows_per_block - 1) // self.windows_per_block
        blocks = window_blocks + append_blocks(self.rows, max_appends, self.threads)
        tensors = (windows, appends, counts, kv_score, rings, pages, ape, norm_weight, cos_sin)
        numbers = (max_windows, max_appends, page_entries, eps, amax_floor, exponent_floor, inverse_scale)
        self.kernel(tensors, numbers, window_blocks).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.blocks_per_multiprocessor,
            preferred_smem_carveout=12,
        )

    @cute.kernel
    def kernel(self, tensors: tuple, numbers: tuple, window_blocks: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        partial = cute.arch.alloc_smem(Float32, 2 * LANES, 16).toint()
        if cute.arch.grid_dim()[0] <= self.early_blocks:
            ops.let_next_grid_start()
        operands = Operands.of(tensors, numbers)
        if block < window_blocks:
            local = thread // self.threads_per_window
            window = block * self.windows_per_block + local
            self.window(operands, window, thread % self.threads_per_window, local, partial)
        else:
            append_vectors(self.rows, operands, [(block - window_blocks) * self.threads + thread])

    @cute.jit
    def window(self, operands: Operands, window, lane, local, partial):
        """One window; `lane` is the thread within it, `local` which of the block's windows it is."""
        if operands.closes(window) != 0:
            field = window_fields(operands, window)
            tables = self.tables(operands, lane)
            if field[p.NUM_RING] == 0:  # all but the first two that a request closes in this step
                self.entry(operands, field, tables, lane, local, partial, False)
            else:
                self.entry(operands, field, tables, lane, local, partial, True)
        else:
            ops.wait_for_earlier_grids()
            ops.let_next_grid_start()

    @cute.jit
    def entry(self, operands: Operands, field: dict, tables: tuple, lane, local, partial, ring: const_expr):
        """`ring` at compile time: some of the rows may lie in the ring."""
        opened = self.open(operands, field, tables, lane, ring)
        if opened.slot >= 0:  # a branch, so that every load is under way before the first is used
            self.close(operands, opened, local, partial, ring)

    def tables(self, operands: Operands, lane) -> tuple:
        """ape and norm weight of a lane's columns."""
        column = lane * self.columns
        ape = [self.ape(operands, row, column) for row in range(self.geometry.window_rows)]
        return ape, ops.load_fp32(operands.norm_weight + Int64(column * 4), self.columns)

    def open(self, operands: Operands, field: dict, tables: tuple, lane, ring: bool) -> _Opened:
        """Read what is needed of one window."""
        geometry = self.geometry
        column = lane * self.columns
        sources = [self.source(operands, field, row, column, ring) for row in range(geometry.window_rows)]
        rope_column = ops.asm("max.s32 $0, $1, 0;", [Int32], [column - geometry.nope_dim])
        angle = operands.cos_sin + 4 * (Int64(field[p.POSITION]) * geometry.rope_dim + Int64(rope_column // 2))
        cos = ops.load_fp32(angle, self.columns // 2)
        sin = ops.load_fp32(angle + 2 * geometry.rope_dim, self.columns // 2)
        ops.wait_for_earlier_grids()
        ops.let_next_grid_start()
        rows = [self.load(*source, ring) for source in sources]
        return _Opened(lane, column, field[p.SLOT], field[p.NUM_PAD], field[p.NUM_RING], rows, *tables, cos, sin)

    def close(self, operands: Operands, opened: _Opened, local, partial, ring: bool) -> None:
        """Pool, norm, rotate, store."""
        geometry, column = self.geometry, opened.column
        pooled = self.pool(opened, self.rows.mixed and ring)
        squares = self.sum_over_window(leaf_squares(pooled), local, opened.lane, partial)
        x = normalise(pooled, squares, opened.weight, geometry.head_dim, operands.eps)
        x = rotate(x, opened.cos, opened.sin, Int32(column >= geometry.nope_dim))
        place = operands.place(opened.slot, self.writer.format.value_bytes, self.writer.format.scale_bytes)
        self.writer.write(x, column, Int32(1), place, operands.floors)

    def source(self, operands: Operands, field: dict, row: int, column, ring: bool):
        """Address of a row's kv columns, and whether it lies in the ring. A padding row reads the window's last row."""
        num_pad, rows, ring_rows = field[p.NUM_PAD], self.rows, operands.ring_rows
        padding = Int32(row < num_pad)
        start = (row // self.geometry.ratio) * self.geometry.head_dim + column
        input_row = field[p.INPUT_END] - (self.geometry.window_rows - 1 - row) * (1 - padding)
        given = operands.inputs + (Int64(input_row) * rows.width + Int64(start)) * rows.input_bytes
        if not ring:
            return given, Int32(0)
        from_ring = self.in_ring(row, num_pad, field[p.NUM_RING])
        flat = field[p.RING_SLOT] * ring_rows + ring_row(field[p.RING_FIRST], row - num_pad, ring_rows)
        kept = operands.rings + (Int64(flat) * rows.width + Int64(start)) * rows.ring_bytes
        return ops.select64(from_ring, kept, given), from_ring

    def in_ring(self, row: int, num_pad, num_ring):
        return Int32(row >= num_pad) & Int32(row < num_pad + num_ring)

    def ape(self, operands: Operands, row: int, column) -> list:
        ratio = self.geometry.ratio
        start = row % ratio * self.geometry.half_width + row // ratio * self.geometry.head_dim
        return ops.load_fp32(operands.ape + 4 * Int64(start + column), self.columns)

    def load(self, address, from_ring, ring: bool) -> tuple:
        """Raw words of a row's score and kv columns."""
        rows, half_width = self.rows, self.geometry.half_width
        if rows.mixed and ring:
            step = ops.select64(from_ring, Int64(half_width * rows.ring_bytes), Int64(half_width * rows.input_bytes))
            return tuple(ops.load_mixed_words(at, from_ring) for at in (address + step, address))
        count = self.columns * rows.input_bytes // 4
        return tuple(ops.load_words(at, count) for at in (address + half_width * rows.input_bytes, address))

    def pool(self, opened: _Opened, mixed: bool) -> list:
        scores, values, num_pad = [], [], opened.num_pad
        for row, words in enumerate(opened.rows):
            if mixed:  # only now: before the last load it would wait for the first
                words = [ops.widen(each, self.in_ring(row, num_pad, opened.num_ring)) for each in words]
            score, value = (self.fp32(each, mixed) for each in words)
            score = [ops.add(a, b) for a, b in zip(score, opened.ape[row], strict=True)]
            if row < self.geometry.window_rows - self.geometry.ratio:  # an entry's own rows are never padding
                score = [ops.select(Int32(row < num_pad), -float("inf"), s) for s in score]
            scores.append(score)
            values.append(value)
        pooled = []
        for column in range(self.columns):
            _, total, output = pool_rows([s[column] for s in scores], [v[column] for v in values])
            pooled.append(divide(output, total))
        return pooled

    def fp32(self, words: list, widened: bool) -> list:
        if self.rows.input_bytes == 4 or widened:
            return [ops.from_bits(word) for word in words]
        return [value for word in words for value in ops.unpack_bf16(word)]

    def sum_over_window(self, squares, local, lane, partial):
        """Tree over adjacent lanes, then over the window's warps."""
        squares = lane_sum(squares, min(LANES, self.threads_per_window))
        warps = self.threads_per_window // LANES
        if warps <= 1:
            return squares
        start = partial + local * (4 * warps)
        ops.shared_store(start + 4 * (lane // LANES), [squares])
        ops.barrier(local + 1, self.threads_per_window)
        return tree(ops.shared_fp32(start, warps))
