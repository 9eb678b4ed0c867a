"""Many long windows (hca): persistent clusters, one block a tile of 64 columns, tiles streamed through shared memory.

    producer warp    window by window: bulk tensor copies of the tile's rows into the next free stage
    8 pooling warps  one group of rows each; their ape rows stay in registers for the whole launch
    2 finishing warps   one window each, in turn: merge the groups, exchange sums of squares within the cluster, norm,
                     rotate, quantise, store; several, because the exchange is latency and not work
    append warp      copies the rows that later windows need

A window's 8 tiles lie in one cluster, so the sum of squares needs no second launch and no scratch memory. Stages and
the groups' buffers are handed over by barriers in shared memory; a phase is the parity of how often one was used.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, Int64, Uint8, cute

from kvfold_kernels import plan as p
from kvfold_kernels.compress.cute import ops
from kvfold_kernels.compress.cute.encode import Writer, rotate
from kvfold_kernels.compress.cute.step import (
    LANES,
    Operands,
    Rows,
    append_vectors,
    lane_sum,
    leaf_squares,
    normalise,
    pool_rows,
    tree,
)
from kvfold_kernels.compress.cute.tile import COLUMNS, KEPT_INPUT_BYTES, KEPT_RING_BYTES, TILE, Source, Tile, merge_tile
from kvfold_kernels.geometry import GROUPS, LEAF, Geometry

BUFFERS = 2
"""Windows between the pooling warps and the finishing warps; one finishing warp each."""
PRODUCER = GROUPS
FINISHER = PRODUCER + 1
APPENDER = FINISHER + BUFFERS
APPEND_WARPS = 1
APPENDS_AT_ONCE = 4
EXCHANGES = 2 * BUFFERS
"""Places for a window's sums of squares, two for each finishing warp, used in turn: a block that sends for its next
window but one has received every block's sum of the next, so all have read the last."""
SUMS_BYTES = 32
WARPS = APPENDER + APPEND_WARPS
BARRIER_BYTES = 8
GROUP_BYTES = 3 * GROUPS * TILE * 4


@dataclass(frozen=True)
class Shared:
    """Addresses in shared memory, built from one base."""

    base: object
    stages: int
    stage_bytes: int

    @property
    def total(self) -> int:
        barriers = (2 * self.stages + 2 * BUFFERS + EXCHANGES) * BARRIER_BYTES
        return self.stages * self.stage_bytes + BUFFERS * GROUP_BYTES + EXCHANGES * SUMS_BYTES + barriers

    def stage(self, index):
        return self.base + index * self.stage_bytes

    def groups(self, index):
        return self.base + self.stages * self.stage_bytes + index * GROUP_BYTES

    def sums(self, index):
        return self.groups(BUFFERS) + index * SUMS_BYTES

    def _barrier(self, index):
        return self.sums(EXCHANGES) + index * BARRIER_BYTES

    def full(self, stage):
        return self._barrier(stage)

    def free(self, stage):
        return self._barrier(self.stages + stage)

    def pooled(self, buffer):
        return self._barrier(2 * self.stages + buffer)

    def merged(self, buffer):
        return self._barrier(2 * self.stages + BUFFERS + buffer)

    def arrived(self, exchange):
        return self._barrier(2 * self.stages + 2 * BUFFERS + exchange)


def _strided(start, step) -> list:
    return [start + m * step for m in range(APPENDS_AT_ONCE)]


