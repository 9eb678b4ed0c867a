"""Some tens of long windows (hca): as `tiles`, but a tile's rows come by bulk copies into shared memory.

That takes fewer registers, so that three blocks share a multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64, Uint8, cute

from kvfold_kernels import plan as p
from kvfold_kernels.compress.cute import ops
from kvfold_kernels.compress.cute.step import LANES, Operands, append_blocks, append_vectors, pool_rows
from kvfold_kernels.compress.cute.tile import COLUMNS, TILE, Tile
from kvfold_kernels.compress.cute.tiles import Opened, TilesKernel
from kvfold_kernels.geometry import GROUPS, LEAF

GROUP_BYTES = 3 * GROUPS * TILE * 4
SUMS_BYTES = 32
BARRIER_BYTES = 8


@dataclass(frozen=True)
class BoxesKernel(TilesKernel):
    """Compile-time numbers of one variant."""

    @property
    def tile(self) -> Tile:
        return Tile(self.geometry, self.rows)

    @property
    def dynamic_shared_bytes(self) -> int:
        return self.tile.num_bytes + GROUP_BYTES + SUMS_BYTES + 2 * BARRIER_BYTES

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
        atoms = self.tile.copy_atoms(kv_score, rings)
        window_blocks = max_windows * self.tiles
        clusters = max_windows + (append_blocks(self.rows, max_appends, self.threads) + self.tiles - 1) // self.tiles
        tensors = (windows, appends, counts, kv_score, rings, pages, ape, norm_weight, cos_sin)
        numbers = (max_windows, max_appends, page_entries, eps, amax_floor, exponent_floor, inverse_scale)
        self.boxes(atoms, tensors, numbers, window_blocks).launch(
            grid=[clusters * self.tiles, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.tiles, 1, 1],
            smem=self.dynamic_shared_bytes,
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.blocks_per_multiprocessor,
            preferred_smem_carveout=100,
        )

    @cute.kernel
    def boxes(self, atoms: tuple, tensors: tuple, numbers: tuple, window_blocks: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // LANES)
        lane = thread % LANES
        start = cute.arch.get_dyn_smem(Uint8, 128).toint()
        groups = start + self.tile.num_bytes
        sums = groups + GROUP_BYTES
        arrived = sums + SUMS_BYTES
        landing = (start, arrived + BARRIER_BYTES)
        ops.let_next_grid_start()
        operands = Operands.of(tensors, numbers)
        if block < window_blocks:
            window = block // self.tiles
            index = block - window * self.tiles
            if operands.closes(window) != 0:
                if thread == 0:
                    ops.barrier_init(arrived, 1)
                    ops.barrier_expect(arrived, 4 * self.tiles)
                    ops.barrier_init(landing[1], 1)
                ops.cluster_arrive()
                cute.arch.sync_threads()
                source = self.tile.source(operands, window)
                lane_map, box = self.tile.lane_map(atoms, lane), self.tile.box(operands, source, lane)
                ops.prefetch_map(lane_map, box.taken & Int32(warp == 0))
                opened = self.prepare(operands, window, index * TILE, thread)
                if warp == 0:
                    ops.barrier_expect_if(landing[1], self.tile.landing_bytes(source.num_ring), Int32(lane == 0))
                    self.tile.fetch(landing, lane_map, box, index)
                self.pool_tile(landing, opened, groups, warp, lane, source.num_ring)
                if thread < LANES:
                    self.close(operands, opened, index, thread, groups, sums, arrived)
            else:
                ops.wait_for_earlier_grids()
        else:
            append_vectors(self.rows, operands, [(block - window_blocks) * self.threads + thread])

    def prepare(self, operands: Operands, window, first_column, thread) -> Opened:
        """What no kernel writes, then wait."""
        geometry = self.geometry
        slot, position = operands.field(p.SLOT, window), operands.field(p.POSITION, window)
        ape = self.tile.ape_rows(operands, thread // LANES, first_column + thread % LANES * COLUMNS)
        closing = self.closing_column(first_column, thread)
        weight = ops.load_fp32(operands.norm_weight + 4 * Int64(closing), LEAF)
        rope_column = ops.asm("max.s32 $0, $1, 0;", [Int32], [closing - geometry.nope_dim])
        angle = operands.cos_sin + 4 * (Int64(position) * geometry.rope_dim + Int64(rope_column // 2))
        cos = ops.load_fp32(angle, LEAF // 2)
        sin = ops.load_fp32(angle + 2 * geometry.rope_dim, LEAF // 2)
        ops.wait_for_earlier_grids()
        return Opened(slot, [], ape, weight, cos, sin)

    def pool_tile(self, landing: tuple, opened: Opened, groups, group, lane, num_ring) -> None:
        """A group's m, l, o of a lane's columns → shared `[3, groups, tile]`."""
        ops.barrier_wait(landing[1], 0)
        scores, values = self.tile.read(landing[0], group, lane, num_ring)
        scores = [[ops.add(a, b) for a, b in zip(s, e, strict=True)] for s, e in zip(scores, opened.ape, strict=True)]
        partial = [pool_rows([s[c] for s in scores], [v[c] for v in values]) for c in range(COLUMNS)]
        at = groups + 4 * (group * TILE + lane * COLUMNS)
        for part in range(3):
            ops.shared_store(at + 4 * part * GROUPS * TILE, [column[part] for column in partial])
        ops.barrier(1, self.threads)
