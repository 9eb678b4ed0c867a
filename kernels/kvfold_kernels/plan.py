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
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

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

    def on_pages(self, ratio: int, page_table: I32, page_entries: int) -> Plan:
        """The plan of another compressor of the same geometry and ring state, which has pages of its own."""
        if not self.boundary:
            return self
        windows = self.windows.copy()
        entry = windows[POSITION] // np.int32(ratio)
        page_idx = entry // np.int32(page_entries)
        page = page_table[windows[RING_SLOT], page_idx]
        windows[SLOT] = (page - page_idx) * np.int32(page_entries) + entry
        windows.setflags(write=False)
        return replace(self, windows=windows)

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
    if len(slots) == 1:  # the same formulas in Python's integers, which are faster than arrays of one
        first_row, end_row = query_start_loc.tolist()
        length, drafts = end_row - first_row, 0 if draft_tokens is None else draft_tokens.item()
        slot = slots.item()
        requests = _Requests(slot, first_row, *state[:, slot].tolist())
        larger, smaller = max, min
    else:
        drafts = 0 if draft_tokens is None else draft_tokens
        length = query_start_loc[1:] - query_start_loc[:-1]
        requests = _Requests(slots, query_start_loc[:-1], *state.take(slots, axis=1))
        larger, smaller = np.maximum, np.minimum

    ratio, start, live = geometry.ratio, requests.start, requests.live
    end = start + length
    entry_start, entry_end = start // ratio, end // ratio
    final_end = end if draft_tokens is None else end - drafts
    kept_from = (final_end // ratio - (geometry.halves - 1)) * ratio
    next_live = larger(kept_from, live)
    if not (length if requests.one else length.all()):  # a request of no tokens keeps its rows
        next_live = live + (next_live - live) * (length > 0)
    next_ring = _wrap(requests.ring + smaller(next_live, start) - live, geometry.ring_rows)
    first_kept = larger(start, next_live)

    plan = Plan(
        windows=_windows(geometry, requests, entry_start, entry_end - entry_start, page_table, page_entries),
        appends=_appends(geometry, requests, first_kept, end - first_kept),
        num_tokens=int(query_start_loc[-1]),
        slots=slots.copy(),
        entries=np.array((entry_start, entry_end), np.int64).reshape(2, -1),
        next_state=np.array((end, next_live, next_ring), np.int64).reshape(STATE_FIELDS, -1),
    )
    for array in (plan.windows, plan.appends, plan.slots, plan.entries, plan.next_state):
        array.setflags(write=False)
    return plan


class _Requests(NamedTuple):
    """The requests of a step: a column of int64 each or, of a single request, plain integers."""

    slot: Any
    first_row: Any
    start: Any
    live: Any
    ring: Any

    @property
    def one(self) -> bool:
        return type(self.slot) is int

    def only(self, chosen: Any) -> _Requests:
        """Some of several."""
        return _Requests(*(field[chosen] for field in self))


def _wrap(index: Any, ring_rows: int) -> Any:
    """index mod ring_rows, for 0 ≤ index < 2·ring_rows. In an array as unsigned numbers: below 0 is far above."""
    if type(index) is int:
        return index % ring_rows
    unsigned = index.view(np.uint64)
    return np.minimum(unsigned, unsigned - ring_rows).view(np.int64)


def _spread(counts: I64, total: int) -> tuple[I64, I64]:
    """Owner of each of `total` items, and the item's index within its owner."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(total) - (np.cumsum(counts) - counts)[owner]


def _windows(
    geometry: Geometry, requests: _Requests, entry_start: Any, counts: Any, page_table: I32, page_entries: int
) -> I32:
    one = requests.one
    total = counts if one else int(counts.sum())
    windows = np.zeros((WINDOW_FIELDS, total), np.int32)
    if total == 0:
        return windows
    ratio = geometry.ratio
    if one:
        first_window, slot_of, row_of = 0, requests.slot, requests.first_row - requests.start
        entry = np.arange(entry_start, entry_start + total, dtype=np.int32)
    else:
        closing = counts.nonzero()[0]
        requests, entry_start, counts = requests.only(closing), entry_start[closing], counts[closing]
        first_window = np.arange(total)
        slot_of, row_of, entry = requests.slot, requests.first_row - requests.start, entry_start
        if total > len(closing):
            first_window = np.cumsum(counts) - counts
            owner, within = _spread(counts, total)
            slot_of, row_of, entry = slot_of[owner], row_of[owner], within + entry_start[owner]
        entry = entry.astype(np.int32)
    position = np.multiply(entry, np.int32(ratio), out=windows[POSITION])
    windows[INPUT_END] = position + (row_of + (ratio - 1))
    windows[RING_SLOT] = slot_of
    page_idx = entry // np.int32(page_entries)
    page = page_table[slot_of].take(page_idx) if one else page_table[slot_of, page_idx]
    page -= page_idx
    page *= np.int32(page_entries)
    np.add(page, entry, out=windows[SLOT])  # page · n + entry − (entry // n) · n
    _reach_back(geometry, requests, entry_start, counts, first_window, windows)
    return windows


def _reach_back(
    geometry: Geometry, requests: _Requests, entry_start: Any, counts: Any, first_window: Any, windows: I32
) -> None:
    """Padding and ring rows: only a request's first `halves` windows reach back before this step."""
    for j in range(geometry.halves):
        if j:
            if requests.one:
                if counts <= j:
                    return
            elif counts.min() <= j:
                more = counts > j
                requests, entry_start = requests.only(more), entry_start[more]
                first_window, counts = first_window[more], counts[more]
        oldest = (entry_start + (j + 1 - geometry.halves)) * geometry.ratio
        first_real = max(oldest, 0) if requests.one else np.maximum(oldest, 0)
        at = first_window + j
        windows[NUM_PAD, at] = first_real - oldest
        windows[NUM_RING, at] = requests.start - first_real
        windows[RING_FIRST, at] = _wrap(requests.ring + first_real - requests.live, geometry.ring_rows)


def _appends(geometry: Geometry, requests: _Requests, first_kept: Any, counts: Any) -> I32:
    one = requests.one
    total = counts if one else int(counts.sum())
    appends = np.empty((APPEND_FIELDS, total), np.int32)
    if total == 0:
        return appends
    row = requests.first_row + first_kept - requests.start
    index = requests.ring + requests.start - requests.live  # behind the live rows
    base = requests.slot * geometry.ring_rows
    if one:
        within = np.arange(total)
        row, index = row + within, index + within
    elif counts.max() == 1:
        if total < len(counts):
            kept = counts.nonzero()[0]
            row, index, base = row[kept], index[kept], base[kept]
    else:
        owner, within = _spread(counts, total)
        row, index, base = row[owner] + within, index[owner] + within, base[owner]
    appends[APPEND_INPUT] = row
    appends[APPEND_RING] = _wrap(index, geometry.ring_rows) + base
    return appends
