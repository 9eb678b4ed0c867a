"""Where the same entries lie in a peer's pages and in ours: runs of bytes, whatever the two page layouts are.

Rows of (address, bytes, device), uint64 `[n, 3]`, one list for each side and both in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvfold_kernels.geometry import PageLayout

U64 = NDArray[np.uint64]
MOST_BYTES: Final = 32 << 20
MOST_RUNS: Final = 2048
"""Of one transfer, so that the end of a peer is seen between two."""


@dataclass(frozen=True, slots=True)
class Side:
    """Pages of one holder: int64 addresses of those that hold the entries from `first` on, in their order."""

    layout: PageLayout
    addresses: NDArray[np.int64]
    device: int

    def page(self, entries: NDArray[np.int64], first: int) -> NDArray[np.int64]:
        """Address of each entry's page."""
        return self.addresses[entries // self.layout.entries - first // self.layout.entries]


def runs(first: int, end: int, theirs: Side, ours: Side) -> tuple[U64, U64]:
    """Descriptors of entries [first, end): as few as both layouts allow."""
    cuts = [np.arange(first // n * n + n, end, n) for n in (theirs.layout.entries, ours.layout.entries)]
    starts = np.unique(np.concatenate([[first], *cuts])).astype(np.int64)
    counts = np.diff(starts, append=end)
    whole = (counts == theirs.layout.entries) & (theirs.layout.entries == ours.layout.entries)
    sides = [_areas(side, starts, counts, whole, first) for side in (theirs, ours)]
    return sides[0], sides[1]


def _areas(
    side: Side, starts: NDArray[np.int64], counts: NDArray[np.int64], whole: NDArray[np.bool_], first: int
) -> U64:
    """Each run's values and scales; of a page that is whole on both sides the two are one piece."""
    fmt, page, within = side.layout.format, side.page(starts, first), starts % side.layout.entries
    values = np.stack([page + within * fmt.value_bytes, counts * np.where(whole, fmt.entry_bytes, fmt.value_bytes)], 1)
    scale_at = page + side.layout.scale_offset + within * fmt.scale_bytes
    scales = np.stack([scale_at, counts * fmt.scale_bytes], 1)[~whole & bool(fmt.scale_bytes)]
    both = np.concatenate([values, scales])
    return np.concatenate([both, np.full((len(both), 1), side.device)], 1).astype(np.uint64)


def batches(theirs: U64, ours: U64) -> list[tuple[U64, U64]]:
    """The two lists, cut into transfers. A run is never longer than a page."""
    cuts, num_bytes, num_runs = [0], 0, 0
    for i, size in enumerate(theirs[:, 1].tolist()):
        if num_runs == MOST_RUNS or (num_runs and num_bytes + size > MOST_BYTES):
            cuts.append(i)
            num_bytes = num_runs = 0
        num_bytes, num_runs = num_bytes + size, num_runs + 1
    pieces = zip(cuts, [*cuts[1:], len(theirs)], strict=True)
    return [(theirs[a:b], ours[a:b]) for a, b in pieces if a < b]
