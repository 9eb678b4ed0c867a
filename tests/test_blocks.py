"""blocks: pages are free or owned, never both; a handle opens for whom it was made, while what it names is there."""

from __future__ import annotations

import base64
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvfold_service.blocks import FREE, ForgedHandleError, HandleCodec, PageName, PagePool, StaleEpochError

KEY, EPOCH = b"k" * 32, b"epoch--1"
CODEC = HandleCodec(KEY, "worker-1", EPOCH)
NAME = PageName(group=2, page=70_000, generation=9)
HANDLE = CODEC.seal("tenant-a", NAME)
OWNER = st.tuples(st.integers(0, 3), st.integers(0, 1))


class Pool(RuleBasedStateMachine):
    """A pool beside a plain record of who was given what."""

    NUM_PAGES = 12

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(self.NUM_PAGES)
        self.owned: dict[tuple[int, int], list[int]] = {}
        self.generation = [0] * self.NUM_PAGES

    def bump(self, pages: list[int]) -> None:
        for page in pages:
            self.generation[page] += 1

    @rule(owner=OWNER, wanted=st.integers(0, NUM_PAGES))
    def take(self, owner, wanted):
        number = min(wanted, self.pool.num_free)
        held = self.owned.setdefault(owner, [])
        pages = self.pool.take(*owner, len(held), number).tolist()
        assert len(set(pages)) == number
        assert not set(pages) & {page for others in self.owned.values() for page in others}
        held += pages

    @precondition(lambda self: any(self.owned.values()))
    @rule(data=st.data())
    def release(self, data):
        """A request's pages from some index on, as truncating and undoing do."""
        owner = data.draw(st.sampled_from([owner for owner, pages in self.owned.items() if pages]))
        keep = data.draw(st.integers(0, len(self.owned[owner])))
        gone = self.owned[owner][keep:]
        self.pool.release(np.array(gone, np.int32))
        del self.owned[owner][keep:]
        self.bump(gone)

    @precondition(lambda self: any(self.owned.values()))
    @rule(data=st.data())
    def withdraw(self, data):
        held = [page for pages in self.owned.values() for page in pages]
        pages = data.draw(st.lists(st.sampled_from(held), unique=True))
        self.pool.withdraw(np.array(pages, np.int32))
        self.bump(pages)

    @invariant()
    def agrees(self):
        pool = self.pool
        pool.check_integrity()
        assert pool.generation.tolist() == self.generation
        assert pool.num_used == sum(map(len, self.owned.values())) == self.NUM_PAGES - pool.num_free
        told = {
            page: (int(pool.owner_slot[page]), int(pool.owner_compressor[page]), int(pool.owner_page_idx[page]))
            for page in np.flatnonzero(pool.owner_slot != FREE)
        }
        assert told == {page: (*owner, i) for owner, pages in self.owned.items() for i, page in enumerate(pages)}


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_pool_gives_every_page_and_no_more():
    pool = PagePool(5)
    assert sorted(pool.take(0, 0, 0, 5).tolist()) == [0, 1, 2, 3, 4]
    assert pool.take(1, 0, 0, 0).tolist() == []
    with pytest.raises(AssertionError):
        pool.take(1, 0, 0, 1)


def test_a_free_page_cannot_be_freed():
    pool = PagePool(3)
    page = pool.take(0, 0, 0, 1)
    pool.release(page)
    with pytest.raises(AssertionError):
        pool.release(page)


def _free_and_owned(pool: PagePool) -> None:
    pool.owner_slot[pool._free[0]] = 0


def _lost(pool: PagePool) -> None:
    pool.num_free -= 1


def _free_twice(pool: PagePool) -> None:
    pool._free[0] = pool._free[1]


@pytest.mark.parametrize("damage", [_free_and_owned, _lost, _free_twice])
def test_integrity_notices(damage):
    pool = PagePool(4)
    pool.take(0, 0, 0, 1)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError):
        pool.check_integrity()


@given(
    tenant=st.text(max_size=20),
    name=st.builds(PageName, st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)),
)
def test_a_handle_says_what_was_sealed(tenant, name):
    assert CODEC.open(tenant, CODEC.seal(tenant, name)) == name


def test_handles_of_other_generations_differ_and_are_plain_ascii():
    handles = {CODEC.seal("t", PageName(0, 0, generation)) for generation in range(100)}
    assert len(handles) == 100
    assert {len(handle) for handle in handles} == {52}
    assert all(handle.isascii() and handle.replace("-", "").replace("_", "").isalnum() for handle in handles)


def assert_forged(handle: str, tenant: str = "tenant-a", codec: HandleCodec = CODEC) -> None:
    with pytest.raises(ForgedHandleError):
        codec.open(tenant, handle)


def test_every_single_bit_matters():
    raw = base64.urlsafe_b64decode(HANDLE)
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        assert_forged(base64.urlsafe_b64encode(flipped).decode())
    for bit in range(8 * len(HANDLE)):
        text = list(HANDLE)
        text[bit // 8] = chr(ord(text[bit // 8]) ^ 1 << bit % 8)
        assert_forged("".join(text))


@pytest.mark.parametrize("more", ["=", "==", "A", "AAAA", "\n", " ", "\0", "é"])
def test_nothing_may_stand_around_a_handle(more):
    assert_forged(HANDLE + more)
    assert_forged(more + HANDLE)


def test_no_part_of_a_handle_is_a_handle():
    for length in range(len(HANDLE)):
        assert_forged(HANDLE[:length])
        assert_forged(HANDLE[length + 1 :])


def test_a_page_has_one_spelling():
    """The other base64 alphabet says the same bytes, but is not what was given out."""
    handle = next(h for h in (CODEC.seal("tenant-a", PageName(0, 0, g)) for g in count()) if "-" in h and "_" in h)
    assert_forged(handle.replace("-", "+"))
    assert_forged(handle.replace("_", "/"))


@pytest.mark.parametrize(
    "rubbish", ["", "é" * 52, "\ud800" * 52, "=" * 52, "A" * 52, "A" * 2_000_000, "../../etc/passwd"]
)
def test_rubbish_is_no_handle(rubbish):
    assert_forged(rubbish)


@given(st.text(st.sampled_from(HANDLE + "+/=\n"), min_size=50, max_size=54))
def test_what_looks_like_a_handle_is_none(text):
    assert_forged(text)


@pytest.mark.parametrize(
    ("codec", "tenant"),
    [
        (CODEC, "tenant-b"),
        (CODEC, ""),
        (HandleCodec(KEY, "worker-2", EPOCH), "tenant-a"),
        (HandleCodec(b"o" * 32, "worker-1", EPOCH), "tenant-a"),
        (HandleCodec(b"o" * 32, "worker-1", b"epoch--2"), "tenant-a"),
        (HandleCodec(KEY, "worker-2", b"epoch--2"), "tenant-a"),
        (HandleCodec(KEY, "worker-1tenant-", EPOCH), "a"),
        (HandleCodec(KEY, "worker-", EPOCH), "1tenant-a"),
    ],
    ids=lambda value: value if isinstance(value, str) else "codec",
)
def test_a_handle_is_nothing_to_others(codec, tenant):
    assert_forged(HANDLE, tenant, codec)


def test_a_handle_from_before_the_restart_is_stale_if_it_was_true():
    later = HandleCodec(KEY, "worker-1", b"epoch--2")
    with pytest.raises(StaleEpochError):
        later.open("tenant-a", HANDLE)
    assert_forged(HANDLE, "tenant-b", later)
    assert_forged(HANDLE[:-1] + ("A" if HANDLE[-1] != "A" else "B"), "tenant-a", later)
