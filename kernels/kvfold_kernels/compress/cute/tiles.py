"""Few long windows (hca): a cluster of blocks a window, one block a tile of 64 columns, one launch.

A warp pools a group of rows. All its copies to shared memory are in flight at once: they take no registers, so three
blocks fit a multiprocessor. The block's first warp merges the groups; the blocks exchange their sums of squares through
each other's shared memory, and each norms and stores its own columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64, Uint8, cute

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
    tree,
)
from kvfold_kernels.compress.cute.tile import COLUMNS, TILE, Tile, merge_tile
from kvfold_kernels.geometry import GROUPS, LEAF, Geometry

ONE_FITS, TWO_FIT = 120_000, 100_000
"""Dynamic shared memory of a block of which one, or two, fit a multiprocessor (227 KiB). A cluster's blocks would else
share multiprocessors while others have nothing to do."""


class Opened(NamedTuple):
    """What one thread holds of a window before it computes."""

    slot: object
    position: object
    num_ring: object
    ape: list


@dataclass(frozen=True)
class TilesKernel:
    """Compile-time numbers of one variant."""

    geometry: Geometry
    rows: Rows
    writer: Writer

    threads = GROUPS * LANES

    @property
    def blocks_per_multiprocessor(self) -> int:
        return 2 if self.rows.mixed else 3

    @property
    def tiles(self) -> int:
        return self.geometry.head_dim // TILE

    @property
    def tile(self) -> Tile:
        return Tile(self.geometry, self.rows)

    @property
    def dynamic_shared_bytes(self) -> int:
        return self.tile.num_bytes

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
        shared_bytes = Int32(self.dynamic_shared_bytes)
        if max_windows <= max_clusters:
            shared_bytes = Int32(ONE_FITS)
        elif max_windows <= 2 * max_clusters:
            shared_bytes = Int32(TWO_FIT)
        self.kernel(tensors, numbers, window_blocks).launch(
            grid=[clusters * self.tiles, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.tiles, 1, 1],
            smem=shared_bytes,
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.blocks_per_multiprocessor,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def kernel(self, tensors: tuple, numbers: tuple, window_blocks: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        groups = cute.arch.alloc_smem(Float32, 3 * GROUPS * TILE, 16).toint()
        sums = cute.arch.alloc_smem(Float32, self.tiles, 16).toint()
        arrived = cute.arch.alloc_smem(Int64, 1, 8).toint()
        landing = cute.arch.get_dyn_smem(Uint8, 16).toint()
        ops.let_next_grid_start()
        operands = Operands.of(tensors, numbers)
        if block < window_blocks:
            window = block // self.tiles
            tile = block - window * self.tiles
            if operands.closes(window) != 0:
                if thread == 0:
                    ops.barrier_init(arrived, 1)
                ops.cluster_arrive()
                opened = self.open(operands, window, tile, thread, landing)
                if opened.slot >= 0:  # a branch, so that every load is under way before the first is used
                    self.pool(opened, groups, thread, landing)
                    if thread < LANES:
                        self.close(operands, opened, tile, thread, groups, sums, arrived)
            else:
                ops.wait_for_earlier_grids()
        else:
            append_vectors(self.rows, operands, [(block - window_blocks) * self.threads + thread])

    def open(self, operands: Operands, window, tile, thread, landing) -> Opened:
        """Fetch a group's rows, and read what they need."""
        group, lane = thread // LANES, thread % LANES
        source = self.tile.source(operands, window)
        slot, position = operands.field(p.SLOT, window), operands.field(p.POSITION, window)
        origin = self.tile.origin(operands, source, tile, group, lane)
        ape = self.tile.ape_rows(operands, group, tile * TILE + lane * COLUMNS)
        ops.wait_for_earlier_grids()
        self.tile.fetch_group(landing, origin, group, lane)
        return Opened(slot, position, source.num_ring, ape)

    def pool(self, opened: Opened, groups, thread, landing) -> None:
        """A group's m, l, o of a lane's columns → shared `[3, groups, tile]`."""
        ops.wait_for_copies()
        ops.warp_sync()
        scores, values = self.tile.read(landing, thread // LANES, thread % LANES, opened.num_ring)
        scores = [[ops.add(a, b) for a, b in zip(*row, strict=True)] for row in zip(scores, opened.ape, strict=True)]
        partial = [pool_rows([s[i] for s in scores], [v[i] for v in values]) for i in range(COLUMNS)]
        at = groups + 4 * (thread // LANES * TILE + thread % LANES * COLUMNS)
        for part in range(3):
            ops.shared_store(at + 4 * part * GROUPS * TILE, [column[part] for column in partial])
        ops.barrier(1, self.threads)

    def close(self, operands: Operands, opened: Opened, tile, lane, groups, sums, arrived) -> None:
        """Merge, norm, rotate, store: 4 columns a lane; the upper half warp only keeps the lower company."""
        geometry = self.geometry
        column = tile * TILE + lane % (TILE // LEAF) * LEAF
        place = operands.place(opened.slot, self.writer.format.value_bytes, self.writer.format.scale_bytes)
        c = merge_tile(groups, column - tile * TILE)
        squares = lane_sum(leaf_squares(c), TILE // LEAF)
        weight, cos, sin = self.tables(operands, column, opened.position)  # they come while the sums travel
        ops.barrier_expect_if(arrived, 4 * self.tiles, Int32(lane == 0))
        ops.cluster_wait()  # every block's barrier is set up
        ops.send_to_peer(sums + 4 * tile, arrived, squares, lane, Int32(lane < self.tiles))
        ops.barrier_wait(arrived, 0, "cluster")
        squares = tree([value for i in range(0, self.tiles, 4) for value in ops.shared_fp32(sums + 4 * i, 4)])
        x = normalise(c, squares, weight, geometry.head_dim, operands.eps)
        x = rotate(x, cos, sin, Int32(column >= geometry.nope_dim))
        self.writer.write(x, column, Int32(lane < TILE // LEAF), place, operands.floors)

    def tables(self, operands: Operands, column, position) -> tuple:
        """Norm weight, cos and sin of a lane's columns."""
        rope_column = ops.asm("max.s32 $0, $1, 0;", [Int32], [column - self.geometry.nope_dim])
        angle = operands.cos_sin + 4 * (Int64(position) * self.geometry.rope_dim + Int64(rope_column // 2))
        weight = ops.load_fp32(operands.norm_weight + 4 * Int64(column), LEAF)
        return weight, ops.load_fp32(angle, LEAF // 2), ops.load_fp32(angle + 2 * self.geometry.rope_dim, LEAF // 2)
