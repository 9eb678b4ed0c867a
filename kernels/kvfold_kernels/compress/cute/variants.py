"""The variants of this backend, which one a step takes, and how each is compiled. Imports no compiler by itself.

A variant is named by what it is compiled for; `build` writes all of them into one shared library an architecture.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Final

from kvfold_kernels.geometry import CACHE_FORMATS, GROUPS, INPUT_ITEM_BYTES, KINDS, LEAF, Geometry, entry_format

INDEXER_PROFILES: Final = ("vllm", "sglang")
ARCHITECTURES: Final = ("sm_90a", "sm_100a")
DTYPE_PAIRS: Final = (("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp32"))
"""Input and ring."""
PROFILED: Final = ("indexer_fp8", "indexer_mxfp4")
LAYER_FORMATS: Final = ("fp8_ds_mla",)
"""Main formats that share a launch with an indexer."""


@dataclass(frozen=True)
class Variant:
    """shape: which kernel; the rest is what it is compiled for."""

    shape: str
    kind: str
    input: str
    ring: str
    format: str = ""
    profile: str = "vllm"
    beside: str = ""
    """The indexer's format, where a launch does a whole layer."""

    @property
    def name(self) -> str:
        parts = [self.shape, self.kind, self.input, self.ring]
        if self.format:
            parts.append(self.format)
        if self.beside:
            parts.append(self.beside)
        if self.profile != "vllm":
            parts.append(self.profile)
        return "_".join(parts)

    @property
    def geometry(self) -> Geometry:
        kind = KINDS[self.kind]
        return Geometry(kind.name, kind.ratio, kind.head_dim)


STREAM_WINDOWS: Final = 46
"""From so many windows on, hca streams tiles through the shared memory of persistent blocks. An H200 holds 45 clusters
of the other kernel's blocks at once, three blocks a multiprocessor; one more would wait for a whole round."""
MIXED_STREAM_WINDOWS: Final = 31
"""The same for bf16 input with fp32 rings: two blocks a multiprocessor, since each takes more registers."""


EARLY_BLOCKS: Final = 160
"""Largest grid of an overlapping kind with bf16 input that lets the next one start at once."""
ALWAYS_EARLY: Final = 2**31 - 1


def choose(kind: str, cache_format: str, profile: str, given: str, ring: str, max_windows: int) -> Variant:
    """The variant for a step of at most `max_windows` windows. All switch points are here."""
    if max_windows == 0:
        return Variant("append", kind, given, ring)
    if KINDS[kind].halves > 1:
        return Variant("overlap", kind, given, ring, cache_format, profile)
    until = STREAM_WINDOWS if given == ring else MIXED_STREAM_WINDOWS
    return Variant("tiles" if max_windows < until else "stream", kind, given, ring, cache_format, profile)


def choose_layer(given: str, ring: str, cache_format: str, indexer_format: str, profile: str) -> Variant | None:
    """The variant that closes a csa layer's main and indexer windows in one launch, if there is one."""
    if cache_format not in LAYER_FORMATS or indexer_format not in PROFILED:
        return None
    return Variant("layer", "csa", given, ring, cache_format, profile, indexer_format)


def all_variants() -> list[Variant]:
    found: dict[Variant, None] = {}
    for kind, formats in CACHE_FORMATS.items():
        for given, ring in DTYPE_PAIRS:
            found[Variant("append", kind, given, ring)] = None
            for cache_format in formats:
                for profile in INDEXER_PROFILES if cache_format in PROFILED else INDEXER_PROFILES[:1]:
                    for windows in (1, STREAM_WINDOWS):
                        found[choose(kind, cache_format, profile, given, ring, windows)] = None
        for given in INPUT_ITEM_BYTES:
            found[Variant("flags", kind, given, given)] = None
    for given, ring in DTYPE_PAIRS:
        for main, indexer, profile in itertools.product(LAYER_FORMATS, PROFILED, INDEXER_PROFILES):
            found[choose_layer(given, ring, main, indexer, profile)] = None
    return list(found)


def _overlap(kind: str, rows_of, writer):
    """Compile-time numbers of an overlapping kind: 4 columns a lane, blocks of 128 threads."""
    from kvfold_kernels.compress.cute.overlap import OverlapKernel

    geometry = Variant("overlap", kind, "", "").geometry
    rows = rows_of(geometry)
    blocks = {(4, 4): 4, (2, 2): 5, (2, 4): 4}[rows.input_bytes, rows.ring_bytes]
    early = ALWAYS_EARLY if rows.input_bytes == 4 else EARLY_BLOCKS
    windows_per_block = max(1, 128 // (geometry.head_dim // LEAF))
    return OverlapKernel(geometry, rows, writer(geometry), LEAF, windows_per_block, blocks, early)


def compile_time(variant: Variant):
    """The kernel object of a variant. Needs cutlass."""
    from kvfold_kernels.compress.cute.append import AppendKernel
    from kvfold_kernels.compress.cute.encode import Writer
    from kvfold_kernels.compress.cute.flags import FlagsKernel
    from kvfold_kernels.compress.cute.layer import LayerKernel
    from kvfold_kernels.compress.cute.step import Rows
    from kvfold_kernels.compress.cute.stream import StreamKernel
    from kvfold_kernels.compress.cute.tiles import TilesKernel

    geometry = variant.geometry

    def rows_of(geometry: Geometry) -> Rows:
        return Rows(INPUT_ITEM_BYTES[variant.input], INPUT_ITEM_BYTES[variant.ring], geometry.row_width)

    def writer_of(geometry: Geometry) -> Writer:
        return Writer(entry_format(variant.format, geometry), variant.profile)

    if variant.shape == "append":
        return AppendKernel(rows_of(geometry))
    if variant.shape == "flags":
        return FlagsKernel(rows_of(geometry))
    if variant.shape == "overlap":
        return _overlap(variant.kind, rows_of, writer_of)
    if variant.shape == "layer":
        indexer = _overlap("indexer", rows_of, lambda of: Writer(entry_format(variant.beside, of), variant.profile))
        return LayerKernel(_overlap("csa", rows_of, lambda of: Writer(entry_format(variant.format, of))), indexer)
    rows, writer = rows_of(geometry), writer_of(geometry)
    assert geometry.window_rows % GROUPS == 0
    if variant.shape == "stream":
        return StreamKernel(geometry, rows, writer, 6 if rows.ring_bytes == 2 else 3)
    return TilesKernel(geometry, rows, writer)
