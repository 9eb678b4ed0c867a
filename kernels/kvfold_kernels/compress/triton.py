"""`compress` in Triton: one set of kernels for CUDA and ROCm.

    csa, indexer, short ratios     one launch: appends, and a program for one or a few whole windows
    hca                            one launch, a program a window; or two: a program a window and column tile, then a
                                   program a window that norms, rotates, quantises and stores
    no window in the step          one launch that only appends

The sums follow `reference`'s order in every variant, so that they may be mixed over one request's life. They differ
from it where exp does: here it is 2^(x·log2 e), a few ulp off.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from kvfold_kernels import geometry as g
from kvfold_kernels.compress import triton_kernels
from kvfold_kernels.compress.triton_tiling import (
    Tiling,
    append_warps,
    choose_tiling,
    entry_constants,
    launch_options,
    num_warps,
    pool_constants,
    register_limit,
)
from kvfold_kernels.compressor import Compressor

kernels: Any = triton_kernels  # to a type checker, a kernel takes neither options nor unpacked arguments

IS_ROCM = torch.version.hip is not None
"""The only place where CUDA and ROCm part; torch calls devices of both `cuda`."""
NO_FLAG = 2**31 - 1
"""What a flag holds while no bad value was seen."""
FLAG_BLOCK, FLAG_WARPS = 4096, 8


@dataclass(frozen=True, slots=True)
class _Device:
    num_sms: int
    wavefront: int
    early: bool
    hopper: bool
    options: dict[str, Any]

    def options_of(self, tiling: Tiling) -> dict[str, Any]:
        return self.options | register_limit(self.hopper, tiling)


@functools.cache
def _device(device: torch.device) -> _Device:
    if device.type != "cuda":  # the interpreter
        return _Device(1, 32, False, False, {})
    properties = torch.cuda.get_device_properties(device)
    early = not IS_ROCM and properties.major >= 9
    wavefront = properties.warp_size if IS_ROCM else 32
    hopper = not IS_ROCM and properties.major == 9
    return _Device(properties.multi_processor_count, wavefront, early, hopper, launch_options(IS_ROCM, early))


@dataclass(frozen=True, slots=True)
class _Constants:
    pool: dict[str, Any]
    entry: dict[str, Any]


@functools.lru_cache(maxsize=256)
def _constants(geometry: g.Geometry, fmt: g.EntryFormat, scale_floor: str, profile: str) -> _Constants:
    return _Constants(pool_constants(geometry), entry_constants(geometry, fmt, scale_floor, profile))


_scratch: dict[torch.device, list[torch.Tensor]] = {}
"""fp32 scratch of each device, the last one in use. Smaller ones stay: a captured graph may hold their addresses."""


def reserve_scratch(device: torch.device, num_windows: int, head_dim: int) -> torch.Tensor:
    """Pooled rows between the two launches, fp32 `[≥ num_windows · head_dim]`. Grows by doubling, so a steady state
    allocates nothing; call it before a capture with the most windows there will be. One stream at a time uses it."""
    held = _scratch.setdefault(device, [])
    if not held or held[-1].numel() < num_windows * head_dim:
        size = 1 << (num_windows * head_dim - 1).bit_length()
        held.append(torch.empty(size, dtype=torch.float32, device=device))
    return held[-1]


def compress(
    windows: torch.Tensor,
    appends: torch.Tensor,
    kv_score: torch.Tensor,
    rings: torch.Tensor,
    pages: torch.Tensor,
    compressor: Compressor,
    counts: torch.Tensor | None = None,
) -> int:
    """See `kvfold_kernels.compress.CompressFn`; all tensors on one device, launched on its current stream.

    counts  int32 `[2]` on the device: how many of the windows and appends are real. None: all. A captured graph is
            launched for the most there can be; programs past the counts leave at once.
    Windows, appends and counts must have been written by copies, or by kernels that have ended: they are read before
    the stream's earlier kernels have.
    """
    num_windows, num_appends = windows.shape[1], appends.shape[1]
    device = _device(kv_score.device)
    if num_windows == 0:
        return _append_only(appends, counts, kv_score, rings, device)
    assert windows.stride(1) == 1 or num_windows == 1, "a plan's columns must be adjacent"
    geometry, layout = compressor.geometry, compressor.layout
    sizes = kv_score.element_size(), rings.element_size()
    tiling = choose_tiling(geometry, *sizes, num_windows, device.num_sms, device.wavefront)
    constants = _constants(geometry, layout.format, compressor.scale_floor, compressor.indexer_profile)
    launch = _Launch(
        device,
        tiling,
        constants,
        (windows, windows.stride(0), num_windows),
        (appends, appends.stride(0), num_appends, counts),
        (kv_score, rings, compressor.ape),
        (compressor.norm_weight, compressor.cos_sin, compressor.rms_eps, _inverse(compressor.fp8_scale)),
        (pages, pages.stride(0), layout.entries),
    )
    if constants.pool["GROUPS"] == 1:
        return launch.whole(geometry, None)
    scratch = reserve_scratch(kv_score.device, num_windows, geometry.head_dim)
    return launch.split(geometry, scratch) if tiling.split else launch.whole(geometry, scratch)


class _Launch(NamedTuple):
    """A step's arguments, in the groups that kernels take; tensors with their strides and sizes."""

    device: _Device
    tiling: Tiling
    constants: _Constants
    windows: tuple[Any, ...]
    appends: tuple[Any, ...]
    rows: tuple[torch.Tensor, ...]
    weights: tuple[Any, ...]
    pages: tuple[Any, ...]

    def whole(self, geometry: g.Geometry, scratch: torch.Tensor | None) -> int:
        """One launch."""
        tiling = self.tiling
        num_windows, num_appends = self.windows[2], self.appends[2]
        programs = -(-num_windows // tiling.windows)
        kernels.close_windows[(programs + num_appends,)](
            *self.windows, programs, *self.appends, *self.rows, *self.weights, *self.pages, scratch,
            HALVES=geometry.halves, WINDOWS=tiling.windows, COLUMNS=tiling.columns, STREAM=tiling.streams,
            EARLY=self.device.early, **self.constants.pool, **self.constants.entry,
            num_warps=tiling.warps, **self.device.options_of(tiling),
        )  # fmt: skip
        return 1

    def split(self, geometry: g.Geometry, scratch: torch.Tensor) -> int:
        """Two launches."""
        tiling, dim = self.tiling, geometry.head_dim
        num_windows, num_appends, counts = self.windows[2], *self.appends[2:]
        programs = -(-num_windows // tiling.band) * tiling.band * (dim // tiling.columns)
        kernels.pool_windows[(programs + num_appends,)](
            *self.windows, programs, *self.appends, *self.rows, scratch, tiling.band,
            COLUMNS=tiling.columns, STREAM=tiling.streams, EARLY=self.device.early, **self.constants.pool,
            num_warps=tiling.warps, **self.device.options_of(tiling),
        )  # fmt: skip
        kernels.finish_windows[(num_windows,)](
            *self.windows, counts, scratch, *self.weights, *self.pages,
            DIM=dim, EARLY=self.device.early, **self.constants.entry,
            num_warps=num_warps(dim, 4, self.device.wavefront), **self.device.options,
        )  # fmt: skip
        return 2


def _inverse(scale: float) -> float:
    return float(np.float32(1) / np.float32(scale))


def _append_only(
    appends: torch.Tensor, counts: torch.Tensor | None, kv_score: torch.Tensor, rings: torch.Tensor, device: _Device
) -> int:
    num_appends = appends.shape[1]
    if num_appends == 0:
        return 0
    assert appends.stride(1) == 1 or num_appends == 1, "a plan's columns must be adjacent"
    kernels.append_rows[(num_appends,)](
        appends, appends.stride(0), num_appends, counts, kv_score, rings,
        WIDTH=kv_score.shape[1], EARLY=device.early,
        num_warps=append_warps(kv_score.shape[1], device.wavefront), **device.options,
    )  # fmt: skip
    return 1


def flag_non_finite(kv_score: torch.Tensor, num_tokens: int, flag: torch.Tensor) -> None:
    """Lower flag, int32 `[1]` on the device, to the smallest flat index (row · row_width + column) of a value of the
    first num_tokens rows that no step may hold (see `FindNonFiniteFn`). Waits for nothing: the caller sets the flag to
    NO_FLAG before, and reads it when the step has ended."""
    num_values = num_tokens * kv_score.shape[1]
    assert num_values <= NO_FLAG, "a step's input must have fewer than 2^31 values"
    if num_values == 0:
        return
    kernels.flag_values[(-(-num_values // FLAG_BLOCK),)](
        kv_score, num_values, flag, WIDTH=kv_score.shape[1], BLOCK=FLAG_BLOCK, num_warps=FLAG_WARPS
    )


def find_non_finite(kv_score: torch.Tensor, num_tokens: int) -> tuple[int, int] | None:
    """See `kvfold_kernels.compress.FindNonFiniteFn`. Waits for the device."""
    flag = torch.full((1,), NO_FLAG, dtype=torch.int32, device=kv_score.device)
    flag_non_finite(kv_score, num_tokens, flag)
    found = int(flag)
    return None if found == NO_FLAG else divmod(found, kv_score.shape[1])


__all__ = ["NO_FLAG", "compress", "find_non_finite", "flag_non_finite", "reserve_scratch"]
