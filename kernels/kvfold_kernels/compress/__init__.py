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
from typing import Any

import torch

from kvfold_kernels.compressor import Compressor
from kvfold_kernels.plan import APPEND_FIELDS, WINDOW_FIELDS

CompressFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Compressor], int]
"""compress(windows, appends, kv_score, rings, pages, compressor) → launches.

windows   int32 `[7, num_windows]`, see `plan`; 0 windows: only the rows are kept
appends   int32 `[2, num_appends]`
kv_score  bf16 or fp32 `[num_rows, row_width]`, contiguous, `[kv | score]`
rings     bf16 or fp32 `[num_rings, ring_rows, row_width]`, contiguous; fp32 unless the input is always bf16
pages     uint8 `[num_pages, page_bytes]`, rows page_bytes apart or more
Returns the number of kernel launches (CPU: calls). Writes nothing but the slots and ring rows that the plan names.

Backends of devices take a seventh argument, counts: int32 `[2]` on the device, how many of the windows and appends are
real; None: all. Launched with room for more, as in a captured graph, blocks past the counts leave at once.
"""

CompressLayerFn = Callable[[tuple[Any, ...], tuple[Any, ...]], int]
"""compress_layer(main, indexer) → launches: a csa layer's two compressors, each with the operands of `compress`."""

FindNonFiniteFn = Callable[[torch.Tensor, int], tuple[int, int] | None]
"""find_non_finite(kv_score, num_tokens) → (row, column) of the first value that no step may hold, or None.

NaN anywhere, ±∞ in kv, +∞ in score; −∞ in score is a weight of 0. Rows ≥ num_tokens are padding and not looked at.
"""

FlagNonFiniteFn = Callable[[torch.Tensor, int, torch.Tensor], None]
"""flag_non_finite(kv_score, num_tokens, flag): the same on a device, without waiting for it.

flag `[1]`, int32 or int64 as the backend's NO_FLAG (the largest of its dtype) says, becomes the smaller of itself and
the flat index (row · row_width + column) of the first such value.
"""


def check_operands(
    windows: torch.Tensor,
    appends: torch.Tensor,
    kv_score: torch.Tensor,
    rings: torch.Tensor,
    pages: torch.Tensor,
    compressor: Compressor,
) -> None:
    """Raises ValueError for operands that are not what `CompressFn` says: a backend writes by address, not by trust."""
    geometry, layout = compressor.geometry, compressor.layout
    width = geometry.row_width
    if kv_score.ndim != 2 or kv_score.shape[1] != width or not kv_score.is_contiguous():
        raise ValueError(f"kv_score must be contiguous [num_rows, {width}], not {list(kv_score.shape)}")
    if rings.shape[1:] != (geometry.ring_rows, width) or not rings.is_contiguous():
        raise ValueError(f"rings must be contiguous [n, {geometry.ring_rows}, {width}], not {list(rings.shape)}")
    if pages.ndim != 2 or pages.shape[1] != layout.page_bytes or pages.dtype != torch.uint8 or pages.stride(1) != 1:
        raise ValueError(
            f"pages of {layout.format.name} must be uint8 [n, {layout.page_bytes}], "
            f"not {pages.dtype} {list(pages.shape)}"
        )
    if kv_score.dtype not in _INPUTS or rings.dtype not in (torch.float32, kv_score.dtype):
        raise ValueError(f"{kv_score.dtype} rows cannot go into {rings.dtype} rings")
    for name, plan, fields in (("windows", windows, WINDOW_FIELDS), ("appends", appends, APPEND_FIELDS)):
        if plan.ndim != 2 or plan.shape[0] != fields or plan.dtype != torch.int32:
            raise ValueError(f"{name} must be int32 [{fields}, n], not {plan.dtype} {list(plan.shape)}")


_INPUTS = (torch.bfloat16, torch.float32)

__all__ = ["CompressFn", "CompressLayerFn", "FindNonFiniteFn", "FlagNonFiniteFn", "check_operands"]