@dataclass(frozen=True)
class StreamKernel:
    """Compile-time numbers of one variant."""

    geometry: Geometry
    rows: Rows
    writer: Writer
    stages: int

    threads = WARPS * LANES

    @property
    def tiles(self) -> int:
        return self.geometry.head_dim // TILE

    @property
    def tile(self) -> Tile:
        return Tile(self.geometry, self.rows)

    @property
    def dynamic_shared_bytes(self) -> int:
        return self.shared(0).total

    def shared(self, base) -> Shared:
        return Shared(base, self.stages, self.tile.num_bytes)

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
        clusters = max_windows
        if max_clusters < max_windows:
            clusters = max_clusters
        tensors = (windows, appends, counts, kv_score, rings, pages, ape, norm_weight, cos_sin)
        numbers = (max_windows, max_appends, page_entries, eps, amax_floor, exponent_floor, inverse_scale)
        self.kernel(atoms, tensors, numbers, clusters).launch(
            grid=[clusters * self.tiles, 1, 1],
            block=[self.threads, 1, 1],
            cluster=[self.tiles, 1, 1],
            smem=self.dynamic_shared_bytes,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, atoms: tuple, tensors: tuple, numbers: tuple, clusters: Int32):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        warp = cute.arch.make_warp_uniform(thread // LANES)
        lane = thread % LANES
        cluster = block // self.tiles
        index = block - cluster * self.tiles
        shared = self.shared(cute.arch.get_dyn_smem(Uint8, 128).toint())
        ops.let_next_grid_start()
        operands = Operands.of(tensors, numbers)
        num_windows, num_appends = operands.limits()
        mine = (num_windows - cluster + clusters - 1) // clusters
        if num_windows <= cluster:
            mine = Int32(0)
        if thread == 0:
            self.set_up(shared)
        ops.cluster_arrive()
        cute.arch.sync_threads()
        if warp < GROUPS:
            ape = self.tile.ape_rows(operands, warp, index * TILE + lane * COLUMNS)
            num_ring = self.num_ring(operands, cluster)
            ops.wait_for_earlier_grids()
            for i in range(mine):
                following_ring = self.num_ring(operands, cluster + (i + 1) * clusters)
                self.pool(shared, i, warp, lane, ape, num_ring)
                num_ring = following_ring
        if warp == PRODUCER:
            window_map = self.tile.window_map(atoms)
            ops.prefetch_map(window_map, Int32(lane == 0))
            input_once = self.tile.past_l2(operands, self.rows.input_bytes, KEPT_INPUT_BYTES)
            ring_once = self.tile.past_l2(operands, self.rows.ring_bytes, KEPT_RING_BYTES)
            end, num_ring, ring_slot, ring_first = self.tile.source(operands, cluster)
            lane_map = self.tile.lane_map(atoms, lane)
            ops.prefetch_map(lane_map, Int32(num_ring > 0))
            ops.wait_for_earlier_grids()
            for i in range(mine):
                following = self.tile.source(operands, cluster + (i + 1) * clusters)
                source = Source(end, num_ring, ring_slot, ring_first)
                stage = i % self.stages
                ops.barrier_wait(shared.free(stage), (i // self.stages & 1) ^ 1)
                landing = (shared.stage(stage), shared.full(stage))
                ops.barrier_expect_if(landing[1], self.tile.landing_bytes(source.num_ring), Int32(lane == 0))
                if source.num_ring != 0:
                    box = self.tile.box(operands, source, lane)
                    if ring_once != 0:
                        self.tile.fetch(landing, lane_map, box, index, once=True)
                    else:
                        self.tile.fetch(landing, lane_map, box, index)
                elif input_once != 0:
                    self.tile.fetch_window(landing, window_map, source, index, lane, once=True)
                else:
                    self.tile.fetch_window(landing, window_map, source, index, lane)
                end, num_ring, ring_slot, ring_first = following
        if (warp >= FINISHER) & (warp < APPENDER):
            buffer = warp - FINISHER
            table = self.finishing_columns(operands, index, lane)
            first, step = cluster + buffer * clusters, BUFFERS * clusters
            slot, position = self.target(operands, first)
            ops.cluster_wait()  # every block's barriers are set up
            ops.wait_for_earlier_grids()
            for k in range((mine - buffer + BUFFERS - 1) // BUFFERS):
                following = self.target(operands, first + (k + 1) * step)
                self.finish(operands, shared, buffer, k, (slot, position), index, lane, table)
                slot, position = following
        if warp >= APPENDER:
            step = clusters * (self.tiles * APPEND_WARPS * LANES)
            first = block * (APPEND_WARPS * LANES) + thread - APPENDER * LANES
            vectors = num_appends * self.rows.ring_vectors
            for k in range((vectors - first + step * APPENDS_AT_ONCE - 1) // (step * APPENDS_AT_ONCE)):
                start = first + k * (step * APPENDS_AT_ONCE)
                append_vectors(self.rows, operands, _strided(start, step))

    def set_up(self, shared: Shared) -> None:
        for stage in range(self.stages):
            ops.barrier_init(shared.full(stage), 1)
            ops.barrier_init(shared.free(stage), GROUPS)
        for buffer in range(BUFFERS):
            ops.barrier_init(shared.pooled(buffer), GROUPS)
            ops.barrier_init(shared.merged(buffer), 1)
        for exchange in range(EXCHANGES):
            ops.barrier_init(shared.arrived(exchange), 1)

    def num_ring(self, operands: Operands, window):
        """Rows of a window that are fp32 beside bf16 ones; 0 where all are of one dtype."""
        return operands.field(p.NUM_RING, operands.existing(window)) if self.rows.mixed else Int32(0)

    def target(self, operands: Operands, window) -> tuple:
        window = operands.existing(window)
        return operands.field(p.SLOT, window), operands.field(p.POSITION, window)

    def pool(self, shared: Shared, i, group, lane, ape: list, num_ring) -> None:
        """A group's m, l, o of a lane's columns."""
        stage, buffer = i % self.stages, i % BUFFERS
        ops.barrier_wait(shared.full(stage), (i // self.stages) & 1)
        scores, values = self.tile.read(shared.stage(stage), group, lane, num_ring)
        ops.warp_sync()
        ops.barrier_arrive(shared.free(stage), Int32(lane == 0))
        scores = [[ops.add(a, b) for a, b in zip(s, e, strict=True)] for s, e in zip(scores, ape, strict=True)]
        partial = [pool_rows([s[c] for s in scores], [v[c] for v in values]) for c in range(COLUMNS)]
        ops.barrier_wait(shared.merged(buffer), ((i // BUFFERS) & 1) ^ 1)
        target = shared.groups(buffer) + 4 * (group * TILE + lane * COLUMNS)
        for part in range(3):
            ops.shared_store(target + 4 * part * GROUPS * TILE, [column[part] for column in partial])
        ops.warp_sync()
        ops.barrier_arrive(shared.pooled(buffer), Int32(lane == 0))

    def finishing_columns(self, operands: Operands, tile, lane) -> tuple:
        """4 columns a lane (the upper half warp keeps the lower company), their weights, and where their angles lie."""
        column = tile * TILE + lane % (TILE // LEAF) * LEAF
        rope_column = ops.asm("max.s32 $0, $1, 0;", [Int32], [column - self.geometry.nope_dim])
        angle = operands.cos_sin + 4 * Int64(rope_column // 2)
        return column, ops.load_fp32(operands.norm_weight + 4 * Int64(column), LEAF), angle

    def finish(self, operands: Operands, shared: Shared, buffer, k, target, tile, lane, table) -> None:
        """Merge, norm, rotate, store a tile's row: the k-th of this buffer."""
        geometry = self.geometry
        column, weight, angle = table
        slot, position = target
        angle = angle + 4 * Int64(position) * geometry.rope_dim
        cos = ops.load_fp32(angle, LEAF // 2)
        sin = ops.load_fp32(angle + 2 * geometry.rope_dim, LEAF // 2)
        place = operands.place(slot, self.writer.format.value_bytes, self.writer.format.scale_bytes)
        ops.barrier_wait(shared.pooled(buffer), k & 1)
        c = merge_tile(shared.groups(buffer), column - tile * TILE)
        ops.warp_sync()
        ops.barrier_arrive(shared.merged(buffer), Int32(lane == 0))
        squares = lane_sum(leaf_squares(c), TILE // LEAF)
        exchange = buffer * 2 + (k & 1)
        sums, arrived = shared.sums(exchange), shared.arrived(exchange)
        ops.barrier_expect_if(arrived, 4 * self.tiles, Int32(lane == 0))
        ops.send_to_peer(sums + 4 * tile, arrived, squares, lane, Int32(lane < self.tiles))
        ops.barrier_wait(arrived, (k >> 1) & 1, "cluster")
        sums = [ops.shared_fp32(sums + 4 * start, 4) for start in range(0, self.tiles, 4)]
        x = normalise(c, tree([value for part in sums for value in part]), weight, geometry.head_dim, operands.eps)
        x = rotate(x, cos, sin, Int32(column >= geometry.nope_dim))
        self.writer.write(x, column, Int32(lane < TILE // LEAF), place, operands.floors)
