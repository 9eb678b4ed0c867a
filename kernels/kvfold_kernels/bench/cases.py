"""The steps that are timed: prefills, decodes with none, all or some of the requests at a boundary, and both mixed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvfold_kernels.geometry import KINDS

DEFAULT_FORMATS = {"hca": "fp8_ds_mla", "csa": "fp8_ds_mla", "indexer": "indexer_fp8"}
PREFILLS = (1024, 8192, 65536)
DECODES = (1, 32, 256)
_BEFORE = 4096
"""Tokens that decode requests have had, and a few more."""


@dataclass(frozen=True, slots=True)
class Case:
    """A step: request i has starts[i] tokens already and gets lengths[i] more."""

    name: str
    kind: str
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def num_windows(self) -> int:
        """That close in it."""
        ratio = KINDS[self.kind].ratio
        return sum((a + b) // ratio - a // ratio for a, b in zip(self.starts, self.lengths, strict=True))


def step_cases(kind: str, prefills: Sequence[int] = PREFILLS, decodes: Sequence[int] = DECODES) -> Iterator[Case]:
    """Prefills of one request, decodes of so many, and one step of 128 decodes with a prefill of 8192 from 1000 on."""
    ratio = KINDS[kind].ratio
    for tokens in prefills:
        yield Case(f"{kind} prefill {tokens}", kind, (0,), (tokens,))
    for batch in decodes:
        starts = {"none": [_BEFORE + 1] * batch, "all": [_BEFORE + ratio - 1] * batch, "rand": _spread(batch)}
        for boundaries, several in starts.items():
            yield Case(f"{kind} decode {batch} {boundaries}", kind, tuple(several), (1,) * batch)
    if 8192 in prefills:
        yield Case(f"{kind} mixed 128d+8192p", kind, (*_spread(128, skip=256), 1000), (1,) * 128 + (8192,))


def _spread(batch: int, skip: int = 0) -> list[int]:
    """Starts anywhere in a window of hca; the same ones always."""
    chance = random.Random(1)
    drawn = [_BEFORE + chance.randrange(KINDS["hca"].ratio) for _ in range(skip + batch)]
    return drawn[skip:]
