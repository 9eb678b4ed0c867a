"""The plan of a step for one compressor: which windows close, which rows stay. Pure numpy, vectorised, immutable.

For a request that has seen `start` tokens and gets `length` more, with ratio r, K = window rows, n = start + length:

    entries closed      start // r … n // r − 1
    window of entry e   positions (e + 1)·r − K … (e + 1)·r − 1; those < 0 are padding, those < start lie in the ring,
                        the rest are rows of this step's input
    rows kept           positions max(start, live_start(n − drafts)) … n − 1 are appended to the ring

Rows live in a ring by a running index, not by position: a request's live rows are `committed − live_start` rows from
ring index `ring_start`, and a step appends behind them. With ring_rows ≥ 2·(K − 1 + slack) what a step appends never
lies on what it reads, so a launch needs no order between its blocks, and a step is undone by not advancing the index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvfold_kernels.geometry import Geometry

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]

# Rows of `Plan.windows`, one column a window.
INPUT_END: Final = 0
"""Input row of the window's last position."""
NUM_PAD: Final = 1
"""Leading rows with no token (positions < 0); their weight is 0."""
NUM_RING: Final = 2
"""Rows after the padding that come from the ring; the remaining ones come from the input."""
RING_SLOT: Final = 3
"""The request's ring."""
RING_FIRST: Final = 4
"""Ring index of the first row taken from the ring; the next ones follow, modulo ring_rows."""
POSITION: Final = 5
"""Position of the entry's first own token, (p // r)·r: the rotation's angle."""
SLOT: Final = 6
"""Output slot, page · page_entries + entry in the page."""
WINDOW_FIELDS: Final = 7

# Rows of `Plan.appends`, one column a row to keep.
APPEND_INPUT: Final = 0
"""Input row."""
APPEND_RING: Final = 1
"""Row of the ring tensor seen flat: ring slot · ring_rows + ring index."""
APPEND_FIELDS: Final = 2


# Rows of a ring state, int64 `[3, num_rings]`: one column a request slot.
COMMITTED: Final = 0
"""Tokens seen."""
LIVE_START: Final = 1
"""First position whose row is kept; rows LIVE_START … COMMITTED − 1 lie in the ring."""
RING_START: Final = 2
"""Ring index of the row of LIVE_START."""
STATE_FIELDS: Final = 3


_ZERO: Final = np.zeros(1, np.int64)


def empty_state(num_rings: int) -> I64:
    return np.zeros((STATE_FIELDS, num_rings), np.int64)


@dataclass(frozen=True, slots=True)
class Plan:
    """One compressor's part of a step. Arrays are read-only.

    windows     int32 `[7, num_windows]`, by request, entries ascending; rows as named above
    appends     int32 `[2, num_appends]`
    num_tokens  rows of the input that belong to requests; what follows is padding
    slots       int64 `[num_requests]`, ring slots
    entries     int64 `[2, num_requests]`: entries [entries[0], entries[1]) become valid at commit
    next_state  int64 `[3, num_requests]`, the columns of the ring state after commit
    """

    windows: I32
    appends: I32
    num_tokens: int
    slots: I64
    entries: I64
    next_state: I64

    @property
    def num_windows(self) -> int:
        return self.windows.shape[1]

    @property
    def num_appends(self) -> int:
        return self.appends.shape[1]

    @property
    def boundary(self) -> bool:
        """Whether any window closes; if not, only the append runs."""
        return self.windows.shape[1] > 0

    def commit(self, state: I64) -> None:
        """Make the step's rows and entries valid in the ring state that it was planned from."""
        state[:, self.slots] = self.next_state


def has_boundary(
    starts: Sequence[int] | I64 | None, query_start_loc: Sequence[int] | I64, ratio: int = 128
) -> bool | None:
    """Whether any request of a batch closes a window: any(start % ratio + length ≥ ratio). None if starts are unknown.

    starts `[num_requests]`, tokens seen so far; query_start_loc `[num_requests + 1]`. No tokens close no window.
    """
    if starts is None:
        return None
    lengths = np.diff(np.asarray(query_start_loc))
    return bool(np.any(np.asarray(starts) % ratio + lengths >= ratio))


def num_decode_requests(query_start_loc: I64, threshold: int = 1) -> int:
    """Length of the leading run of requests with at most `threshold` tokens: the decode prefix of a mixed batch."""
    longer = np.flatnonzero(np.diff(query_start_loc) > threshold)
    return int(longer[0]) if longer.size else len(query_start_loc) - 1


def num_decode_tokens(query_start_loc: I64, threshold: int = 1) -> int:
    """Tokens of the decode prefix."""
    return int(query_start_loc[num_decode_requests(query_start_loc, threshold)])


