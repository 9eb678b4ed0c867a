"""The op: close a step's windows into entries, and keep the rows that later windows need.

For each window (rows of the ring first, then of the input; see `plan`), per column, in fp32:

    s = score + ape[position % ratio]         c = Σ softmax(s)·kv
    x = c · rsqrt(mean(c²) + eps) · weight    rotated at the entry's first own position
    entry = encode(x)                         stored at the window's slot of its page

With two halves (csa, indexer) the older `ratio` rows take the first half of their columns, the newer the second.
`reference` defines the order of every sum; other backends say where they differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvfold_kernels.compressor import Compressor

CompressFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Compressor], int]
"""compress(windows, appends, kv_score, rings, pages, compressor) → launches.

windows   int32 `[7, num_windows]`, see `plan`; 0 windows: only the rows are kept
appends   int32 `[2, num_appends]`
kv_score  bf16 or fp32 `[num_rows, row_width]`, contiguous, `[kv | score]`
rings     bf16 or fp32 `[num_rings, ring_rows, row_width]`, contiguous; fp32 unless the input is always bf16
pages     uint8 `[num_pages, page_bytes]`, rows page_bytes apart or more
Returns the number of kernel launches (CPU: calls). Writes nothing but the slots and ring rows that the plan names.
"""

FindNonFiniteFn = Callable[[torch.Tensor, int], tuple[int, int] | None]
"""find_non_finite(kv_score, num_tokens) → (row, column) of the first value that no step may hold, or None.

NaN anywhere, ±∞ in kv, +∞ in score; −∞ in score is a weight of 0. Rows ≥ num_tokens are padding and not looked at.
"""

FlagNonFiniteFn = Callable[[torch.Tensor, int, torch.Tensor], None]
"""flag_non_finite(kv_score, num_tokens, flag): the same on a device, without waiting for it.

flag int64 `[1]` becomes the smaller of itself and the flat index (row · row_width + column) of the first such value.
"""

__all__ = ["CompressFn", "FindNonFiniteFn", "FlagNonFiniteFn"]
