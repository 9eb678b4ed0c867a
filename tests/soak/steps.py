"""What a soak client puts into a step, and the handles that came of it."""

from __future__ import annotations

import numpy as np

from kvfold_client.replies import CompressorState
from tests.soak.soaker import Live, Soaker
from tests.soak.streams import NUM_STREAMS, NUM_TOKENS


def rows_of(soaker: Soaker, step: list[tuple[Live, int]], wrong: int = 0) -> dict[str, np.ndarray]:
    """The requests' next rows, the last `wrong` of each another stream's."""
    tensors = {}
    for name, part in soaker.parts.items():
        pieces = []
        for live, length in step:
            end = live.committed + length
            pieces.append(part.rows[live.stream][live.committed : end - wrong])
            pieces.append(part.rows[(live.stream + 1) % NUM_STREAMS][end - wrong : end])
        tensors[name] = np.concatenate(pieces)
    return tensors


def lengths_of(soaker: Soaker, lives: list[Live], most: int) -> list[tuple[Live, int]]:
    step = [(live, min(1 + soaker.below(most), NUM_TOKENS - live.committed)) for live in lives]
    return [(live, length) for live, length in step if length]


def handles_of(live: Live) -> list[tuple[str, CompressorState, int, str]]:
    return [(name, state, i, page) for name, state in live.state.items() for i, page in enumerate(state.pages)]
