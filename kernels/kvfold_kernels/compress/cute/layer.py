"""A whole csa layer in one launch: the main compressor's windows and the indexer's, then both appends.

Both have blocks of 128 threads; a block asks in which of the four ranges of the grid it lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, cute

from kvfold_kernels.compress.cute import ops
from kvfold_kernels.compress.cute.overlap import OverlapKernel
from kvfold_kernels.compress.cute.step import LANES, Operands, append_blocks, append_vectors


@dataclass(frozen=True)
class LayerKernel:
    """Compile-time: the two kernels whose blocks share the grid."""

    main: OverlapKernel
    indexer: OverlapKernel

    def __post_init__(self) -> None:
        assert self.main.threads == self.indexer.threads

    @property
    def threads(self) -> int:
        return self.main.threads

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
        page_entries: Int32,
        eps: Float32,
        amax_floor: Float32,
        exponent_floor: Int32,
        inverse_scale: Float32,
        windows_2: cute.Tensor,
        appends_2: cute.Tensor,
        counts_2: cute.Tensor,
        kv_score_2: cute.Tensor,
        rings_2: cute.Tensor,
        pages_2: cute.Tensor,
        ape_2: cute.Tensor,
        norm_weight_2: cute.Tensor,
        cos_sin_2: cute.Tensor,
        max_windows_2: Int32,
        max_appends_2: Int32,
        page_entries_2: Int32,
        eps_2: Float32,
        amax_floor_2: Float32,
        exponent_floor_2: Int32,
        inverse_scale_2: Float32,
        stream: cuda.CUstream,
    ):
        first = (windows, appends, counts, kv_score, rings, pages, ape, norm_weight, cos_sin)
        second = (*(windows_2, appends_2, counts_2, kv_score_2, rings_2, pages_2, ape_2, norm_weight_2, cos_sin_2),)
        numbers = (max_windows, max_appends, page_entries, eps, amax_floor, exponent_floor, inverse_scale)
        numbers_2 = (
            *(max_windows_2, max_appends_2, page_entries_2, eps_2, amax_floor_2, exponent_floor_2, inverse_scale_2),
        )
        per_block, per_block_2 = self.main.windows_per_block, self.indexer.windows_per_block
        until_main = (max_windows + per_block - 1) // per_block
        until_indexer = until_main + (max_windows_2 + per_block_2 - 1) // per_block_2
        until_append = until_indexer + append_blocks(self.main.rows, max_appends, self.threads)
        blocks = until_append + append_blocks(self.indexer.rows, max_appends_2, self.threads)
        self.kernel(first, numbers, second, numbers_2, until_main, until_indexer, until_append).launch(
            grid=[blocks, 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
            min_blocks_per_mp=self.main.blocks_per_multiprocessor,
            preferred_smem_carveout=12,
        )

    @cute.kernel
    def kernel(
        self,
        first: tuple,
        numbers: tuple,
        second: tuple,
        numbers_2: tuple,
        until_main: Int32,
        until_indexer: Int32,
        until_append: Int32,
    ):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        partial = cute.arch.alloc_smem(Float32, 2 * LANES, 16).toint()
        if cute.arch.grid_dim()[0] <= self.main.early_blocks:
            ops.let_next_grid_start()
        if block < until_main:
            operands = Operands.of(first, numbers)
            local = thread // self.main.threads_per_window
            window = block * self.main.windows_per_block + local
            self.main.window(operands, window, thread % self.main.threads_per_window, local, partial)
        elif block < until_indexer:
            operands_2 = Operands.of(second, numbers_2)
            local_2 = thread // self.indexer.threads_per_window
            window_2 = (block - until_main) * self.indexer.windows_per_block + local_2
            self.indexer.window(operands_2, window_2, thread % self.indexer.threads_per_window, local_2, partial)
        elif block < until_append:
            vector = (block - until_indexer) * self.threads + thread
            append_vectors(self.main.rows, Operands.of(first, numbers), [vector])
        else:
            vector_2 = (block - until_append) * self.threads + thread
            append_vectors(self.indexer.rows, Operands.of(second, numbers_2), [vector_2])
