"""Faults that other engines shipped, each as the small input that shows its whole kind.

Where a run must equal another bit for bit, the other is one request alone in one step on the same backend.
"""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
import torch

from kvfold_kernels import backends
from kvfold_kernels import plan as p
from kvfold_kernels.geometry import KINDS, Geometry
from tests import cases
from tests.cases import make_rows
from tests.checks import assert_bits
from tests.conftest import (
    LONG_STREAM,
    NAN,
    adopt,
    alone,
    as_fp32,
    assert_near,
    feed,
    hold,
    inject,
    last_entries,
    live_rows,
    naive,
    one_by_one,
    poison_dead,
    resume,
    serial,
    sparse_rope,
    stream,
)

SERVED = {"hca": "fp8_ds_mla", "csa": "fp8_ds_mla", "indexer": "indexer_fp8"}
kinds = pytest.mark.parametrize("kind", SERVED)


def assert_new_entries(holder, slot: int, expected: torch.Tensor) -> None:
    """The entries that the last step gave a request are those of `expected`, its entries from the start."""
    plan = holder.plans[-1]
    first, stop = (int(e) for e in plan.entries[:, list(plan.slots).index(slot)])
    if stop > first:
        assert_bits(last_entries(holder, stop - first, slot), expected[first:stop])


# SGLang 27747: query_start_loc [0, 6, 12] in a buffer padded to 2,048 rows.
@pytest.mark.parametrize("filling", [NAN, 1e30])
@kinds
def test_rows_behind_the_last_token_change_nothing(backend, kind, filling):
    holder, ratio = hold(backend, kind, SERVED[kind]), KINDS[kind].ratio
    starts = {0: ratio - 3, 1: 2 * ratio - 6}
    for slot, start in starts.items():
        resume(holder, slot, stream(kind, slot), start)
    rows = torch.full((2048, holder.compressor.geometry.row_width), filling, dtype=torch.bfloat16)
    for slot, start in starts.items():
        rows[6 * slot : 6 * slot + 6] = stream(kind, slot)[start : start + 6]
    plan = holder.step([(0, 6), (1, 6)], rows)
    assert plan.num_tokens == 12
    assert plan.num_windows >= 2
    for slot in starts:
        assert_new_entries(holder, slot, serial(backend, kind, SERVED[kind], slot))


# transformers 45938: [t0, t1, t2, pad].
@kinds
def test_padding_is_never_pooled(backend, kind):
    holder, ratio = hold(backend, kind, SERVED[kind]), KINDS[kind].ratio
    feed(holder, {0: stream(kind)}, [[(0, ratio - 1)]], pad=1)
    assert not holder.plans[-1].boundary
    feed(holder, {0: stream(kind)}, [[(0, 1)]], pad=3)
    assert_bits(holder.entries(), serial(backend, kind, SERVED[kind])[:1])


# SGLang 32470: 72 ragged requests of 1 to 8 tokens, 100 times.
@kinds
def test_ragged_requests_repeat(backend, kind):
    rng = np.random.default_rng(72)
    lengths, ratio = rng.integers(1, 9, 72), KINDS[kind].ratio
    starts = [int(rng.integers(ratio - 8, ratio)) if ratio > 8 else int(rng.integers(0, 9)) for _ in lengths]
    holder = hold(backend, kind, SERVED[kind], num_rings=72)
    for slot, start in enumerate(starts):
        resume(holder, slot, stream(kind, slot), start, ring_start=slot % 30)
    state, pages = holder.state.copy(), []
    for _ in range(3 if backend.name == "reference" else 100):
        holder.state[:] = state
        holder.pages.fill_(0xFF)
        feed(holder, {slot: stream(kind, slot) for slot in range(72)}, [list(enumerate(lengths.tolist()))])
        pages = pages or [holder.pages.clone()]
        assert_bits(holder.pages, pages[0])
    assert holder.plans[-1].num_windows > 30
    for slot in (0, 17, 71):
        assert_new_entries(holder, slot, serial(backend, kind, SERVED[kind], slot))


