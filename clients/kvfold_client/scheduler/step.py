"""A step as a worker's client sends it, and what came of it, compared with what must come of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ..client import Client
from ..replies import RequestState, StepReply
from .costs import Step
from .request import Chunk
from .rows import RowSource
from .workers import SimulationError


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one step did."""

    launches: int = 0
    timings_us: dict[str, float] = field(default_factory=dict)
    call_us: float = 0.0
    """As the client saw it, truncations included."""
    made_us: float = 0.0
    """Making the rows: what the model would have done on its device."""


def run_step(client: Client, step_id: str, step: Step, source: RowSource) -> Outcome:
    """Sends the step, then withdraws the wrong guesses. Raises KvfoldError; SimulationError for a wrong reply."""
    began, chunks = time.perf_counter(), step.chunks
    tensors = {name: _rows(name, chunks, source) for name in source.shapes}
    sent = time.perf_counter()
    reply = client.step(
        [(chunk.request.id, chunk.start, chunk.stop - chunk.start) for chunk in chunks],
        tensors,
        step_id=step_id,
        draft_tokens=[chunk.num_guesses for chunk in chunks],
    )
    _check(reply, step, source)
    for chunk in chunks:
        if chunk.kept < chunk.stop:
            _check_committed(client.truncate(chunk.request.id, chunk.kept), chunk, chunk.kept)
    return Outcome(
        reply.launches,
        reply.timings_us,
        call_us=(time.perf_counter() - sent) * 1e6,
        made_us=(sent - began) * 1e6,
    )


def _rows(name: str, chunks: Sequence[Chunk], source: RowSource) -> np.ndarray:
    """Rows of all chunks in turn; guesses that will be rejected are not the request's own."""
    parts = []
    for chunk in chunks:
        idx = chunk.request.idx
        parts.append(source.rows(idx, name, chunk.start, chunk.kept))
        if chunk.kept < chunk.stop:
            parts.append(source.rows(idx, name, chunk.kept, chunk.stop, guessed=True))
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _check(reply: StepReply, step: Step, source: RowSource) -> None:
    skipped = set(step.skipped)
    if reply.skipped and set(reply.skipped) != skipped:  # none at all where a full graph replays every launch
        raise SimulationError(f"step {reply.step_id} skipped {sorted(reply.skipped)}, and should {sorted(skipped)}")
    for chunk in step.chunks:
        state = reply.requests[chunk.request.id]
        _check_committed(state, chunk, chunk.stop)
        for name, shape in source.shapes.items():
            closed = (chunk.start // shape.ratio, chunk.stop // shape.ratio)
            if state[name].new_entries != closed:
                raise SimulationError(
                    f"{chunk.request.id}, {name}: new entries {state[name].new_entries}, and should be {closed}"
                )


def _check_committed(state: RequestState, chunk: Chunk, expected: int) -> None:
    for name, part in state.items():
        if part.committed != expected:
            raise SimulationError(
                f"{chunk.request.id}, {name}: the worker has {part.committed} tokens, and should have {expected}"
            )
