"""The same rows give the same bits: any split into steps, any neighbours, any order, whatever lies in unused memory.

Expected is always one request alone in one step, on the same backend.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold_kernels import plan as p
from kvfold_kernels.backends import Backend
from tests.cases import Holder
from tests.checks import assert_bits
from tests.conftest import alone, feed, hold, one_by_one, poison_dead, resume, serial, stream

NATIVE = (
    ("hca", "fp32"),
    ("hca", "fp8_ds_mla"),
    ("csa", "fp32"),
    ("csa", "fp8_ds_mla"),
    ("indexer", "fp32"),
    ("indexer", "indexer_fp8"),
    ("indexer", "indexer_mxfp4"),
)
"""fp32 shows every bit of a row before it is quantised; the others are what serves."""

NUM_TOKENS = {"hca": 400, "csa": 61, "indexer": 61}
kinds_and_formats = pytest.mark.parametrize(("kind", "cache_format"), NATIVE)
kinds = pytest.mark.parametrize(("kind", "cache_format"), [(kind, "fp32") for kind in NUM_TOKENS])


def assert_serial(backend: Backend, holder: Holder, cache_format: str, seeds: dict[int, int]) -> None:
    """Each slot's entries are those of its stream alone, however many tokens it has seen."""
    geometry = holder.compressor.geometry
    for slot, seed in seeds.items():
        num_entries = geometry.num_entries(int(holder.state[p.COMMITTED, slot]))
        expected = serial(backend, geometry.kind, cache_format, seed)[:num_entries]
        assert_bits(holder.entries(slot), expected)


@st.composite
def schedules(draw, num_tokens: int, slots: range = range(3)) -> list[list[tuple[int, int]]]:
    """Steps that give each slot num_tokens: any lengths, any members, any order."""
    left, steps = dict.fromkeys(slots, num_tokens), []
    length = st.one_of(st.integers(0, 4), st.integers(0, num_tokens))
    for _ in range(draw(st.integers(0, 5))):
        members = draw(st.permutations(slots))[: draw(st.integers(1, len(slots)))]
        step = [(slot, min(left[slot], draw(length))) for slot in members]
        for slot, taken in step:
            left[slot] -= taken
        steps.append(step)
    return [*steps, [(slot, left[slot]) for slot in draw(st.permutations(slots))]]


@kinds_and_formats
def test_any_chunking_any_neighbours_any_order(backend, kind, cache_format):
    """With 0 to 5 rows of NaN behind the last token, and NaN over all that no request needs before each step."""

    @settings(max_examples=6 if backend.name == "reference" else 60)
    @given(schedules(NUM_TOKENS[kind]), st.integers(0, 5), st.booleans())
    def run(steps, pad, poison):
        holder = hold(backend, kind, cache_format)
        before = poison_dead if poison else lambda holder: None
        feed(holder, {s: stream(kind, s) for s in range(3)}, steps, pad=pad, before=before)
        assert_serial(backend, holder, cache_format, {s: s for s in range(3)})

    run()


@kinds_and_formats
def test_one_token_at_a_time_round_the_ring(backend, kind, cache_format):
    """Decoding for more than two turns of the ring, with NaN over whatever is dead."""
    holder = hold(backend, kind, cache_format, num_rings=1)
    num_tokens = 2 * holder.compressor.geometry.ring_rows + 11
    feed(holder, {0: stream(kind)}, one_by_one(num_tokens), pad=1, before=poison_dead)
    assert_serial(backend, holder, cache_format, {0: 1})


@pytest.mark.parametrize(("kind", "cache_format"), [(k, f) for k in NUM_TOKENS for f in ("bf16", "fp8")][:5])
def test_plain_formats(backend, kind, cache_format):
    holder = hold(backend, kind, cache_format)
    lengths = [1, 130, 2, 120, 3, 90] if kind == "hca" else [1, 6, 2, 5, 3, 30]
    steps = [[(2, n), (0, n)] for n in lengths]
    feed(holder, {0: stream(kind, 0), 2: stream(kind, 2)}, steps, pad=2, before=poison_dead)
    assert_serial(backend, holder, cache_format, {0: 0, 2: 2})