# SGLang 30333: rings and pages full of NaN, a request starts at 0.
@kinds
def test_a_first_request_on_nan_memory(backend, kind):
    holder = hold(backend, kind, "fp32")  # rings and pages start as NaN
    feed(holder, {0: stream(kind)}, alone([1, 300]), before=poison_dead)
    entries = as_fp32(holder.entries())
    assert np.isfinite(entries).all()
    assert_near(entries, naive(stream(kind)[:301], holder.compressor), 2e-6)


# SGLang 40337: a ring sized by window, addressed by page.
@pytest.mark.parametrize("draft_slack", [0, 1, 8])
@kinds
def test_reachable_ring_rows_are_the_allocated_ones(backend, kind, draft_slack):
    """Decoding fills a ring from its first row to its last, and nothing of its neighbours."""
    holder = hold(backend, kind, SERVED[kind], num_rings=3, draft_slack=draft_slack)
    ring_rows = holder.compressor.geometry.ring_rows
    num_tokens = 2 * ring_rows + 3
    feed(holder, {1: stream(kind)}, one_by_one(num_tokens, slot=1))
    written = ~holder.rings.isnan().all(-1)
    assert written[1].all()
    assert not written[0].any()
    assert not written[2].any()
    assert_bits(holder.entries(1), serial(backend, kind, SERVED[kind])[: num_tokens // KINDS[kind].ratio])


# SGLang 38922, 38819: export at an odd token count, import where the ring has another size.
# SGLang 30339, 34562; ATOM 1417: run [0, 300) cold against resume at 256 with imported state.
@pytest.mark.parametrize("num_tokens", [1, 131, 255, 256, 301])
@pytest.mark.parametrize("ring", ["fp32", "bf16"])
@kinds
def test_state_moves_to_a_ring_of_another_size(backend, kind, num_tokens, ring):
    expected, rows = serial(backend, kind, SERVED[kind]), stream(kind)
    giver = hold(backend, kind, SERVED[kind], ring=ring)
    feed(giver, {2: rows}, alone([num_tokens // 2, num_tokens - num_tokens // 2], slot=2))
    taker = hold(backend, kind, SERVED[kind], ring="fp32", draft_slack=3, page_entries=4)
    adopt(taker, 1, num_tokens, live_rows(giver, 2), ring_start=5)
    for length in (1, 300 - num_tokens % 128):
        feed(taker, {1: rows}, alone([length], slot=1))
        assert_new_entries(taker, 1, expected)


# SGLang 28455: tiny negative values.
@pytest.mark.parametrize("exponent", [-133, -126, -60, -20, -12])
@kinds
def test_tiny_negative_values_give_no_nan_byte(backend, kind, exponent):
    holder = hold(backend, kind, SERVED[kind])
    num_tokens = 2 * KINDS[kind].ratio
    rows = stream(kind)[:num_tokens].clone()
    half = holder.compressor.geometry.half_width
    rows[:, :half] = (-rows[:, :half].abs().float() * 2.0**exponent).bfloat16()
    rows[:, 0] = 1  # one column keeps the row's norm from lifting the others
    holder.step([(0, num_tokens)], rows)
    fp8 = holder.entries()[:, : 128 if kind == "indexer" else 448]
    assert not ((fp8 & 0x7F) == 0x7F).any()
    assert fp8[:, 0].any()


# SGLang 40351; ATOM 1460; sm89 fork 51: page index past 2 GiB, block id 70,000, position 1,048,575.
@pytest.mark.parametrize(
    ("kind", "cache_format", "block", "past"),
    [("hca", "fp8_ds_mla", 70_000, 2**31), ("csa", "fp8_ds_mla", 70_000, 2**31), ("indexer", "fp32", 140_000, 2**32)],
)
def test_blocks_far_into_a_pool_at_position_1048575(backend, kind, cache_format, block, past):
    """All other bytes of the pool stay 0; untouched zero pages take no memory."""
    ratio = KINDS[kind].ratio
    first = 1_048_576 - ratio
    holder = hold(backend, kind, cache_format, page_entries=64)
    small = hold(backend, kind, cache_format, page_entries=64)
    layout = holder.compressor.layout
    assert block * layout.page_bytes > past
    holder.pages = torch.from_numpy(np.zeros((block + 2, layout.page_bytes), np.uint8))
    rows = stream(kind)[:ratio]
    for h in (small, holder):
        h.compressor = dataclasses.replace(h.compressor, cos_sin=sparse_rope(first, 1_048_576))
        # the older half of an overlapping window; hca needs no row of the ring
        adopt(h, 0, first, stream(kind)[ratio : ratio * h.compressor.geometry.halves])
        h.free = [block] if h is holder else h.free
        h.step([(0, ratio)], rows)
    assert_bits(last_entries(holder, 1), last_entries(small, 1))
    page, i = divmod(int(holder.plans[-1].windows[p.SLOT, 0]), layout.entries)
    assert (page, i) == (block, 63)
    for area in (layout.value_slice(i), layout.scale_slice(i)):
        holder.pages[page, area] = 0
    assert not np.count_nonzero(holder.pages.numpy().view(np.bool_))


# vLLM 44161: 256 requests of 1 token at 256 phases; mixed with one 8,192 prefill.
@kinds
def test_256_phases_and_a_prefill(backend, kind):
    rows = {slot: stream(kind, slot % 4) for slot in range(256)} | {256: stream(kind, 1, LONG_STREAM)}
    expected = {slot: serial(backend, kind, SERVED[kind], slot % 4) for slot in range(256)}
    expected[256] = serial(backend, kind, SERVED[kind], 1, LONG_STREAM)
    decodes = [(int(slot), 1) for slot in np.random.default_rng(4).permutation(256)]
    for prefill in ([], [(256, LONG_STREAM)]):
        holder = hold(backend, kind, SERVED[kind], num_rings=257, ring="bf16", page_entries=64)
        for phase in range(256):
            resume(holder, phase, rows[phase], phase, ring_start=phase % 30)
        feed(holder, rows, [decodes + prefill])
        assert holder.plans[-1].num_windows == 256 // KINDS[kind].ratio + len(expected[256]) * len(prefill)
        for slot, _ in decodes + prefill:
            assert_new_entries(holder, slot, expected[slot])


@kinds
def test_a_mixed_step_is_not_slower_than_its_parts(kind):
    """The other half of vLLM 44161, for the backend that is there for speed; room for a noisy machine, not for a fault
    of this kind, which was many times."""
    backend = backends.load("cpu")
    holder = hold(backend, kind, SERVED[kind], num_rings=257, ring="bf16", page_entries=64)
    rows = stream(kind, 1, LONG_STREAM)
    for phase in range(256):
        resume(holder, phase, rows, phase, ring_start=phase % 30)
    decodes, prefill = [(slot, 1) for slot in range(256)], [(256, LONG_STREAM)]
    feed(holder, dict.fromkeys(range(257), rows), [decodes + prefill])  # its plan, and pages for all

    def best(requests):
        """Least time of a launch of these requests; it may be repeated."""
        holder.state[p.COMMITTED, :256] = np.arange(256)
        holder.state[:, 256] = 0
        slots = np.array([slot for slot, _ in requests])
        loc = np.cumsum([0, *(length for _, length in requests)])
        plan = p.make_plan(holder.compressor.geometry, holder.state, slots, loc, holder.page_table, 64)
        windows, appends = (torch.from_numpy(array.copy()) for array in (plan.windows, plan.appends))
        given = torch.cat([rows, rows[:256]])[: plan.num_tokens].contiguous()
        times = []
        for _ in range(15):
            began = time.perf_counter()
            backend.compress(windows, appends, given, holder.rings, holder.pages, holder.compressor)
            times.append(time.perf_counter() - began)
        return min(times)

    apart = best(decodes) + best(prefill)
    assert best(decodes + prefill) < 1.5 * apart


# vLLM 48809: T in 1, 7, 15, 16, 17, 4095, 4096.
@kinds
def test_any_number_of_tokens(backend, kind):
    expected = serial(backend, kind, SERVED[kind], 1, LONG_STREAM)
    for num_tokens in (1, 7, 15, 16, 17, 4095, 4096):
        holder = hold(backend, kind, SERVED[kind], num_rings=1)
        feed(holder, {0: stream(kind, 1, LONG_STREAM)}, alone([num_tokens]))
        assert_bits(holder.entries(), expected[: num_tokens // KINDS[kind].ratio])


# vLLM 54703; Ascend 15204: one 65,536-token step in a small state pool.
@pytest.mark.parametrize(
    "kind", ["hca", pytest.param("csa", marks=pytest.mark.long), pytest.param("indexer", marks=pytest.mark.long)]
)
def test_a_step_of_65536_tokens(backend, kind):
    """With one ring; the last entries are those of a request that resumes just before them."""
    geometry = Geometry(kind, KINDS[kind].ratio, KINDS[kind].head_dim)
    rows = make_rows(geometry, 65_536)
    start = 65_536 - 300
    holder, resumed = (
        hold(backend, kind, SERVED[kind], num_rings=n, page_entries=64, max_position=65_536) for n in (1, 4)
    )
    holder.pages = holder.pages[:1].repeat(65_536 // geometry.ratio // 64, 1)
    holder.page_table = np.arange(len(holder.pages), dtype=np.int32)[None]
    feed(holder, {0: rows}, [[(0, 65_536)]])
    resume(resumed, 0, rows, start)
    feed(resumed, {0: rows}, alone([100, 200]))
    count = 65_536 // geometry.ratio - start // geometry.ratio
    assert_bits(last_entries(holder, count), last_entries(resumed, count))
    feed(resumed, {1: rows}, alone([512], slot=1))
    assert_bits(holder.entries()[: 512 // geometry.ratio], resumed.entries(1))
    assert len(live_rows(holder, 0)) <= geometry.max_live_rows
    assert holder.rings.shape == (1, geometry.ring_rows, geometry.row_width)


# Ascend 9111: draft positions 6 to 9 in one step, accept 6, continue at 7; the same across 127 and 128.
@pytest.mark.parametrize("accepted", range(5))
@pytest.mark.parametrize("start", [6, 125, 126, 127, 128, 254])
@kinds
def test_withdrawn_drafts_leave_no_trace(backend, kind, start, accepted):
    """Four drafts, some accepted; the others' rows, and entries they closed, are overwritten by what comes instead."""
    holder, rows, ratio = hold(backend, kind, SERVED[kind]), stream(kind), KINDS[kind].ratio
    resume(holder, 0, rows, start)
    wrong = make_rows(holder.compressor.geometry, 4 - accepted, seed=77)
    holder.step([(0, 4)], torch.cat((rows[start : start + accepted], wrong)), [4])
    holder.state[p.COMMITTED, 0] -= 4 - accepted
    feed(holder, {0: rows}, alone([1, 3, 135]), before=poison_dead)
    first, stop = start // ratio, (start + accepted + 139) // ratio
    assert_bits(last_entries(holder, stop - first), serial(backend, kind, SERVED[kind])[first:stop])


@kinds
def test_speculative_decoding_equals_serial(backend, kind):
    """Two requests, round their rings, a random number of drafts accepted in each step."""
    holder = hold(backend, kind, SERVED[kind])
    rng, rows = np.random.default_rng(11), {slot: stream(kind, slot) for slot in (0, 3)}
    while min(seen := holder.state[p.COMMITTED, [0, 3]]) < 560:
        order = [0, 3] if rng.integers(2) else [3, 0]
        drafts = rng.integers(0, 9, 2)
        accepted = [int(rng.integers(0, d + 1)) for d in drafts]
        parts = []
        for slot, d, a in zip(order, drafts, accepted, strict=True):
            at = int(holder.state[p.COMMITTED, slot])
            wrong = make_rows(holder.compressor.geometry, int(d) - a, seed=at)
            parts += [rows[slot][at : at + 1 + a], wrong]
        poison_dead(holder)
        holder.step([(slot, 1 + int(d)) for slot, d in zip(order, drafts, strict=True)], torch.cat(parts), list(drafts))
        holder.state[p.COMMITTED, order] -= drafts - accepted
    for slot, tokens in zip((0, 3), seen, strict=True):
        assert_bits(holder.entries(slot), serial(backend, kind, SERVED[kind], slot)[: tokens // KINDS[kind].ratio])


# llama.cpp 26063, 26471: lengths around a boundary; chunks of 512 against one shot.
@kinds
def test_lengths_around_boundaries_and_chunks_of_512(backend, kind):
    expected = serial(backend, kind, SERVED[kind])
    for length in (127, 128, 129, 130, 255, 256, 257, 383, 384, 385):
        holder = hold(backend, kind, SERVED[kind])
        feed(holder, {0: stream(kind)}, [[(0, length)]])
        assert_bits(holder.entries(), expected[: length // KINDS[kind].ratio])
        feed(holder, {0: stream(kind)}, alone([1, 3, KINDS[kind].ratio]))
        assert_new_entries(holder, 0, expected)
    holder = hold(backend, kind, SERVED[kind], num_rings=1)
    feed(holder, {0: stream(kind, 1, LONG_STREAM)}, alone([512] * 4))
    long = serial(backend, kind, SERVED[kind], 1, LONG_STREAM)
    assert_bits(holder.entries(), long[: 2048 // KINDS[kind].ratio])


# omlx 2271: csa fed one token a step against one prefill.
@pytest.mark.parametrize("kind", ["csa", "indexer"])
def test_the_overlap_survives_steps_of_one_token(backend, kind):
    holder, rows = hold(backend, kind, "fp32"), stream(kind)
    feed(holder, {0: rows}, one_by_one(41))
    assert_bits(holder.entries(), serial(backend, kind, "fp32")[:10])
    older_half_gone = rows[:41].clone()
    older_half_gone[:, : holder.compressor.geometry.head_dim] = 0
    lost = hold(backend, kind, "fp32")
    feed(lost, {0: older_half_gone}, one_by_one(41))
    assert_bits(lost.entries()[:1], holder.entries()[:1])  # the first window has no older half
    assert (as_fp32(lost.entries())[1:] != as_fp32(holder.entries())[1:]).any(1).all()


# pypto-lib 1260: request order permuted between steps; the same slot given to a new request.
@kinds
def test_permuted_requests_and_reused_slots(backend, kind):
    holder = hold(backend, kind, SERVED[kind], num_rings=6)
    rng, seeds = np.random.default_rng(13), {slot: slot for slot in range(6)}
    for turn in range(24):
        order = [int(slot) for slot in rng.permutation(6)]
        feed(holder, {s: stream(kind, seeds[s]) for s in order}, [[(s, int(rng.integers(1, 24))) for s in order]])
        for slot in order:
            assert_new_entries(holder, slot, serial(backend, kind, SERVED[kind], seeds[slot]))
        if turn % 8 == 7:
            slot = order[0]
            holder.reset(slot)
            seeds[slot] += 6


# ATOM 1775: the cache is a view with a storage offset and a padded stride.
@pytest.mark.parametrize(("kind", "cache_format"), [*SERVED.items(), ("indexer", "indexer_mxfp4"), ("csa", "fp32")])
def test_pages_that_are_a_view(backend, kind, cache_format):
    holder = hold(backend, kind, cache_format)
    page_bytes, num_pages = holder.compressor.layout.page_bytes, holder.num_pages
    stride, offset = page_bytes + 192, 3 * page_bytes + 64
    storage = torch.full((offset + (num_pages + 2) * stride,), 0xFF, dtype=torch.uint8)
    holder.pages = storage.as_strided((num_pages, page_bytes), (stride, 1), offset)
    feed(holder, {0: stream(kind)}, alone([300, 90]))
    expected = serial(backend, kind, cache_format)[: 390 // KINDS[kind].ratio]
    assert_bits(holder.entries(), expected)
    slots = holder.slots_of(0).tolist()
    assert len(slots) == len(expected)
    layout = holder.compressor.layout
    for slot, entry in zip(slots, expected, strict=True):
        page, i = divmod(slot, layout.entries)
        areas = (layout.value_slice(i), layout.scale_slice(i))
        for area, part in zip(areas, entry.split([layout.format.value_bytes, layout.format.scale_bytes]), strict=True):
            at = offset + page * stride
            assert_bits(storage[at + area.start : at + area.stop], part)
            storage[at + area.start : at + area.stop] = 0xFF
    assert (storage == 0xFF).all(), "a byte outside the entries was written"


# vLLM 50803: values exactly on rounding ties. The pinned rounding is to even, whatever the sign.
@kinds
def test_entries_on_rounding_ties(backend, kind):
    """The middles between e4m3's 128, 144, …, 256, in a block whose largest value is 448."""
    compressor = hold(backend, kind, SERVED[kind]).compressor
    middles = torch.arange(136.0, 256, 16)
    row = torch.zeros(compressor.geometry.head_dim)
    row[0], row[1:9], row[9:17] = 448, middles, -middles
    entry = inject(backend, compressor, row)[0]
    expected = [128.0, 160, 160, 192, 192, 224, 224, 256]
    got = entry[1:17].view(torch.float8_e4m3fn).float().tolist()
    assert got == [*expected, *(-x for x in expected)]


# vLLM CuTe kernel: the first valid row's score is −∞.
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@kinds
def test_a_score_of_minus_infinity_is_a_weight_of_zero(backend, kind, dtype):
    """In the first row, in several, in all rows but one: as if the row were not there, whatever its kv."""
    holder, other = hold(backend, kind, "fp32"), hold(backend, kind, "fp32")
    geometry = holder.compressor.geometry
    ratio, half = geometry.ratio, geometry.half_width
    rows = make_rows(geometry, 3 * ratio, dtype=dtype)
    rows[0, half:] = -torch.inf  # the first row of the first window
    rows[ratio : ratio + 2, half::2] = -torch.inf
    rows[2 * ratio - 1, half::3] = -torch.inf
    rows[2 * ratio : 3 * ratio - 1, half:] = -torch.inf  # one row is left of the last window's own
    changed = rows.clone()
    changed[:, :half][rows[:, half:] == -torch.inf] = 1e30
    holder.step([(0, 3 * ratio)], rows)
    for part in changed.split(3):
        other.step([(0, len(part))], part)
    assert_bits(holder.entries(), other.entries())
    assert_near(as_fp32(holder.entries()), naive(rows, holder.compressor), 2e-6)


@kinds
def test_a_column_of_minus_infinities_is_zero(backend, kind):
    holder = hold(backend, kind, "fp32")
    geometry = holder.compressor.geometry
    half = geometry.half_width
    rows = make_rows(geometry, 3 * geometry.ratio, dtype="fp32")
    dead = [0, 5, geometry.nope_dim, geometry.nope_dim + 1]  # the last two are one rotated pair
    for first in range(half, geometry.row_width, geometry.head_dim):
        rows[:, [first + column for column in dead]] = -torch.inf
    holder.step([(0, len(rows))], rows)
    entries = as_fp32(holder.entries())
    assert not entries[:, dead].any()
    assert entries.any(1).all()
    assert_near(entries, naive(rows, holder.compressor), 2e-6)
    holder = hold(backend, kind, SERVED[kind])
    rows[:, half:] = -torch.inf
    holder.step([(0, len(rows))], rows)
    fp8 = holder.entries()[:, : geometry.nope_dim]
    assert not (fp8 & 0x7F).any()


@pytest.mark.parametrize("kv_top", [1.0, 1e15, 3.3e38])
@kinds
def test_no_nan_unless_the_input_has_one(backend, kind, kv_top):
    """Scores that are equal, huge, tiny or −∞, over kv of 0, denormals and the largest numbers."""
    holder = hold(backend, kind, "fp32")
    geometry = holder.compressor.geometry
    rng = np.random.default_rng(21)
    kv = np.array([0.0, -0.0, 1e-40, -1e-38, 1e-20, -1.0, kv_top, -kv_top], np.float32)
    score = np.array([0.0, 1e-40, 3.3e38, 3.3e38, -3.3e38, 88.0, -104.0, -np.inf], np.float32)
    shape = (4 * geometry.ratio, geometry.half_width)
    rows = torch.from_numpy(np.concatenate((rng.choice(kv, shape), rng.choice(score, shape)), 1))
    rows[geometry.ratio : 2 * geometry.ratio, geometry.half_width :] = 7.0
    assert backend.find_non_finite(rows, len(rows)) is None
    holder.step([(0, len(rows))], rows)
    entries = as_fp32(holder.entries())
    assert not np.isnan(entries).any()
    if kv_top < 1e16:  # beyond, a sum of squares overflows
        assert_near(entries, naive(rows, holder.compressor), 2e-6)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@kinds
def test_values_that_no_step_may_hold_are_found(backend, kind, dtype):
    """NaN anywhere, ±∞ in kv, +∞ in score; −∞ in score is legal, and padding is not looked at."""
    geometry = hold(backend, kind, "fp32").compressor.geometry
    half, width = geometry.half_width, geometry.row_width
    clean = make_rows(geometry, 700, dtype=dtype)
    clean[3, half + 1] = -torch.inf
    assert backend.find_non_finite(clean, 700) is None
    for value, columns in ((NAN, (0, half - 1, half, width - 1)), (torch.inf, (0, half)), (-torch.inf, (0, half - 1))):
        for column in columns:
            for row in (0, 350, 699):
                rows = clean.clone()
                rows[row, column] = value
                assert backend.find_non_finite(rows, 700) == (row, column)
                assert backend.find_non_finite(rows, row) is None
    rows = clean.clone()
    rows[[9, 9, 680], [5, 2, 0]] = NAN
    assert backend.find_non_finite(rows, 700) == (9, 2)
    assert backend.find_non_finite(rows, 0) is None


@pytest.mark.parametrize(
    "wrong",
    ["a plain cache for packed entries", "packed pages for plain entries", "fp32 rows for bf16 rings", "other rows"],
)
def test_operands_of_another_layout_are_refused(backend, wrong) -> None:
    """A kernel that writes by address must not be handed a cache of another layout; nothing is written then."""
    packed, plain = cases.make_compressor("csa", "fp8_ds_mla"), cases.make_compressor("csa", "bf16")
    holder = cases.Holder(packed, backend, num_rings=1, num_pages=2)
    rows = make_rows(packed.geometry, 8)
    match wrong:
        case "a plain cache for packed entries":
            holder.pages = torch.full((2, plain.layout.page_bytes), 0xFF, dtype=torch.uint8)
        case "packed pages for plain entries":
            holder.compressor = plain
        case "fp32 rows for bf16 rings":
            rows, holder.rings = rows.float(), holder.rings.to(torch.bfloat16)
        case "other rows":
            rows = make_rows(cases.make_compressor("indexer", "indexer_fp8").geometry, 8)
    with pytest.raises(ValueError, match=r"must be|cannot go"):
        holder.step([(0, 8)], rows)
    assert (holder.pages == 0xFF).all()
    assert holder.rings.isnan().all()
