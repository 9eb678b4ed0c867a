"""What a soak client does: each call of the contract, right and wrong, and what must come of it.

Raises AssertionError for a reply that is wrong; refusals come as the client raises them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import xxhash

from kvfold_client import errors
from kvfold_client.replies import StepReply
from tests.soak.soaker import Live, Soaker
from tests.soak.steps import handles_of, lengths_of, rows_of
from tests.soak.streams import NUM_STREAMS, NUM_TOKENS
from tests.soak.wrong_calls import die, read_as_a_stranger, read_stale, send_nonsense

_SLACK = 8


def _send(soaker: Soaker, step: list[tuple[Live, int]], wrong: int = 0, **options: Any) -> StepReply:
    began = time.monotonic()
    requests = [(live.id, live.committed, length) for live, length in step]
    reply = soaker.client.step(requests, rows_of(soaker, step, wrong), pages="all", **options)
    for live, length in step:
        live.committed += length
        live.used = began
        live.state = reply.requests[live.id]
        soaker.live[live.id] = live
    soaker.check_reply(reply, step)
    return reply


def begin(soaker: Soaker) -> None:
    news = [Live(soaker.new_id(), soaker.below(NUM_STREAMS), 0, 0.0, {}) for _ in range(1 + soaker.below(2))]
    _send(soaker, lengths_of(soaker, news, 300))


def extend(soaker: Soaker) -> None:
    if step := lengths_of(soaker, list(soaker.live.values())[: 1 + soaker.below(4)], 1 if soaker.below(3) else 150):
        _send(soaker, step)


def send_twice(soaker: Soaker) -> None:
    if (live := soaker.pick()) and (step := lengths_of(soaker, [live], 40)):
        requests, rows, id = [(live.id, live.committed, step[0][1])], rows_of(soaker, step), soaker.new_id()
        first = _send(soaker, step, step_id=id)
        assert soaker.client.step(requests, rows, pages="all", step_id=id) == first, "another reply to the same step"
        with suppress(errors.StepConflict):
            soaker.client.step(requests, rows, step_id=id)
            raise AssertionError("another body ran under the same id")


def guess(soaker: Soaker) -> None:
    """Some right tokens and some wrong ones, which are withdrawn."""
    live, wrong = soaker.pick(), 1 + soaker.below(_SLACK)
    if live and live.committed + 2 * _SLACK < NUM_TOKENS:
        soaker.unsure.add(live.id)
        _send(soaker, [(live, wrong + soaker.below(4))], wrong, draft_tokens=[wrong])
        before = [handle for state in live.state.values() for handle in state.pages]
        began = time.monotonic()
        live.state = soaker.client.truncate(live.id, live.committed - wrong)
        live.used, live.committed = began, live.committed - wrong
        soaker.check_state(live, live.state)
        soaker.unsure.discard(live.id)
        after = {handle for state in live.state.values() for handle in state.pages}
        soaker.dead = [*soaker.dead, *(handle for handle in before if handle not in after)][-50:]


def read(soaker: Soaker) -> None:
    if (live := soaker.pick()) and (wanted := handles_of(live)):
        began = time.monotonic()
        pages = soaker.client.read_pages([handle for *_, handle in wanted])
        live.used = began
        for (name, state, i, handle), page in zip(wanted, pages, strict=True):
            part = soaker.parts[name]
            assert (page.handle, page.compressor) == (handle, name)
            assert page.num_entries == min(part.layout.entries, state.num_entries - i * part.layout.entries)
            soaker.check_entries(live, name, part.rows_of(page.data, page.num_entries), i * part.layout.entries)


def verify(soaker: Soaker) -> None:
    if (live := soaker.pick()) and (wanted := handles_of(live)):
        began = time.monotonic()
        digests = soaker.client.verify([handle for *_, handle in wanted])
        live.used = began
        for (name, _, i, _), digest in zip(wanted, digests, strict=True):
            part = soaker.parts[name]
            first = i * part.layout.entries
            rows = np.ascontiguousarray(part.entries[live.stream][first : first + digest.num_entries])
            assert digest.xxh3_64 == xxhash.xxh3_64_hexdigest(rows.data), "another digest"
            soaker.counts["digests checked"] += 1


def move(soaker: Soaker) -> None:
    """Export, and go on under another id."""
    if live := soaker.pick():
        began = time.monotonic()
        exported = soaker.client.export(live.id)
        live.used = began
        for name, part in soaker.parts.items():
            told = exported.compressors[name]
            assert told.committed == live.committed
            soaker.check_entries(live, name, told.entries, 0)
            assert len(told.entries) == live.committed // part.ratio
            first = part.first_open_row(live.committed)
            assert told.open_positions.tolist() == list(range(first, live.committed))
            assert np.array_equal(told.open_rows, part.rows[live.stream][first : live.committed]), "other open rows"
        copy = Live(soaker.new_id(), live.stream, live.committed, time.monotonic(), {})
        copy.state = soaker.client.import_(copy.id, exported)
        soaker.live[copy.id] = copy
        soaker.check_state(copy, copy.state)
        if soaker.below(2):
            soaker.release(live)


def ask(soaker: Soaker) -> None:
    if live := soaker.pick():
        state = soaker.client.request(live.id)
        soaker.check_state(live, state)
        assert {name: part.pages for name, part in state.items()} == {
            name: part.pages for name, part in live.state.items()
        }, "other handles"


def release(soaker: Soaker) -> None:
    if live := soaker.pick():
        soaker.release(live)


def abandon(soaker: Soaker) -> None:
    """Nobody uses it any more; its lease must end."""
    if live := soaker.pick():
        soaker.client.lease(live.id, 0.2)
        soaker.forget(live)
        time.sleep(0.25)
        with suppress(errors.UnknownRequest):
            soaker.client.request(live.id)
            raise AssertionError(f"{live.id} outlives its lease")


def keep(soaker: Soaker) -> None:
    for live in soaker.live.values():
        began = time.monotonic()
        soaker.client.lease(live.id, soaker.lease_seconds)
        live.used = began


CALLS: dict[str, tuple[float, Callable[[Soaker], None]]] = {
    "begin": (8, begin),
    "extend": (30, extend),
    "send twice": (3, send_twice),
    "guess": (6, guess),
    "read": (12, read),
    "verify": (6, verify),
    "move": (4, move),
    "ask": (4, ask),
    "release": (5, release),
    "abandon": (2, abandon),
    "keep": (6, keep),
    "read stale": (2, read_stale),
    "read as a stranger": (2, read_as_a_stranger),
    "send nonsense": (3, send_nonsense),
    "die": (2, die),
}
"""Name → how often, relative to the others, and what it does."""
