"""Pages in host memory ↔ page-free rows, a page's areas at a time; `kernels.pages` does it entry by entry, anywhere.

Pages uint8 `[num_pages, page_bytes]`; `table` the pages of a request, in the order of its entries; rows uint8
`[stop − start, entry_bytes]`, values then scales.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from kvfold_kernels.geometry import PageLayout

U8 = NDArray[np.uint8]
I32 = NDArray[np.int32]
_AT_A_TIME: Final = 64 << 10
"""Bytes of pages that are gathered at once; a page that is alone is not gathered at all."""


def read_rows(pages: U8, table: I32, layout: PageLayout, start: int, stop: int, rows: U8) -> None:
    """A request's entries [start, stop) → rows."""
    n, fmt = layout.entries, layout.format
    for first, end, page in _whole_pages(table, layout, start, stop):
        block = pages[page[0]][None] if len(page) == 1 else pages[page]
        values = block[:, : layout.scale_offset].reshape(-1, fmt.value_bytes)
        scales = block[:, layout.scale_offset : n * fmt.entry_bytes].reshape(len(page) * n, fmt.scale_bytes)
        base = first // n * n
        target, part = slice(first - start, end - start), slice(first - base, end - base)
        rows[target, : fmt.value_bytes] = values[part]
        rows[target, fmt.value_bytes :] = scales[part]


def write_rows(pages: U8, table: I32, layout: PageLayout, start: int, rows: U8) -> None:
    """Rows → a request's entries [start, start + len(rows)); nothing else of their pages is touched."""
    n, fmt, stop = layout.entries, layout.format, start + len(rows)
    value_area, scale_area = _areas(pages, layout)
    for first, end, page in _whole_pages(table, layout, start, stop):
        part = rows[first - start : end - start]
        values, scales = part[:, : fmt.value_bytes], part[:, fmt.value_bytes :]
        if (end - first) == len(page) * n:
            where = page[0] if len(page) == 1 else page
            value_area[where] = values.reshape(len(page), n, fmt.value_bytes)
            scale_area[where] = scales.reshape(len(page), n, fmt.scale_bytes)
        else:
            entry = np.arange(first, end)
            at = page[entry // n - first // n], entry % n
            value_area[at], scale_area[at] = values, scales


def _areas(pages: U8, layout: PageLayout) -> tuple[U8, U8]:
    """Views `[num_pages, entries, value_bytes or scale_bytes]`."""
    fmt, n = layout.format, layout.entries
    return (
        as_strided(pages, (len(pages), n, fmt.value_bytes), (layout.page_bytes, fmt.value_bytes, 1)),
        as_strided(
            pages[:, layout.scale_offset :], (len(pages), n, fmt.scale_bytes), (layout.page_bytes, fmt.scale_bytes, 1)
        ),
    )


def _whole_pages(table: I32, layout: PageLayout, start: int, stop: int) -> Iterator[tuple[int, int, I32]]:
    """Entries [first, end) and their pages, some at a time: of no page a part, but of the first and the last."""
    n = layout.entries
    step = max(1, _AT_A_TIME // layout.page_bytes) * n
    first = start
    while first < stop:
        end = first // n * n + (n if first % n else step)
        end = end if end <= stop else (stop // n * n if stop // n * n > first else stop)
        yield first, end, table[first // n : -(-end // n)]
        first = end