def make_plan(
    geometry: Geometry,
    state: I64,
    slots: I64,
    query_start_loc: I64,
    page_table: I32,
    page_entries: int,
    draft_tokens: I64 | None = None,
) -> Plan:
    """Plan one compressor's part of a step; changes nothing.

    state            int64 `[3, num_rings]`, the ring state
    slots            int64 `[num_requests]`, ring slot of each request, no slot twice
    query_start_loc  int64 `[num_requests + 1]`, input rows [query_start_loc[i], query_start_loc[i + 1]) are request i's
    page_table       int32 `[num_rings, max_pages]`; page of entry e is page_table[slot, e // page_entries], already set
                     for the entries this step closes
    draft_tokens     int64 `[num_requests]`, how many last tokens may be withdrawn later; None: none
    """
    ratio = geometry.ratio
    old = _columns(state, slots)
    start, live, ring = old
    first_row = query_start_loc[:-1]
    lengths = query_start_loc[1:] - first_row
    new = np.empty_like(old)
    end = np.add(start, lengths, out=new[COMMITTED])
    entries = np.empty((2, len(slots)), np.int64)
    np.floor_divide(start, ratio, out=entries[0])
    np.floor_divide(end, ratio, out=entries[1])

    kept_windows = entries[1] if draft_tokens is None else (end - draft_tokens) // ratio
    if geometry.halves > 1:
        kept_windows = kept_windows - (geometry.halves - 1)
    next_live = np.maximum(kept_windows * ratio, live, out=new[LIVE_START])
    if not lengths.all():  # a request of no tokens changes nothing
        np.copyto(next_live, live, where=lengths == 0)
    behind_live = ring + start
    behind_live -= live
    index = np.minimum(next_live, start, out=new[RING_START])
    index += ring
    index -= live
    _wrap(index, geometry.ring_rows)

    plan = Plan(
        windows=_windows(geometry, old, entries, slots, first_row, page_table, page_entries),
        appends=_appends(geometry, slots, first_row, start, end, next_live, behind_live),
        num_tokens=int(query_start_loc[-1]),
        slots=slots.copy(),
        entries=entries,
        next_state=new,
    )
    for array in (plan.windows, plan.appends, plan.slots, entries, new):
        array.setflags(write=False)
    return plan


def _columns(array: I64, chosen: I64) -> I64:
    """array[:, chosen]; `take` is several times as fast as indexing."""
    return array.take(chosen, axis=1)


def _wrap(index: I64, ring_rows: int) -> I64:
    """index mod ring_rows in place, for 0 ≤ index < 2·ring_rows: as unsigned, index − ring_rows is huge if negative."""
    unsigned = index.view(np.uint64)
    return np.minimum(unsigned, unsigned - ring_rows, out=unsigned).view(np.int64)


def _spread(counts: I64, total: int) -> tuple[I64, I64]:
    """Owner of each of `total` items, and the item's index within its owner."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(total) - (np.cumsum(counts) - counts)[owner]


def _windows(
    geometry: Geometry, old: I64, entries: I64, slots: I64, first_row: I64, page_table: I32, page_entries: int
) -> I32:
    counts = entries[1] - entries[0]
    total = int(counts.sum())
    windows = np.zeros((WINDOW_FIELDS, total), np.int32)
    if total == 0:
        return windows
    if len(slots) > 1:
        closing = counts.nonzero()[0]
        counts, slots, first_row = counts[closing], slots[closing], first_row[closing]
        entry_start = entries[0, closing]
        old = _columns(old, closing)
    else:
        entry_start = entries[0]
    start, live, ring = old
    ratio, halves = geometry.ratio, geometry.halves
    row_base = first_row - start
    row_base += ratio - 1
    if len(slots) == 1:  # one request broadcasts
        entry = np.arange(entry_start[0], entry_start[0] + total, dtype=np.int32)
        row_of, slot_of, first_window = row_base, slots, _ZERO
    elif total == len(slots):  # one window each
        entry = entry_start.astype(np.int32)
        row_of, slot_of, first_window = row_base, slots, np.arange(total)
    else:
        owner, within = _spread(counts, total)
        entry = (within + entry_start[owner]).astype(np.int32)
        row_of, slot_of, first_window = row_base[owner], slots[owner], np.cumsum(counts) - counts
    position = np.multiply(entry, np.int32(ratio), out=windows[POSITION])
    windows[INPUT_END] = position + row_of
    windows[RING_SLOT] = slot_of
    page_idx = entry // np.int32(page_entries)
    page = page_table[slot_of, page_idx]
    page -= page_idx
    page *= np.int32(page_entries)
    np.add(page, entry, out=windows[SLOT])  # page · n + entry − (entry // n) · n

    # Only a request's first `halves` windows reach back before this step.
    for j in range(halves):
        oldest = (entry_start + (j + 1 - halves)) * ratio
        first_real = np.maximum(oldest, 0)
        at = first_window + j
        if j and int(counts.min()) <= j:
            chosen = np.flatnonzero(counts > j)
            at = at[chosen]
        else:
            chosen = slice(None)
        num_ring = start - first_real
        windows[NUM_RING, at] = num_ring[chosen]
        if halves > 1:
            windows[NUM_PAD, at] = (first_real - oldest)[chosen]
        index = first_real + ring
        index -= live
        windows[RING_FIRST, at] = _wrap(index, geometry.ring_rows)[chosen]
    return windows


def _appends(
    geometry: Geometry, slots: I64, first_row: I64, start: I64, end: I64, next_live: I64, behind_live: I64
) -> I32:
    first_kept = np.maximum(start, next_live)
    counts = end - first_kept
    total = int(counts.sum())
    appends = np.empty((APPEND_FIELDS, total), np.int32)
    if total == 0:
        return appends
    input_row = first_kept
    input_row -= start
    input_row += first_row
    ring_index = behind_live
    ring_base = slots * geometry.ring_rows
    if len(slots) == 1:
        within = np.arange(total)
        input_row, ring_index = input_row + within, ring_index + within
    elif counts.max() == 1:
        if total < len(slots):
            kept = counts.nonzero()[0]
            input_row, ring_index, ring_base = input_row[kept], ring_index[kept], ring_base[kept]
    else:
        owner, within = _spread(counts, total)
        input_row, ring_index, ring_base = input_row[owner] + within, ring_index[owner] + within, ring_base[owner]
    appends[APPEND_INPUT] = input_row
    np.add(_wrap(ring_index, geometry.ring_rows), ring_base, out=appends[APPEND_RING], casting="unsafe")
    return appends
