"""Host memory that request bodies are streamed into: one block, allocated once, lent in 64-byte aligned extents."""

from __future__ import annotations

import bisect
import mmap
from dataclasses import dataclass

from kvfold_client.wire import FRAME_ALIGN


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [start, stop) of the block, lent to one body."""

    start: int
    stop: int
    view: memoryview


class Staging:
    """First-fit lender of one block. Not thread-safe: the event loop owns it.

    The block is anonymous memory: pages of it cost nothing until a body has touched them.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self.block = memoryview(mmap.mmap(-1, self.num_bytes))
        self._free: list[tuple[int, int]] = [(0, self.num_bytes)]  # half-open, ascending, never adjacent
        self._lent: dict[int, int] = {}

    @property
    def num_lent(self) -> int:
        """Bytes that are out."""
        return sum(stop - start for start, stop in self._lent.items())

    def lend(self, num_bytes: int) -> Extent | None:
        """An extent of at least num_bytes, or None if none is free."""
        size = _aligned(num_bytes)
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= size:
                if stop - start == size:
                    del self._free[i]
                else:
                    self._free[i] = (start + size, stop)
                self._lent[start] = start + size
                return Extent(start, start + size, self.block[start : start + size])
        return None

    def grow(self, extent: Extent, num_bytes: int) -> Extent | None:
        """At least num_bytes with the extent's bytes in front: where it lies if it can, else moved.

        None if there is no room; then the extent is as it was.
        """
        stop, wanted = self._lent[extent.start], extent.start + _aligned(num_bytes)
        i = bisect.bisect(self._free, (stop,))
        if i < len(self._free) and self._free[i][0] == stop and self._free[i][1] >= wanted:
            self._free[i : i + 1] = [(wanted, self._free[i][1])] if self._free[i][1] > wanted else []
            self._lent[extent.start] = wanted
            return Extent(extent.start, wanted, self.block[extent.start : wanted])
        moved = self.lend(num_bytes)
        if moved is not None:
            moved.view[: len(extent.view)] = extent.view
            self.give_back(extent)
        return moved

    def give_back(self, extent: Extent) -> None:
        start, stop = extent.start, self._lent.pop(extent.start)
        i = bisect.bisect(self._free, (start, stop))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            start = self._free.pop(i - 1)[0]
            i -= 1
        self._free.insert(i, (start, stop))

    def check_integrity(self) -> None:
        """Free and lent extents cover the block exactly once; raises AssertionError."""
        at = 0
        for start, stop in sorted([*self._free, *self._lent.items()]):
            assert start == at < stop, "extents overlap or leave a hole"
            at = stop
        assert at == self.num_bytes
        assert all(a[1] < b[0] for a, b in zip(self._free, self._free[1:], strict=False)), "free extents not merged"


def _aligned(num_bytes: int) -> int:
    return max(FRAME_ALIGN, -(-num_bytes // FRAME_ALIGN) * FRAME_ALIGN)
