"""scheduler.step: a reply that is not what the step must give ends the simulation."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvfold_client.replies import CompressorState, StepReply
from kvfold_client.scheduler import Arrival, RowSource, SimulationError, shapes_of
from kvfold_client.scheduler.costs import Step
from kvfold_client.scheduler.request import Chunk, Request
from kvfold_client.scheduler.step import run_step
from tests.service_cases import CSA, HCA, SMALL

SHAPES = shapes_of(SMALL)
CHUNK = Chunk(Request(0, "r", Arrival(0, 9, 9), 0.0), 7, 1, num_guesses=2, num_accepted=1)
STEP = Step((CHUNK,), RowSource(1, SHAPES).groups)
STATES = {
    shape.name: CompressorState(10, 10 % shape.ratio, 10 // shape.ratio, (7 // shape.ratio, 10 // shape.ratio), ())
    for shape in SHAPES
}
REPLY = StepReply("s", "e", "c", 3, (), {"r": STATES}, {})


def answering(reply: StepReply, truncated: int = 9) -> Any:
    states = {name: replace(state, committed=truncated) for name, state in STATES.items()}
    return SimpleNamespace(step=lambda *args, **kwargs: reply, truncate=lambda id, length: states)


def changed_state(**changes: Any) -> StepReply:
    return replace(REPLY, requests={"r": STATES | {CSA: replace(STATES[CSA], **changes)}})


def test_a_right_reply() -> None:
    assert run_step(answering(REPLY), "s", STEP, RowSource(1, SHAPES)).launches == 3


def test_a_wrong_guess_has_rows_of_its_own() -> None:
    """Rows 7 and 8 are the request's, 9 is not: what stays of it when it is withdrawn would show."""
    sent: dict[str, np.ndarray] = {}

    def step(requests: Any, tensors: dict[str, np.ndarray], **options: Any) -> StepReply:
        assert requests == [("r", 7, 3)]
        assert options == {"step_id": "s", "draft_tokens": [2]}
        sent.update(tensors)
        return REPLY

    client, source = answering(REPLY), RowSource(1, SHAPES)
    client.step = step
    run_step(client, "s", STEP, source)
    for name, rows in sent.items():
        own = source.rows(0, name, 7, 10)
        np.testing.assert_array_equal(rows[:2], own[:2])
        np.testing.assert_array_equal(rows[2:], source.rows(0, name, 9, 10, guessed=True))
        assert (rows[2] != own[2]).mean() > 0.9


@pytest.mark.parametrize(
    ("client", "words"),
    [
        (answering(replace(REPLY, skipped=(HCA,))), "skipped"),
        (answering(changed_state(committed=9)), "has 9 tokens"),
        (
            answering(changed_state(new_entries=(1, 3))),
            "entries",
        ),
        (answering(REPLY, truncated=8), "has 8 tokens, and should have 9"),
    ],
    ids=["skipped", "committed", "entries", "truncate"],
)
def test_a_wrong_reply_ends_the_simulation(client: Any, words: str) -> None:
    with pytest.raises(SimulationError, match=words):
        run_step(client, "s", STEP, RowSource(1, SHAPES))
