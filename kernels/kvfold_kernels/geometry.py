"""Bytes and ratios: the only module that knows them. Imports nothing but the standard library.

A *compressor* pools windows of token rows into entries. Its `Geometry` says how many rows a window has and how wide a
row is; its `EntryFormat` says which bytes an entry becomes; its `PageLayout` says where entry i of a page lies.

    row of a token      [ kv: halves·head_dim | score: halves·head_dim ]
    page of n entries   [ n · value_bytes | n · scale_bytes | zeros up to page_bytes ]

Sources: the ratios, dims and the 584-byte packed entry are DeepSeek-V4's; packed pages are rounded up to 576 bytes
because the sparse-attention readers address them in units of one entry's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Final

ROPE_DIM: Final = 64
RMS_EPS: Final = 1e-6
TOKENS_PER_PAGE: Final = 256
"""Tokens that a page of default size covers: page_entries = TOKENS_PER_PAGE / ratio."""

DRAFT_SLACK: Final = 8
"""Default number of a step's last tokens that may be withdrawn again."""

E4M3_MAX: Final = 448.0
E2M1_MAX: Final = 6.0
AMAX_FLOOR: Final = 1e-4
"""Floor of a quantiser block's largest absolute value (profile `amax`), or of its scale (profile `scale`)."""
MXFP4_AMAX_FLOOR: Final = 6.0 * 2.0**-126
UE8M0_BIAS: Final = 127
FP8_BLOCK: Final = 64
"""Columns that share one scale byte in a packed entry."""
MXFP4_BLOCK: Final = 32
LEAF: Final = 4
"""Adjacent columns summed in order before the binary tree of a sum of squares."""
GROUPS: Final = 8
"""Groups of consecutive rows whose partial softmaxes are merged in ascending order (single-half kinds)."""

INPUT_ITEM_BYTES: Final = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, slots=True)
class Kind:
    """What a family of compressors shares: how many groups of `ratio` rows a window spans, and its usual numbers."""

    name: str
    halves: int
    ratio: int
    head_dim: int


