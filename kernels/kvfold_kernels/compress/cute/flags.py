"""The check of a step's input: the first value that no step may hold, found on the device without waiting for it."""

from __future__ import annotations

from dataclasses import dataclass

import cuda.bindings.driver as cuda
from cutlass import Int32, Int64, cute

from kvfold_kernels.compress.cute import ops
from kvfold_kernels.compress.cute.step import VECTOR_BYTES, Rows

VECTORS = 4
"""Vectors of a thread, all in flight at once."""


@dataclass(frozen=True)
class FlagsKernel:
    """Compile-time numbers of one variant: flag = min(flag, flat index of NaN, ±∞ in kv, +∞ in score)."""

    rows: Rows
    threads: int = 256

    @cute.jit
    def __call__(self, kv_score: cute.Tensor, num_tokens: Int32, flag: cute.Tensor, stream: cuda.CUstream):
        per_block = self.threads * VECTORS
        blocks = (num_tokens * self.rows.input_vectors + per_block - 1) // per_block
        self.kernel(kv_score, num_tokens, flag).launch(
            grid=[blocks, 1, 1], block=[self.threads, 1, 1], stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, kv_score: cute.Tensor, num_tokens: Int32, flag: cute.Tensor):
        thread, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        ops.let_next_grid_start()
        first = block * (self.threads * VECTORS) + thread
        vectors = [first + k * self.threads for k in range(VECTORS)]
        lives = [Int32(vector < num_tokens * self.rows.input_vectors) for vector in vectors]
        start = kv_score.iterator.toint()
        ops.wait_for_earlier_grids()
        loaded = [
            ops.load_words_if(start + Int64(vector) * VECTOR_BYTES, 4, live)
            for vector, live in zip(vectors, lives, strict=True)
        ]
        for vector, words in zip(vectors, loaded, strict=True):
            self.report(flag.iterator.toint(), vector, words)

    def report(self, flag, vector, words: list) -> None:
        per_vector = VECTOR_BYTES // self.rows.input_bytes
        score = Int32(vector % self.rows.input_vectors >= self.rows.input_vectors // 2)
        worst = Int32(per_vector)
        values = [ops.from_bits(word) for word in words]
        if self.rows.input_bytes == 2:
            values = [value for word in words for value in ops.unpack_bf16(word)]
        for i in reversed(range(per_vector)):
            worst = ops.select_int(_refused(ops.bits(values[i]), score), Int32(i), worst)
        ops.lower(flag, Int64(vector) * per_vector + Int64(worst), Int32(worst < per_vector))


def _refused(word, score):
    """No number, and not the −∞ that a score may be."""
    special = Int32((word & 0x7F800000) == 0x7F800000)
    return special & (1 - (score & Int32(word == Int32(-0x800000))))
