"""Random rows to send, made once: making them while the clock runs would be measured."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..scheduler.rows import shapes_of

_SPARE_ROWS = 1021
"""By how many rows slices may differ; prime, so that steps of any length do not repeat soon."""


class Rows:
    """For each width a block of normal rows, of which every step takes another slice."""

    def __init__(self, manifest: Mapping[str, Any], names: Sequence[str] | None, dtype: str, most_tokens: int) -> None:
        """`names` None: all compressors of the manifest. Raises ValueError for a name that is not there."""
        known = {part["name"]: part for part in manifest["compressors"]}
        missing = [name for name in names or () if name not in known]
        if missing:
            raise ValueError(f"the worker has no compressor {missing[0]!r}; it has {', '.join(known)}")
        self.names = tuple(known if names is None else names)
        self._width = {shape.name: shape.row_width for shape in shapes_of(manifest)}
        self._dtype = {name: _dtype(known[name].get("input_dtype", "any"), dtype) for name in self.names}
        keys = {(self._width[name], self._dtype[name]) for name in self.names}
        self._blocks = {key: _block(most_tokens + _SPARE_ROWS, *key) for key in sorted(keys)}
        self._offsets = itertools.cycle(range(_SPARE_ROWS))

    def take(self, num_tokens: int) -> dict[str, np.ndarray]:
        """Compressor → [num_tokens, row_width], views of the blocks."""
        first = next(self._offsets)
        return {
            name: self._blocks[self._width[name], self._dtype[name]][first : first + num_tokens] for name in self.names
        }

    def row_bytes(self, num_tokens: int) -> int:
        """Bytes of all tensors of a step."""
        return sum(num_tokens * self._width[name] * (2 if self._dtype[name] == "bf16" else 4) for name in self.names)


def _dtype(allowed: str, wanted: str) -> str:
    """What a compressor takes, where that is only one."""
    return wanted if allowed == "any" else allowed


def _block(num_rows: int, width: int, dtype: str) -> np.ndarray:
    rows = np.random.default_rng(width).standard_normal((num_rows, width), np.float32)
    return (rows.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bf16" else rows
