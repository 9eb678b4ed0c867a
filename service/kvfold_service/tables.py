"""Numbers that a worker keeps of each (compressor, ring slot), side by side: a step of many compressors looks at all of
them at once. A `CompressorCache` holds its own row of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvfold_kernels import plan as p

I64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Tables:
    """All int64; see `CompressorCache` for what a row means.

    states                            `[num_compressors, 3, num_rings]`
    drafts, num_pages, first_page, first_entry   `[num_compressors, num_rings]`
    ratios, page_entries, groups      `[num_compressors]`, as its geometry, its pages, and its group's index say
    """

    states: I64
    drafts: I64
    num_pages: I64
    first_page: I64
    first_entry: I64
    ratios: I64
    page_entries: I64
    groups: I64

    @classmethod
    def empty(cls, num_rings: int, ratios: Sequence[int], page_entries: Sequence[int], groups: Sequence[int]) -> Tables:
        zeros = (np.zeros((len(ratios), num_rings), np.int64) for _ in range(4))
        states = np.zeros((len(ratios), p.STATE_FIELDS, num_rings), np.int64)
        return cls(states, *zeros, *(np.array(column, np.int64) for column in (ratios, page_entries, groups)))
