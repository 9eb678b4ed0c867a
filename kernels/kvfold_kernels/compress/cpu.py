"""CPU backend: the kernels of `cpu_kernels`, shared out to a few threads when there is enough to do.

Follows `reference` operation by operation; results differ from it only where the last bit of an `exp` does, and never
with batching, chunking, order or the number of threads.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch

from kvfold_kernels import geometry as g
from kvfold_kernels.compress import check_operands
from kvfold_kernels.compress import cpu_kernels as kernels
from kvfold_kernels.compress.cpu_encode import FORMATS
from kvfold_kernels.compress.cpu_jit import SPEC
from kvfold_kernels.compressor import Compressor
from kvfold_kernels.entry import ceil_log2

_GRAIN_BYTES = 1 << 19
"""Bytes of input below which another thread costs more than it saves (a submit takes about 30 µs)."""
_CHUNKS_PER_THREAD = 4
"""A thread that is held up leaves its chunks to the others."""


class _Threads:
    """The calling thread and a pool of num − 1 others."""

    def __init__(self, num: int):
        self.num = num
        self._pool = ThreadPoolExecutor(num - 1, thread_name_prefix="kvfold-cpu") if num > 1 else None

    def run(self, kernel: Callable[..., int | None], total: int, item_bytes: int, *arguments: int) -> list[int | None]:
        """kernel(lo, hi, *arguments) over [0, total) in ascending chunks; their results in some order.

        Chunks that have not begun when a kernel returns ≥ 0 are left out.
        """
        parts = min(self.num, total * item_bytes // _GRAIN_BYTES, total)
        if parts <= 1 or self._pool is None:
            return [kernel(0, total, *arguments)]
        chunks = min(parts * _CHUNKS_PER_THREAD, total)
        bounds = [total * i // chunks for i in range(chunks + 1)]
        todo = iter(list(itertools.pairwise(bounds)))
        results: list[int | None] = []

        def drain() -> None:
            for lo, hi in todo:
                results.append(found := kernel(lo, hi, *arguments))
                if found is not None and found >= 0:
                    for _ in todo:
                        pass

        others = [self._pool.submit(drain) for _ in range(parts - 1)]
        drain()
        for other in others:
            other.result()
        return results


_threads = _Threads(os.cpu_count() or 1)


def set_num_threads(num: int) -> None:
    """Threads that share a step's windows, the caller's included; the default is the number of CPUs."""
    global _threads
    if num < 1:
        raise ValueError(f"the number of threads must be at least 1, not {num}")
    _threads = _Threads(num)


os.register_at_fork(after_in_child=lambda: set_num_threads(_threads.num))  # a child has none of its parent's threads


class _Prepared(NamedTuple):
    """A compressor as the kernels take it; `keep` owns the memory behind the addresses."""

    spec_at: int
    window_bytes: int
    keep: tuple[np.ndarray | torch.Tensor, ...]


_prepared: dict[int, tuple[weakref.ref[Compressor], _Prepared]] = {}
"""By id: hashing a compressor takes longer than a decode step's kernel."""


def _prepare(compressor: Compressor) -> _Prepared:
    found = _prepared.get(id(compressor))
    if found is not None and found[0]() is compressor:
        return found[1]
    key = id(compressor)
    prepared = _spec(compressor)
    _prepared[key] = weakref.ref(compressor, lambda _: _prepared.pop(key, None)), prepared
    return prepared


def _spec(compressor: Compressor) -> _Prepared:
    geometry, layout = compressor.geometry, compressor.layout
    ape, weight, table = (t.contiguous() for t in (compressor.ape, compressor.norm_weight, compressor.cos_sin))
    rows, fmt = geometry.window_rows, layout.format
    by_scale = compressor.scale_floor == "scale"
    amax_floor = np.finfo(np.float32).tiny if by_scale else g.AMAX_FLOOR
    if fmt.name == "indexer_mxfp4":
        amax_floor = g.MXFP4_AMAX_FLOOR
    spec = np.zeros(1, SPEC)
    spec[0] = (
        *(t.data_ptr() for t in (ape, weight, table)),
        *(geometry.ratio, geometry.head_dim, geometry.rope_dim, geometry.halves),
        *(g.GROUPS if geometry.halves == 1 and rows % g.GROUPS == 0 else 1, geometry.ring_rows),
        *(layout.entries, fmt.value_bytes, fmt.scale_bytes, layout.scale_offset),
        *(FORMATS.index(fmt.name), compressor.indexer_profile == "sglang" and fmt.name.startswith("indexer")),
        int(ceil_log2(torch.tensor(g.AMAX_FLOOR), 1.0)) if by_scale else -g.UE8M0_BIAS,
        *(amax_floor, float(torch.tensor(1.0) / compressor.fp8_scale), 1 / geometry.head_dim, compressor.rms_eps),
    )
    return _Prepared(spec.ctypes.data, rows * geometry.row_width * 4 // geometry.halves, (spec, ape, weight, table))


def compress(
    windows: torch.Tensor,
    appends: torch.Tensor,
    kv_score: torch.Tensor,
    rings: torch.Tensor,
    pages: torch.Tensor,
    compressor: Compressor,
) -> int:
    """See `kvfold_kernels.compress.CompressFn`."""
    check_operands(windows, appends, kv_score, rings, pages, compressor)
    num_windows, num_appends = windows.shape[1], appends.shape[1]
    data = kv_score.data_ptr(), kv_score.dtype is torch.bfloat16, rings.data_ptr(), rings.dtype is torch.bfloat16
    if num_windows:
        prepared = _prepare(compressor)
        plan = _plan_address(windows)
        page = pages.data_ptr(), pages.stride(0), prepared.spec_at
        _threads.run(kernels.close_windows, num_windows, prepared.window_bytes, *plan, *data, *page)
    if num_appends:
        width = kv_score.shape[1]
        _threads.run(kernels.append_rows, num_appends, 4 * width, *_plan_address(appends), *data, width)
    return (num_windows > 0) + (num_appends > 0)


def _plan_address(plan: torch.Tensor) -> tuple[int, int]:
    assert plan.stride(1) == 1 or plan.shape[1] == 1, "a plan's columns must be adjacent"
    return plan.data_ptr(), plan.stride(0)


def find_non_finite(kv_score: torch.Tensor, num_tokens: int) -> tuple[int, int] | None:
    """See `kvfold_kernels.compress.FindNonFiniteFn`."""
    width = kv_score.shape[1]
    arguments = kv_score.data_ptr(), kv_score.dtype is torch.bfloat16, width
    row_bytes = width * kv_score.element_size()
    results = _threads.run(kernels.find_non_finite, num_tokens, row_bytes, *arguments)
    found = [i for i in results if i is not None and i >= 0]
    return divmod(min(found), width) if found else None
