"""The step that closes no window: only the rows that later windows need move, from the input to the rings."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
from cutlass import Float32, Int32, cute

from kvfold_kernels.compress.cute import ops
from kvfold_kernels.compress.cute.step import Operands, Rows, append_blocks, append_vectors


@dataclass(frozen=True)
class AppendKernel:
    """Compile-time numbers of one variant. One vector a lane."""

    rows: Rows

    threads = 256
    """256 rows of 8 KiB take 1.5 µs with 128."""

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
        tensors = (windows, appends, counts, kv_score, rings, pages, ape, norm_weight, cos_sin)
        numbers = (max_windows, max_appends, page_entries, eps, amax_floor, exponent_floor, inverse_scale)
        self.kernel(tensors, numbers).launch(
            grid=[append_blocks(self.rows, max_appends, self.threads), 1, 1],
            block=[self.threads, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, tensors: tuple, numbers: tuple):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ops.let_next_grid_start()
        append_vectors(self.rows, Operands.of(tensors, numbers), [block * self.threads + thread])