@kinds
def test_a_bf16_ring_keeps_bf16_rows_whole(backend, kind, cache_format):
    holder = hold(backend, kind, cache_format, ring="bf16")
    for steps in ([1] * 20, [7, 300, 1, 200] if kind == "hca" else [7, 3, 1, 20]):
        feed(holder, {0: stream(kind)}, alone(steps))
    assert_serial(backend, holder, cache_format, {0: 1})


@kinds
def test_steps_of_both_dtypes(backend, kind, cache_format):
    """bf16 steps and steps of full fp32 rows alternate into an fp32 ring: as if all had come as fp32 at once."""
    rows = stream(kind).float()
    full = torch.Generator().manual_seed(9)
    lengths = [3, 1, 60, 70, 1, 2, 127, 130] if kind == "hca" else [3, 1, 1, 1, 1, 2, 9, 6, 3, 4]
    parts = list(rows[: sum(lengths)].split(lengths))
    for part in parts[1::2]:
        part += torch.randn(part.shape, generator=full) * 1e-3
    once, holder = hold(backend, kind, cache_format), hold(backend, kind, cache_format)
    once.step([(0, sum(lengths))], torch.cat(parts))
    for i, part in enumerate(parts):
        holder.step([(0, len(part))], part if i % 2 else part.bfloat16())
    assert_bits(holder.entries(), once.entries())


@kinds_and_formats
def test_a_slot_goes_to_a_new_request(backend, kind, cache_format):
    """At any phase of the old one, while a neighbour goes on in the same steps."""
    holder = hold(backend, kind, cache_format)
    for seed, num_tokens in enumerate([NUM_TOKENS[kind] - 7, 5, NUM_TOKENS[kind] // 2]):
        holder.reset(1)
        half = num_tokens // 2
        steps = [[(1, half), (0, 3)], [(0, 2), (1, num_tokens - half)]]
        feed(holder, {0: stream(kind, 5), 1: stream(kind, seed)}, steps)
        assert_serial(backend, holder, cache_format, {0: 5, 1: seed})


@kinds_and_formats
def test_a_step_writes_only_what_its_plan_names(backend, kind, cache_format):
    holder = hold(backend, kind, cache_format)
    layout, geometry = holder.compressor.layout, holder.compressor.geometry
    reach = 1 if kind == "hca" else 20  # tokens of a decode step, so that windows close in each step
    resume(holder, 2, stream(kind, 2), geometry.ratio - 1)
    for step in ([(1, NUM_TOKENS[kind]), (2, reach), (0, 1)], [(2, 1), (1, geometry.ratio)]):
        rings, pages = holder.rings.clone(), holder.pages.clone()
        feed(holder, {s: stream(kind, s) for s in range(3)}, [step], pad=3)
        plan = holder.plans[-1]
        assert plan.num_windows
        written = torch.from_numpy(plan.appends[p.APPEND_RING].astype(np.int64))
        same = (holder.rings.view(torch.int32) == rings.view(torch.int32)).flatten(0, 1).all(1)
        same[written] = True
        assert same.all(), "a ring row changed that no append names"
        for slot in plan.windows[p.SLOT]:
            page, i = divmod(int(slot), layout.entries)
            for area in (layout.value_slice(i), layout.scale_slice(i)):
                pages[page, area] = holder.pages[page, area]
        assert_bits(holder.pages, pages)


@kinds
def test_a_launch_may_be_repeated(backend, kind, cache_format):
    """What a step writes never lies on what it reads: a second run over its own appends gives the same."""

    def twice(*arguments):
        return backend.compress(*arguments) + backend.compress(*arguments)

    holder = hold(dataclasses.replace(backend, compress=twice), kind, cache_format)
    num_tokens = NUM_TOKENS[kind]
    steps = [[(0, 5), (1, num_tokens // 3), (2, 3)], *alone([1] * 12, 2), [(1, num_tokens // 2), (2, num_tokens // 3)]]
    feed(holder, {s: stream(kind, s) for s in range(3)}, [*steps, [(2, 1), (0, num_tokens - 5)]])
    assert_serial(backend, holder, cache_format, {s: s for s in range(3)})
