"""Captured steps: which steps are captured, by what they are told apart, and how many are kept.

A graph's launches have room for `bucket` tokens, windows and appends in each compressor and leave nothing out; how many
there are stands on the device. So a graph is right for every step of its key, whatever its lengths and phases.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, NamedTuple, TypeVar

from kvfold_kernels import plan as p
from kvfold_service.cuda import Cuda, Graph
from kvfold_service.runner import Work

log = logging.getLogger("kvfold")

MAX_BUCKET: Final = 256
"""Tokens of the largest step that is captured. A graph saves the launches, some 10 µs a compressor; the rows of 256 csa
tokens take four times as long to come to the device, and longer steps only hide the launches better."""
MAX_GRAPHS: Final = 64
"""Graphs that are kept: nine buckets of seven sets of compressors. A set that has been left falls out."""


class Key(NamedTuple):
    """compressors: their numbers, as the step has them; dtypes: of their rows."""

    compressors: tuple[int, ...]
    dtypes: tuple[str, ...]
    bucket: int


def bucket_of(plans: Sequence[p.Plan]) -> int | None:
    """The least power of two that every compressor's tokens, windows and appends fit into; None: not to be captured."""
    most = max([plan.num_tokens for plan in plans])
    if not 0 < most <= MAX_BUCKET:
        return None
    bucket = 1 << (most - 1).bit_length()
    fits = all(plan.windows.shape[1] <= bucket >= plan.appends.shape[1] for plan in plans)
    return bucket if fits else None


T = TypeVar("T")


@dataclass(slots=True)
class FixedStep(Generic[T]):
    """All steps of a key: what their launches are given and, once captured, the graph."""

    key: Key
    operands: T
    graph: Graph | None = None
    launches: tuple[int, ...] = ()


class Graphs(Generic[T]):
    """Steps by key, the least recently used leave.

    operands  key → what its launches are given, made once; None: it cannot be captured
    launch    puts the launches on the stream; how many they are, by compressor
    """

    def __init__(
        self, cuda: Cuda, operands: Callable[[Key], T | None], launch: Callable[[Key, T], tuple[int, ...]]
    ) -> None:
        self._cuda, self._operands, self._launch = cuda, operands, launch
        self._steps: OrderedDict[Key, FixedStep[T] | None] = OrderedDict()

    def find(self, work: Sequence[Work]) -> FixedStep[T] | None:
        """None: the step is to be launched as it is."""
        bucket = bucket_of([item.plan for item in work])
        if bucket is None:
            return None
        key = Key(tuple(item.cache.index for item in work), tuple(item.dtype for item in work), bucket)
        if key in self._steps:
            self._steps.move_to_end(key)
        else:
            operands = self._operands(key)
            self._steps[key] = None if operands is None else FixedStep(key, operands)
            if len(self._steps) > MAX_GRAPHS:
                self._forget(next(iter(self._steps)))
        return self._steps[key]

    def run(self, step: FixedStep[T]) -> tuple[int, ...]:
        """Put the step's launches on the stream.

        The first time they are launched one by one, which also loads every kernel; the second time they are captured.
        If that fails they are launched one by one again, and the key is not tried any more.
        """
        if step.graph is None:
            if not step.launches:
                step.launches = self._launch(step.key, step.operands)
                return step.launches
            what = f"steps of up to {step.key.bucket} tokens and {len(step.key.compressors)} compressors"
            try:
                step.graph, step.launches = self._cuda.capture(lambda: self._launch(step.key, step.operands))
                log.info("%s are captured from now on", what)
            except Exception:
                log.exception("%s are not captured", what)
                self._steps[step.key] = None
                return self._launch(step.key, step.operands)
        try:
            step.graph.replay()
        except BaseException:
            self._steps[step.key] = None
            raise
        return step.launches

    def _forget(self, key: Key) -> None:
        step = self._steps.pop(key)
        if step is not None and step.graph is not None:
            step.graph.reset()
