"""staging: what is lent is aligned, disjoint and comes back whole, in whatever order."""

from __future__ import annotations

import mmap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvfold_client.wire import FRAME_ALIGN
from kvfold_service.staging import Extent, Staging

PAGE = mmap.PAGESIZE


def largest_hole(lent: list[Extent], num_bytes: int) -> int:
    """Bytes of the longest run that is in no extent."""
    ends = [
        0,
        *(edge for extent in sorted(lent, key=lambda e: e.start) for edge in (extent.start, extent.stop)),
        num_bytes,
    ]
    return max(stop - start for start, stop in zip(ends[::2], ends[1::2], strict=True))


class Lender(RuleBasedStateMachine):
    """Every borrower fills its extent with its own byte, and finds it so when it gives it back."""

    def __init__(self) -> None:
        super().__init__()
        self.staging = Staging(2 * PAGE)
        self.lent: dict[int, Extent] = {}
        self.next_mark = 1

    @rule(size=st.integers(0, PAGE) | st.sampled_from([2 * PAGE, 2 * PAGE + 1]))
    def lend(self, size):
        rounded = max(FRAME_ALIGN, -(-size // FRAME_ALIGN) * FRAME_ALIGN)
        hole = largest_hole(list(self.lent.values()), self.staging.num_bytes)
        extent = self.staging.lend(size)
        assert (extent is None) == (rounded > hole)
        if extent is not None:
            assert extent.start % FRAME_ALIGN == 0
            assert len(extent.view) == extent.stop - extent.start == rounded
            extent.view[:] = bytes([self.next_mark]) * rounded
            self.lent[self.next_mark] = extent
            self.next_mark = self.next_mark % 255 + 1

    @precondition(lambda self: self.lent)
    @rule(data=st.data(), more=st.integers(1, PAGE))
    def grow(self, data, more):
        mark = data.draw(st.sampled_from(sorted(self.lent)))
        before = self.lent[mark]
        others = [extent for other, extent in self.lent.items() if other != mark]
        behind = min((extent.start for extent in others if extent.start >= before.stop), default=self.staging.num_bytes)
        wanted = -(-(len(before.view) + more) // FRAME_ALIGN) * FRAME_ALIGN
        fits = behind - before.start >= wanted or largest_hole([*others, before], self.staging.num_bytes) >= wanted
        grown = self.staging.grow(before, len(before.view) + more)
        assert (grown is not None) == fits
        if grown is not None:
            assert bytes(grown.view[: len(before.view)]) == bytes([mark]) * len(before.view)
            assert len(grown.view) == wanted
            assert grown.start == before.start or behind - before.start < wanted
            grown.view[:] = bytes([mark]) * wanted
            self.lent[mark] = grown

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def give_back(self, data):
        mark = data.draw(st.sampled_from(sorted(self.lent)))
        extent = self.lent.pop(mark)
        assert bytes(extent.view) == bytes([mark]) * len(extent.view)
        self.staging.give_back(extent)

    @invariant()
    def agrees(self):
        self.staging.check_integrity()
        assert self.staging.num_lent == sum(extent.stop - extent.start for extent in self.lent.values())


TestLender = Lender.TestCase
TestLender.settings = settings(max_examples=60, stateful_step_count=40)


@given(st.permutations(range(8)))
def test_all_of_it_can_be_lent_again_whatever_came_back_first(order):
    staging = Staging(8 * FRAME_ALIGN)
    size = staging.num_bytes // 8
    extents = [staging.lend(size) for _ in range(8)]
    assert staging.lend(1) is None
    for i in order:
        staging.give_back(extents[i])
    assert staging.num_lent == 0
    assert staging.lend(staging.num_bytes) is not None


def test_the_block_is_at_least_what_was_asked_for_and_starts_zeroed():
    staging = Staging(PAGE + 1)
    assert staging.num_bytes == 2 * PAGE
    extent = staging.lend(2 * PAGE)
    assert not any(extent.view)


def test_an_empty_body_has_room_of_its_own():
    staging = Staging(PAGE)
    first, second = staging.lend(0), staging.lend(0)
    assert first.stop <= second.start
    assert len(first.view) == FRAME_ALIGN


def test_what_was_given_back_is_not_given_back_again():
    staging = Staging(PAGE)
    extent = staging.lend(100)
    staging.give_back(extent)
    with pytest.raises(KeyError):
        staging.give_back(extent)
    staging.check_integrity()


@pytest.mark.parametrize("free", [[(0, 64)], [(0, PAGE), (PAGE - 64, PAGE)], [(0, 128), (128, PAGE)]])
def test_integrity_notices(free):
    """A hole, an overlap, neighbours that were not merged."""
    staging = Staging(PAGE)
    staging._free[:] = free
    with pytest.raises(AssertionError):
        staging.check_integrity()
