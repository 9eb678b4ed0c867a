"""What a soak client knows: its requests, what they must hold, and when a call may fail.

Raises AssertionError for a reply that is wrong.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvfold_client import Client, errors
from kvfold_client.replies import RequestState, StepReply
from tests.soak.streams import Part

_READY_S = 60.0


@dataclass
class Live:
    """A request as its client knows it; `used`: when the last call began that renewed its lease."""

    id: str
    stream: int
    committed: int
    used: float
    state: RequestState


class Soaker:
    def __init__(
        self, client: Client, stranger: Client, admin: Client, parts: list[Part], number: int, lease_seconds: float
    ) -> None:
        self.client, self.stranger, self.admin, self.lease_seconds = client, stranger, admin, lease_seconds
        self.parts = {part.name: part for part in parts}
        self.rng = np.random.default_rng(number)
        self.counts: Counter[str] = Counter()
        self.live: dict[str, Live] = {}
        self.unsure: set[str] = set()
        """Requests of which it is not known whether their wrong guesses were withdrawn."""
        self.dead: list[str] = []
        """Handles that must be stale."""
        self.epoch = ""
        self._ids = (f"c{number}-{i}" for i in itertools.count())

    # -- what is known ---------------------------------------------------------------------------------------------

    def pick(self) -> Live | None:
        return self.live[str(self.rng.choice(list(self.live)))] if self.live else None

    def below(self, high: int) -> int:
        return int(self.rng.integers(high))

    def new_id(self) -> str:
        return next(self._ids)

    def forget(self, live: Live) -> None:
        """Nobody uses it any more here; its pages are gone or will be."""
        del self.live[live.id]
        self.unsure.discard(live.id)
        handles = [handle for state in live.state.values() for handle in state.pages]
        self.dead = [*self.dead, *handles][-50:]

    def make_room(self) -> None:
        """A refused call has changed nothing."""
        self.unsure.clear()
        if live := self.pick():
            self.release(live)

    def release(self, live: Live) -> None:
        self.client.release(live.id)
        self.forget(live)

    def explain(self, error: Exception) -> None:
        """A call failed as it may when the worker was started anew or a lease ended: it must have been one of these."""
        began = time.monotonic()
        while not self._is_ready():
            assert time.monotonic() - began < _READY_S, f"the worker does not come back: {error}"
            time.sleep(0.1)
        epoch = self.admin.stats()["epoch"]
        if epoch != self.epoch:
            self.begin_epoch(epoch, [])
            return
        num_ended = sum(self._has_ended(live) for live in list(self.live.values()))
        assert num_ended or isinstance(error, (errors.TransportError, errors.Draining, errors.NotReady)), repr(error)

    def begin_epoch(self, epoch: str, known: list[Live]) -> None:
        """The worker was started anew and knows these requests only."""
        self.counts["restarts seen"] += bool(self.epoch)
        self.epoch = epoch
        for live in list(self.live.values()):
            if live not in known:
                self.forget(live)

    def _has_ended(self, live: Live) -> bool:
        """Whether the worker knows it no longer; else what it knows of it is taken over: a reply may have been lost."""
        try:
            state = self.client.request(live.id)
        except errors.UnknownRequest:
            assert time.monotonic() - live.used > self.lease_seconds, f"{live} is gone before its lease ended"
            self.counts["leases ended"] += 1
            self.forget(live)
            return True
        if live.id in self.unsure:
            self.forget(live)
        else:
            (live.committed,) = {part.committed for part in state.values()}
            live.state = state
            self.check_state(live, state)
        return False

    def _is_ready(self) -> bool:
        try:
            return self.client.ready()
        except errors.KvfoldError:
            return False

    def leave(self) -> None:
        for live in list(self.live.values()):
            with suppress(errors.TransportError):
                self.release(live)

    # -- what must be so -------------------------------------------------------------------------------------------

    def check_state(self, live: Live, state: RequestState) -> None:
        assert state.keys() == self.parts.keys(), "other compressors"
        for name, part in self.parts.items():
            told = state[name]
            num_entries = live.committed // part.ratio
            said = (told.committed, told.open_tokens, told.num_entries)
            assert said == (live.committed, live.committed % part.ratio, num_entries), (live, told)
            assert len(told.pages) == -(-num_entries // part.layout.entries), (live, told)

    def check_reply(self, reply: StepReply, step: list[tuple[Live, int]]) -> None:
        """`step`: requests with their new lengths, which are known already."""
        if reply.epoch != self.epoch:
            self.begin_epoch(reply.epoch, [live for live, _ in step])
        closing = set()
        for live, length in step:
            state = reply.requests[live.id]
            self.check_state(live, state)
            for name, part in self.parts.items():
                first = (live.committed - length) // part.ratio
                assert state[name].new_entries == (first, live.committed // part.ratio), (live, state[name])
                closing |= {name} if first < live.committed // part.ratio else set()
        assert set(reply.skipped) == self.parts.keys() - closing, reply
        self.counts["step replies checked"] += 1

    def check_entries(self, live: Live, name: str, rows: np.ndarray, first: int) -> None:
        expected = self.parts[name].entries[live.stream][first : first + len(rows)]
        assert np.array_equal(rows, expected), f"entries from {first} on of {name} of {live} are not the reference's"
        self.counts["entries checked"] += len(rows)
        self.counts["bytes checked"] += rows.nbytes