KINDS: Final = {
    "hca": Kind("hca", halves=1, ratio=128, head_dim=512),
    "csa": Kind("csa", halves=2, ratio=4, head_dim=512),
    "indexer": Kind("indexer", halves=2, ratio=4, head_dim=128),
}


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Geometry:
    """Windows and rows of one compressor.

    An entry closes when position p arrives with (p + 1) % ratio == 0; its window is the `window_rows` positions that
    end at p. With two halves, the older `ratio` rows give the first half of their columns, the newer the second.
    """

    kind: str
    ratio: int
    head_dim: int
    draft_slack: int = DRAFT_SLACK
    rope_dim: int = ROPE_DIM

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if not 1 <= self.ratio <= 65536:
            raise ValueError(f"ratio must be between 1 and 65536, not {self.ratio}")
        if self.head_dim < self.rope_dim or self.head_dim % FP8_BLOCK or self.head_dim & (self.head_dim - 1):
            raise ValueError(f"head_dim must be a power of two of at least {FP8_BLOCK}, not {self.head_dim}")
        if not 0 <= self.draft_slack <= 4096:
            raise ValueError(f"draft_slack must be between 0 and 4096, not {self.draft_slack}")

    @cached_property
    def halves(self) -> int:
        return KINDS[self.kind].halves

    @cached_property
    def window_rows(self) -> int:
        """K, rows of a full window."""
        return self.halves * self.ratio

    @cached_property
    def half_width(self) -> int:
        """Columns of the kv part (and of the score part) of a row."""
        return self.halves * self.head_dim

    @cached_property
    def row_width(self) -> int:
        return 2 * self.half_width

    @cached_property
    def nope_dim(self) -> int:
        return self.head_dim - self.rope_dim

    @cached_property
    def max_live_rows(self) -> int:
        """Most rows a later window can still need: an unfinished window and the draft slack."""
        return self.window_rows - 1 + self.draft_slack

    @cached_property
    def ring_rows(self) -> int:
        """R ≥ 2·(K − 1 + slack): what a step appends never lies on what it reads."""
        return max(1, 2 * self.max_live_rows)

    def live_start(self, num_tokens: int) -> int:
        """First position a later window can still need after `num_tokens` tokens."""
        return max(0, self.ratio * (num_tokens // self.ratio) - self.ratio * (self.halves - 1))

    def num_entries(self, num_tokens: int) -> int:
        return num_tokens // self.ratio

    @property
    def default_page_entries(self) -> int:
        return max(1, TOKENS_PER_PAGE // self.ratio)


@dataclass(frozen=True, slots=True)
class EntryFormat:
    """Bytes of one entry: `value_bytes` in the page's value area, `scale_bytes` in its scale area."""

    name: str
    head_dim: int
    value_bytes: int
    scale_bytes: int
    page_multiple: int
    """A page of default size is rounded up to this."""
    alignment: int
    """Every page size must be a multiple of this, so that stores stay aligned."""

    @property
    def entry_bytes(self) -> int:
        """A page-free row: values, then scales."""
        return self.value_bytes + self.scale_bytes


def _packed(head_dim: int) -> EntryFormat:
    nope = head_dim - ROPE_DIM
    values = nope + 2 * ROPE_DIM
    return EntryFormat("fp8_ds_mla", head_dim, values, nope // FP8_BLOCK + 1, page_multiple=values, alignment=16)


_FORMATS: Final[dict[str, Callable[[int], EntryFormat]]] = {
    "fp8_ds_mla": _packed,
    "bf16": lambda d: EntryFormat("bf16", d, 2 * d, 0, 1, 16),
    "fp8": lambda d: EntryFormat("fp8", d, d, 0, 1, 16),
    "fp32": lambda d: EntryFormat("fp32", d, 4 * d, 0, 1, 16),
    "indexer_fp8": lambda d: EntryFormat("indexer_fp8", d, d, 4, 1, 4),
    "indexer_mxfp4": lambda d: EntryFormat("indexer_mxfp4", d, d // 2, d // MXFP4_BLOCK, 1, 4),
}

CACHE_FORMATS: Final = {
    "hca": ("fp8_ds_mla", "bf16", "fp8", "fp32"),
    "csa": ("fp8_ds_mla", "bf16", "fp8", "fp32"),
    "indexer": ("indexer_fp8", "indexer_mxfp4", "bf16", "fp32"),
}
"""Cache formats that each kind may use."""


def entry_format(name: str, geometry: Geometry) -> EntryFormat:
    """The format `name` at a compressor's head_dim. Raises ValueError for a format its kind does not have."""
    allowed = CACHE_FORMATS[geometry.kind]
    if name not in allowed:
        raise ValueError(f"cache_format of kind {geometry.kind} must be one of {', '.join(allowed)}, not {name!r}")
    return _FORMATS[name](geometry.head_dim)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Where entry i of a page of `entries` lies. `page_bytes` is the distance between two pages of a pool."""

    format: EntryFormat
    entries: int
    page_bytes: int

    @classmethod
    def of(cls, fmt: EntryFormat, entries: int, page_bytes: int | None = None) -> PageLayout:
        """`page_bytes` None: packed, rounded up as the format wants it. Raises ValueError if one given is too small."""
        if not 1 <= entries <= 65536:
            raise ValueError(f"page_entries must be between 1 and 65536, not {entries}")
        least = entries * fmt.entry_bytes
        if page_bytes is None:
            page_bytes = _round_up(least, math.lcm(fmt.page_multiple, fmt.alignment))
        if page_bytes < least or page_bytes % fmt.alignment:
            raise ValueError(f"page_bytes must be a multiple of {fmt.alignment} and at least {least}, not {page_bytes}")
        return cls(fmt, entries, page_bytes)

    @property
    def scale_offset(self) -> int:
        """Start of the scale area in a page."""
        return self.entries * self.format.value_bytes

    def value_slice(self, entry: int) -> slice:
        start = entry * self.format.value_bytes
        return slice(start, start + self.format.value_bytes)

    def scale_slice(self, entry: int) -> slice:
        start = self.scale_offset + entry * self.format.scale_bytes
        return slice(start, start + self.format.scale_bytes)
