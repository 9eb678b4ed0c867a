"""What the `triton` backend launches, with which tilings, constants and options. Pure: needs no device, no Triton."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kvfold_kernels import geometry as g

GRAPH_MODES = ("none", "piecewise", "full")

MIN_COLUMNS = 32
"""Narrowest column tile of a split window: rows of 128 bytes in fp32."""


def skips_compress(device_type: str, graph_mode: str, boundary: bool | None) -> bool:
    """Whether a step's compress launch is left out, so that only the append runs.

    boundary is `plan.has_boundary`'s answer. A captured full graph must not depend on what only the CPU knows, and an
    unknown boundary may be one. ROCm devices are of torch's type `cuda`, too.
    """
    if graph_mode not in GRAPH_MODES:
        raise ValueError(f"graph_mode must be one of {', '.join(GRAPH_MODES)}, not {graph_mode!r}")
    return device_type == "cuda" and graph_mode != "full" and boundary is False


def pick_num_splits(num_windows: int, head_dim: int, num_sms: int) -> int:
    """Column tiles of a window: the least power of two that gives each multiprocessor a program; none < MIN_COLUMNS."""
    wanted = -(-num_sms // max(1, num_windows))
    return max(1, min(head_dim // MIN_COLUMNS, 1 << (wanted - 1).bit_length()))


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a launch divides its windows: `windows` to a program, or `columns` of one; `split`: in two launches."""

    windows: int
    columns: int
    split: bool
    warps: int
    streams: bool = False
    """Rows are marked as read once and ape as read often: for inputs that the second-level cache cannot hold."""
    band: int = 1
    """Split: windows whose tile of the same columns adjacent programs take."""
    max_registers: int | None = None
    """On Hopper, where it was measured: so many registers a thread let more programs share a multiprocessor."""


STREAM_BYTES = 48 << 20
"""Input beyond this does not stay in an H200's second-level cache (60 MB, shared with whatever else is going on)."""
MAX_COLUMNS = 64
"""Widest column tile of a split window."""
WHOLE_COLUMNS = 512
"""Columns that a program takes of whole windows, when there are more windows than multiprocessors."""
MAX_WARPS = 16


def choose_tiling(
    geometry: g.Geometry, input_bytes: int, ring_bytes: int, num_windows: int, num_sms: int, wavefront: int
) -> Tiling:
    """The only place that decides between one launch and two, and how wide a program's tile is.

    Measured on an H200 (tests/bench/bench_triton.py --compare): with groups (hca) two launches win at every number of
    windows, decoding or prefill, so none takes the single pass. A thread does best with 4 columns of each row, and with
    16 bytes where there are many windows. Between one and two windows for each multiprocessor, two to a program win.
    """
    dim = geometry.head_dim
    bytes_each = max(input_bytes, ring_bytes)
    streams = num_windows * geometry.ratio * geometry.row_width * bytes_each > STREAM_BYTES
    if num_groups(geometry) > 1:
        columns = max(MIN_COLUMNS, min(MAX_COLUMNS, dim // pick_num_splits(num_windows, dim, num_sms)))
        return Tiling(1, columns, True, num_warps(g.GROUPS * columns, 4, wavefront), streams, min(8, num_windows))
    fp32 = input_bytes == ring_bytes == 4
    windows = max(1, WHOLE_COLUMNS // dim) if num_windows > num_sms else 1
    if fp32 and num_sms < num_windows <= 2 * num_sms:
        windows *= 2
    columns_each = 16 // bytes_each if num_windows > 4 * num_sms else 4
    limit = 80 if fp32 and streams and geometry.window_rows <= 8 else None
    return Tiling(windows, dim, False, num_warps(windows * dim, columns_each, wavefront), streams, 1, limit)


def num_warps(columns: int, columns_each: int, wavefront: int) -> int:
    """Warps, of `wavefront` threads each, so that a thread has columns_each of the tile's columns (or more)."""
    return max(1, min(MAX_WARPS, columns // (columns_each * wavefront)))


def append_warps(row_width: int, wavefront: int) -> int:
    """4 columns a thread: on an H200, 256 fp32 rows of 2,048 columns take 1.2 µs, and with 16 a thread 3.1."""
    return num_warps(row_width, 4, wavefront)


def num_groups(geometry: g.Geometry) -> int:
    """Groups of rows that are pooled apart and merged."""
    return g.GROUPS if geometry.halves == 1 and geometry.ratio % g.GROUPS == 0 else 1


def pool_constants(geometry: g.Geometry) -> dict[str, Any]:
    return {
        "RATIO": geometry.ratio,
        "DIM": geometry.head_dim,
        "RING_ROWS": geometry.ring_rows,
        "GROUPS": num_groups(geometry),
    }


def entry_constants(geometry: g.Geometry, fmt: g.EntryFormat, scale_floor: str, profile: str) -> dict[str, Any]:
    """Of `triton_encode.finish`. LOWEST floors the biased exponent, AMAX_FLOOR the block's maximum."""
    by_scale = scale_floor == "scale"
    amax_floor = 2.0**-126 if by_scale else g.MXFP4_AMAX_FLOOR if fmt.name == "indexer_mxfp4" else g.AMAX_FLOOR
    return {
        "FORMAT": fmt.name,
        "SGLANG": profile == "sglang",
        "AMAX_FLOOR": amax_floor,
        "LOWEST": g.UE8M0_BIAS + math.ceil(math.log2(g.AMAX_FLOOR)) if by_scale else 0,
        "ROPE": geometry.rope_dim,
        "VALUE_BYTES": fmt.value_bytes,
        "SCALE_BYTES": fmt.scale_bytes,
    }


def launch_options(rocm: bool, early: bool) -> dict[str, Any]:
    """Nothing is contracted that is not written so. `early`: programmatic dependent launch, NVIDIA's from Hopper on."""
    return {"enable_fp_fusion": False} | ({} if rocm else {"launch_pdl": early})


def register_limit(hopper: bool, tiling: Tiling) -> dict[str, Any]:
    return {"maxnreg": tiling.max_registers} if hopper and tiling.max_registers else {}
