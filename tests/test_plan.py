"""The plan against a ledger that moves one token at a time, and what a step may never do to its rings and inputs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold_kernels import plan as p
from kvfold_kernels.geometry import Geometry

PAGE_ENTRIES = 3


@dataclass
class Ledger:
    """One request: the ring index of the row of each position that is kept."""

    slot: int
    committed: int = 0
    live_start: int = 0
    ring_start: int = 0
    rows: dict[int, int] = field(default_factory=dict)
    drafts: int = 0

    def withdraw(self, num_tokens: int) -> None:
        self.committed -= num_tokens
        self.drafts -= num_tokens
        self.rows = {position: index for position, index in self.rows.items() if position < self.committed}

    def step(self, geometry: Geometry, length: int, drafts: int, first_row: int, pages: np.ndarray):
        """Windows, appends and the ledger after commit, token by token."""
        if length == 0:
            return [], [], self
        ratio, rows = geometry.ratio, geometry.window_rows
        windows, appends, kept = [], [], dict(self.rows)
        end = self.committed + length
        still_needed = min(self._next_window(geometry, tokens) for tokens in range(max(0, end - drafts), end + 1))
        still_needed = max(still_needed, self.live_start)
        index = (self.ring_start + len(self.rows)) % geometry.ring_rows
        after = Ledger(self.slot, end, still_needed, kept.get(still_needed, index), drafts=min(drafts, length))
        for position in range(self.committed, end):
            row = first_row + position - self.committed
            if (position + 1) % ratio == 0:
                window = range(position - rows + 1, position + 1)
                padding = [q for q in window if q < 0]
                ring = [self.rows[q] for q in window if 0 <= q < self.committed]
                assert ring == [(ring[0] + i) % geometry.ring_rows for i in range(len(ring))]
                entry = position // ratio
                slot = pages[entry // PAGE_ENTRIES] * PAGE_ENTRIES + entry % PAGE_ENTRIES
                first = ring[0] if ring else None
                windows.append((row, len(padding), len(ring), self.slot, first, entry * ratio, slot))
            if position >= still_needed:
                appends.append((row, self.slot * geometry.ring_rows + index))
                kept[position] = index
                index = (index + 1) % geometry.ring_rows
        after.rows = {position: index for position, index in kept.items() if position >= still_needed}
        return windows, appends, after

    @staticmethod
    def _next_window(geometry: Geometry, num_tokens: int) -> int:
        """First position of the next window that closes after `num_tokens` tokens."""
        closing = num_tokens
        while (closing + 1) % geometry.ratio:
            closing += 1
        return max(0, closing - geometry.window_rows + 1)


class Book:
    """Ledgers beside a ring state, and a ring whose rows hold the position that was written there."""

    def __init__(self, geometry: Geometry, num_rings: int, max_pages: int = 1024):
        self.geometry = geometry
        self.ledgers = [Ledger(slot) for slot in range(num_rings)]
        self.state = p.empty_state(num_rings)
        self.ring = np.full(num_rings * geometry.ring_rows, -1, np.int64)
        pages = np.random.default_rng(1).permutation(num_rings * max_pages).astype(np.int32)
        self.page_table = pages.reshape(num_rings, max_pages)
        self.page_table.setflags(write=False)

    def plan(self, batch: list[tuple[int, int]], drafts: list[int] | None = None) -> p.Plan:
        """The plan of (slot, length) pairs, from read-only inputs."""
        self.inputs = (
            np.array([slot for slot, _ in batch], np.int64),
            np.cumsum([0, *(length for _, length in batch)]).astype(np.int64),
        )
        draft_tokens = None if drafts is None else np.array(drafts, np.int64)
        for array in (self.state, *self.inputs, *(() if drafts is None else (draft_tokens,))):
            array.setflags(write=False)
        plan = p.make_plan(self.geometry, self.state, *self.inputs, self.page_table, PAGE_ENTRIES, draft_tokens)
        self.state.setflags(write=True)
        return plan

    def step(self, batch: list[tuple[int, int]], drafts: list[int] | None, commit: bool = True) -> p.Plan:
        """Plan a step, compare every field with the ledgers, write the ring as a kernel does, commit or refuse."""
        plan = self.plan(batch, drafts)
        slots, query_start_loc = self.inputs
        windows, appends, after = [], [], []
        for i, (slot, length) in enumerate(batch):
            part = self.ledgers[slot].step(
                self.geometry, length, drafts[i] if drafts else 0, int(query_start_loc[i]), self.page_table[slot]
            )
            windows += part[0]
            appends += part[1]
            after.append(part[2])
        self._compare(plan, windows, appends, after, slots)
        starts = self.state[p.COMMITTED, slots]
        assert plan.boundary == p.has_boundary(starts, query_start_loc, self.geometry.ratio) == (len(windows) > 0)
        assert plan.num_tokens == query_start_loc[-1]

        before = self._live()
        written = plan.appends[p.APPEND_RING]
        assert len(set(written)) == len(written), "two appends to one row"
        assert not before & set(written), "an append lies on a live row"
        self.ring[written] = -2
        self.check_rings()  # a refused step leaves every live row intact
        if commit:
            for (slot, _), ledger, first_row in zip(batch, after, query_start_loc[:-1], strict=True):
                of_slot = plan.appends[:, plan.appends[p.APPEND_RING] // self.geometry.ring_rows == slot]
                positions = self.ledgers[slot].committed + of_slot[p.APPEND_INPUT] - first_row
                self.ring[of_slot[p.APPEND_RING]] = positions
                self.ledgers[slot] = ledger
            plan.commit(self.state)
            self.check_rings()
        return plan

    def _compare(self, plan: p.Plan, windows: list, appends: list, after: list[Ledger], slots: np.ndarray) -> None:
        assert plan.windows.dtype == plan.appends.dtype == np.int32
        expected = np.array(windows, object).reshape(-1, p.WINDOW_FIELDS).T
        unused = np.equal(expected[p.RING_FIRST], None)
        first = plan.windows[p.RING_FIRST]
        assert np.all((first >= 0) & (first < self.geometry.ring_rows)), "RING_FIRST leaves the ring"
        expected[p.RING_FIRST, unused] = first[unused]  # no row is taken from the ring: any index will do
        np.testing.assert_array_equal(plan.windows, expected.astype(np.int64))
        np.testing.assert_array_equal(plan.appends, np.array(appends, np.int64).reshape(-1, p.APPEND_FIELDS).T)
        np.testing.assert_array_equal(plan.slots, slots)
        ratio = self.geometry.ratio
        entries = [(self.ledgers[a.slot].committed // ratio, a.committed // ratio) for a in after]
        np.testing.assert_array_equal(plan.entries, np.array(entries, np.int64).reshape(-1, 2).T)
        state = [(a.committed, a.live_start, a.ring_start) for a in after]
        np.testing.assert_array_equal(plan.next_state, np.array(state, np.int64).reshape(-1, 3).T)

    def _live(self) -> set[int]:
        rows = self.geometry.ring_rows
        return {ledger.slot * rows + index for ledger in self.ledgers for index in ledger.rows.values()}

    def check_rings(self) -> None:
        """Every kept row is where the ledger says, and holds its own position."""
        for ledger in self.ledgers:
            indices = ledger.slot * self.geometry.ring_rows + np.array(list(ledger.rows.values()), np.int64)
            np.testing.assert_array_equal(self.ring[indices], list(ledger.rows))
            assert len(ledger.rows) <= self.geometry.max_live_rows

    def withdraw(self, slot: int, num_tokens: int) -> None:
        self.ledgers[slot].withdraw(num_tokens)
        self.state[p.COMMITTED, slot] -= num_tokens


geometries = st.builds(
    Geometry,
    kind=st.sampled_from(["hca", "csa", "indexer"]),
    ratio=st.sampled_from([1, 2, 4, 128]),
    head_dim=st.just(128),
    draft_slack=st.sampled_from([0, 1, 4, 8]),
)


@given(geometry=geometries, data=st.data())
def test_every_field_of_every_step(geometry, data):
    """Random batches in random order: empty requests, drafts, withdrawals and refused steps between committed ones."""
    book = Book(geometry, num_rings=4)
    lengths = st.one_of(
        st.integers(0, 3),
        st.integers(0, 2 * geometry.window_rows + 2),
        st.sampled_from([geometry.ratio - 1, geometry.ratio, geometry.ratio + 1, 2 * geometry.ring_rows + 1]),
    )
    for _ in range(data.draw(st.integers(1, 8), "steps")):
        slots = data.draw(st.permutations(range(4)), "order")[: data.draw(st.integers(0, 4), "requests")]
        batch = [(slot, data.draw(lengths, "length")) for slot in slots]
        drafts = None
        if data.draw(st.booleans(), "has drafts"):
            drafts = [data.draw(st.integers(0, geometry.draft_slack), "drafts") for _ in batch]
        book.step(batch, drafts, commit=data.draw(st.integers(0, 3), "refused at 0") > 0)
        for ledger in book.ledgers:
            if ledger.drafts and data.draw(st.booleans(), "withdraws"):
                book.withdraw(ledger.slot, data.draw(st.integers(0, ledger.drafts), "withdrawn"))


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("ratio", [1, 2, 4, 128])
@pytest.mark.parametrize("kind", ["hca", "csa"])
def test_decoding_wraps_the_ring(kind, ratio, alone):
    """One or a few tokens a step for three turns of the ring, every draft count, some of them withdrawn."""
    geometry = Geometry(kind, ratio, 128)
    book = Book(geometry, num_rings=2)
    rng = np.random.default_rng(3)
    while book.ledgers[1].committed < 3 * geometry.ring_rows + 5:
        length = int(rng.integers(1, geometry.draft_slack + 2))
        book.step([(1, length), (0, 1)][: 2 - alone], [length - 1, 0][: 2 - alone])
        book.withdraw(1, int(rng.integers(0, length)))
    assert np.all(book.ring[geometry.ring_rows :] != -1), "a row of the ring is never reached"


def test_no_cap_on_requests_or_tokens():
    """3,000 requests and 200,000 tokens in one step; then one request of 100,000."""
    book = Book(Geometry("csa", 4, 512), num_rings=3000, max_pages=40)
    rng = np.random.default_rng(5)
    book.step([(int(slot), int(length)) for slot, length in enumerate(rng.integers(0, 134, 3000))], None)
    plan = book.step([(int(slot), int(rng.integers(0, 134))) for slot in rng.permutation(3000)], None)
    assert plan.num_tokens > 190_000
    assert plan.num_windows > 45_000
    book = Book(Geometry("hca", 128, 512), num_rings=1)
    assert book.step([(0, 100_000)], None).num_windows == 781
    assert book.step([(0, 100_000)], [3]).num_windows == 781


def fields(plan: p.Plan) -> dict[str, np.ndarray]:
    return {f.name: np.asarray(getattr(plan, f.name)) for f in dataclasses.fields(plan)}


def test_a_plan_is_deterministic_and_stays_what_it_is():
    book = Book(Geometry("csa", 4, 512), num_rings=5)
    book.step([(3, 6), (1, 9), (4, 0)], [2, 0, 0])
    state = book.state.copy()
    batch, drafts = [(4, 70), (1, 1), (3, 0), (0, 13)], [8, 0, 0, 3]
    plan = book.plan(batch, drafts)
    first = {name: value.tobytes() for name, value in fields(plan).items()}
    assert {name: value.tobytes() for name, value in fields(book.plan(batch, drafts)).items()} == first
    np.testing.assert_array_equal(book.state, state)

    for name, value in fields(plan).items():
        if value.ndim:
            assert not value.flags.writeable, name
            with pytest.raises(ValueError, match="read-only"):
                value[...] = 0
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(plan, name, value)
    slots = np.array([2, 0], np.int64)
    plan = p.make_plan(book.geometry, book.state, slots, np.array([0, 5, 9]), book.page_table, PAGE_ENTRIES)
    first = {name: value.tobytes() for name, value in fields(plan).items()}
    slots[:] = 4
    plan.commit(book.state)
    assert {name: value.tobytes() for name, value in fields(plan).items()} == first
    np.testing.assert_array_equal(book.state[p.COMMITTED], state[p.COMMITTED] + [4, 0, 5, 0, 0])


def test_no_drafts_is_zero_drafts():
    book = Book(Geometry("hca", 128, 512), num_rings=3)
    batch = [(2, 130), (0, 1), (1, 0)]
    for name, value in fields(book.plan(batch)).items():
        np.testing.assert_array_equal(value, fields(book.plan(batch, [0, 0, 0]))[name])


@pytest.mark.parametrize(
    ("starts", "query_start_loc", "ratio", "expected"),
    [
        ([0], [0, 127], 128, False),
        ([0], [0, 128], 128, True),
        ([127], [0, 1], 128, True),
        ([128], [0, 127], 128, False),
        ([1, 255], [0, 1, 2], 128, True),
        (None, [0, 1], 128, None),
        ([], [0], 128, False),
        ([127], [0, 0], 128, False),
        ([127, 3, 255], [0, 0, 124, 124], 128, False),
        ([127, 4, 255], [0, 0, 124, 124], 128, True),
        ([3], [0, 1], 4, True),
        ([2], [0, 1], 4, False),
        ([4, 6], [0, 3, 4], 4, False),
        ([7], [0, 0], 4, False),
        ([9], [0, 1], 1, True),
        ([9], [0, 0], 1, False),
    ],
)
def test_has_boundary(starts, query_start_loc, ratio, expected):
    arguments = (starts, query_start_loc) if ratio == 128 else (starts, query_start_loc, ratio)
    assert p.has_boundary(*arguments) is expected
    if starts is not None:
        assert p.has_boundary(np.array(starts, np.int64), np.array(query_start_loc, np.int64), ratio) is expected


@pytest.mark.parametrize(
    ("query_start_loc", "threshold", "requests", "tokens"),
    [
        ([0], 1, 0, 0),
        ([0, 1, 2, 3], 1, 3, 3),
        ([0, 1, 2, 10, 11], 1, 2, 2),
        ([0, 5, 6], 1, 0, 0),
        ([0, 1, 1, 2, 9], 1, 3, 2),
        ([0, 4, 8, 13, 14], 4, 2, 8),
        ([0, 4, 8, 12], 4, 3, 12),
    ],
)
def test_decode_prefix(query_start_loc, threshold, requests, tokens):
    query_start_loc = np.array(query_start_loc, np.int64)
    assert p.num_decode_requests(query_start_loc, threshold) == requests
    assert p.num_decode_tokens(query_start_loc, threshold) == tokens
