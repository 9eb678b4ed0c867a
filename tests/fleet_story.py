"""What three real workers must go through, whatever control plane found them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvfold_client.errors import PeerFailed
from kvfold_client.fleet import Fleet
from tests.fleet_cases import Sequence
from tests.service_cases import STREAM_TOKENS

Kill = Callable[[str], None]
"""SIGKILL to a worker by its name."""


def hand_over(fleet: Fleet) -> None:
    """The three lines, and what they give."""
    sequence = Sequence(fleet, "three-lines")
    sequence.advance(61, 20)
    moved = fleet.hand_over(sequence.id)
    sequence.role = "decode"
    assert moved.source != moved.target
    assert moved.state.keys() == set(sequence.names)
    sequence.advance(90, 1)
    sequence.check()
    fleet.release(sequence.id)


def death_under_load(fleet: Fleet, kill: Kill) -> str:
    """Four requests decode, each in a thread of its own, when a worker that has some of them is killed.

    All end with the entries of an undisturbed run; those that were elsewhere notice nothing. Returns who died.
    """
    sequences = [Sequence(fleet, f"load{i}") for i in range(4)]
    decoding, seen = threading.Barrier(5), [threading.Event() for _ in sequences]

    def go(sequence: Sequence, first_token: threading.Event) -> None:
        sequence.advance(45, 20)
        sequence.hand_over("decode", release=False)
        decoding.wait(60)
        sequence.advance(46, 1)
        first_token.set()
        sequence.advance(STREAM_TOKENS, 1)

    threads = [threading.Thread(target=go, args=pair) for pair in zip(sequences, seen, strict=True)]
    for thread in threads:
        thread.start()
    decoding.wait(60)
    placed = {sequence.id: fleet.worker_for(sequence.id, "decode").name for sequence in sequences}
    victim = placed["load0"]
    assert seen[0].wait(60)
    kill(victim)
    for thread in threads:
        thread.join()
    for sequence in sequences:
        sequence.check()
        assert sequence.recovered == 0 or placed[sequence.id] == victim
        fleet.release(sequence.id)
    assert any(sequence.recovered for sequence in sequences)
    return victim


def death_of_a_giver(fleet: Fleet, stop: Kill, kill: Kill) -> None:
    """A worker that hangs, and one that is killed while it hangs: each a typed error, within a second."""
    sequence = Sequence(fleet, "giver")
    sequence.advance(61, 61)
    giver = fleet.worker_for("giver", "prefill").name
    taker = fleet.client(next(w.name for w in fleet.workers() if w.accepting and w.role == "decode"))
    stop(giver)
    _fails_within_a_second(taker, giver, lambda: None)
    _fails_within_a_second(taker, giver, lambda: kill(giver))


def _fails_within_a_second(taker, giver: str, meanwhile: Callable[[], None]) -> None:
    timer = threading.Timer(0.2, meanwhile)
    timer.start()
    began = time.monotonic()
    with pytest.raises(PeerFailed) as caught:
        taker.pull("giver", giver)
    took = time.monotonic() - began
    timer.join()
    assert took < 1.1, took
    assert caught.value.details["reason"] == "died"
