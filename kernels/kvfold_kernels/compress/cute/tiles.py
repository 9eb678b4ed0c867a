"""Few long windows (hca): a cluster of blocks a window, one block a tile of 64 columns, one launch.

A warp pools a group of rows in registers, all its loads in flight at once; the block's first warp merges the groups;
the blocks exchange their sums of squares through each other's shared memory, and each norms and stores its own columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64, cute

from kvfold_kernels import plan as p
from kvfold_kernels.compress.cute import ops
from kvfold_kernels.compress.cute.encode import Writer, rotate
from kvfold_kernels.compress.cute.step import (
    LANES,
    Operands,
    Rows,
    append_blocks,
    append_vectors,
    lane_sum,
    leaf_squares,
    normalise,
    pool_rows,
    ring_row,
    tree,
)
from kvfold_kernels.compress.cute.tile import COLUMNS, TILE, merge_tile
from kvfold_kernels.geometry import GROUPS, LEAF, Geometry


class Opened(NamedTuple):
    """What one thread holds of a window before it computes."""

    slot: object
    rows: list
    ape: list
    weight: list
    cos: list
    sin: list


@dataclass(frozen=True)
class TilesKernel:
    """Compile-time numbers of one variant."""

    geometry: Geometry
    rows: Rows
    writer: Writer
    blocks_per_multiprocessor: int

    threads = GROUPS * LANES

    @property
    def tiles(self) -> int:
        return self.geometry.head_dim // TILE

    @property
    def group_rows(self) -> int:
        return self.geometry.window_rows // GROUPS

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
        window_blocks = max_windows * self.tiles
        clusters = max_windows + (append_blocks(self.rows, max_appends, self.threads) + self.tiles - 1) // self.tiles
        tensors = (windows, appends, counts, kv_score, rings, pages, ape, norm_weight, cos_sin)
        numbers = (max_windows, max_appends, page_entries, eps, amax_floor, exponent_floor, inverse_scale)
        self.kernel(tensors, numbers, window_blocks).launch(
            grid=[clusters * self.tiles, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.tiles, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.blocks_per_multiprocessor,
            preferred_smem_carveout=25,
        )

    @cute.kernel
    def kernel(self, tensors: tuple, numbers: tuple, window_blocks: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        groups = cute.arch.alloc_smem(Float32, 3 * GROUPS * TILE, 16).toint()
        sums = cute.arch.alloc_smem(Float32, self.tiles, 16).toint()
        arrived = cute.arch.alloc_smem(Int64, 1, 8).toint()
        ops.let_next_grid_start()
        operands = Operands.of(tensors, numbers)
        if block < window_blocks:
            window = block // self.tiles
            tile = block - window * self.tiles
            if operands.closes(window) != 0:
                if thread == 0:
                    ops.barrier_init(arrived, 1)
                    ops.barrier_expect(arrived, 4 * self.tiles)
                ops.cluster_arrive()
                opened = self.open(operands, window, tile * TILE, thread)
                if opened.slot >= 0:  # a branch, so that every load is under way before the first is used
                    self.pool(opened, groups, thread)
                    if thread < LANES:
                        self.close(operands, opened, tile, thread, groups, sums, arrived)
            else:
                ops.wait_for_earlier_grids()
        else:
            append_vectors(self.rows, operands, [(block - window_blocks) * self.threads + thread])

    def open(self, operands: Operands, window, first_column, thread) -> Opened:
        """Read a group's rows of one lane's columns, and what the first warp closes the window with."""
        geometry = self.geometry
        group, column = thread // LANES, first_column + thread % LANES * COLUMNS
        field = {name: operands.field(name, window) for name in range(p.WINDOW_FIELDS)}
        sources, ape = [], []
        for i in range(self.group_rows):
            row = group * self.group_rows + i
            sources.append(self.source(operands, field, row, column))
            ape.append(ops.load_fp32(operands.ape + 4 * Int64(row * self.geometry.half_width + column), COLUMNS))
        closing = self.closing_column(first_column, thread)
        weight = ops.load_fp32(operands.norm_weight + 4 * Int64(closing), LEAF)
        rope_column = ops.asm("max.s32 $0, $1, 0;", [Int32], [closing - geometry.nope_dim])
        angle = operands.cos_sin + 4 * (Int64(field[p.POSITION]) * geometry.rope_dim + Int64(rope_column // 2))
        cos = ops.load_fp32(angle, LEAF // 2)
        sin = ops.load_fp32(angle + 2 * geometry.rope_dim, LEAF // 2)
        ops.wait_for_earlier_grids()
        rows = [self.load(*source) for source in sources]
        return Opened(field[p.SLOT], rows, ape, weight, cos, sin)

    def closing_column(self, first_column, thread):
        """4 columns a lane; the upper half warp only keeps the lower company."""
        return first_column + thread % (TILE // LEAF) * LEAF

    def source(self, operands: Operands, field: dict, row, column) -> tuple:
        """Address of a row's kv columns, and whether it lies in the ring."""
        rows, ring_rows = self.rows, operands.ring_rows
        from_ring = Int32(row < field[p.NUM_RING])
        flat = field[p.RING_SLOT] * ring_rows + ring_row(field[p.RING_FIRST], row, ring_rows)
        ring = operands.rings + (Int64(flat) * rows.width + Int64(column)) * rows.ring_bytes
        input_row = field[p.INPUT_END] - (self.geometry.window_rows - 1) + row
        given = operands.inputs + (Int64(input_row) * rows.width + Int64(column)) * rows.input_bytes
        return ops.select64(from_ring, ring, given), from_ring

    def load(self, address, from_ring) -> tuple:
        """Raw words of a row's score and kv columns."""
        rows, half_width = self.rows, self.geometry.half_width
        if rows.mixed:
            step = ops.select64(from_ring, Int64(half_width * rows.ring_bytes), Int64(half_width * rows.input_bytes))
            return tuple(ops.load_mixed2(at, from_ring) for at in (address + step, address))
        count = COLUMNS * rows.input_bytes // 4
        score = ops.load_words(address + half_width * rows.input_bytes, count)
        return score, ops.load_words(address, count)

    def fp32(self, words: list) -> list:
        if self.rows.input_bytes == 4 or self.rows.mixed:
            return [ops.from_bits(word) for word in words]
        return [value for word in words for value in ops.unpack_bf16(word)]

    def pool(self, opened: Opened, groups, thread) -> None:
        """A group's m, l, o of a lane's columns → shared `[3, groups, tile]`."""
        scores, values = [], []
        for (score, value), ape in zip(opened.rows, opened.ape, strict=True):
            scores.append([ops.add(a, b) for a, b in zip(self.fp32(score), ape, strict=True)])
            values.append(self.fp32(value))
        partial = [pool_rows([s[i] for s in scores], [v[i] for v in values]) for i in range(COLUMNS)]
        at = groups + 4 * (thread // LANES * TILE + thread % LANES * COLUMNS)
        for part in range(3):
            ops.shared_store(at + 4 * part * GROUPS * TILE, [column[part] for column in partial])
        ops.barrier(1, self.threads)

    def close(self, operands: Operands, opened: Opened, tile, lane, groups, sums, arrived) -> None:
        """Merge, norm, rotate, store."""
        geometry = self.geometry
        column = self.closing_column(tile * TILE, lane)
        place = operands.place(opened.slot, self.writer.format.value_bytes, self.writer.format.scale_bytes)
        c = merge_tile(groups, column - tile * TILE)
        squares = lane_sum(leaf_squares(c), TILE // LEAF)
        ops.cluster_wait()  # every block's barrier is set up
        ops.send_to_peer(sums + 4 * tile, arrived, squares, lane, Int32(lane < self.tiles))
        ops.barrier_wait(arrived, 0, "cluster")
        squares = tree([value for i in range(0, self.tiles, 4) for value in ops.shared_fp32(sums + 4 * i, 4)])
        x = normalise(c, squares, opened.weight, geometry.head_dim, operands.eps)
        x = rotate(x, opened.cos, opened.sin, Int32(column >= geometry.nope_dim))
        self.writer.write(x, column, Int32(lane < TILE // LEAF), place, operands.floors)
