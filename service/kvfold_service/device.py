"""Plans and rows → kernels on a GPU: on one stream, in memory taken at start, with one synchronisation a step.

    a step           copies of the rows · copy of flags, counts and plans · kernels · copy of the flags back · wait
    a captured step  copies of the rows · replay of all the rest · wait

See `rows` for few rows, which the host alone copies, `plans` for why plans come by a copy and by nothing else, `graphs`
for what is captured.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvfold_client import wire
from kvfold_kernels.backends import Backend
from kvfold_service.caches import Caches, CompressorCache
from kvfold_service.cuda import Cuda
from kvfold_service.errors import BrokenDeviceError
from kvfold_service.graphs import MAX_BUCKET, Graphs, Key
from kvfold_service.launches import Call, Launches
from kvfold_service.plans import PlanBuffer, Room, most_ints, most_windows
from kvfold_service.rows import FarRows, NearRows, one_behind_the_other
from kvfold_service.runner import GraphMode, HostRunner, NonFiniteError, Ran, Runner, Work, step_failed

log = logging.getLogger("kvfold")


@dataclass(frozen=True, slots=True)
class Fixed:
    """What the launches of a captured step are given: calls, room for plans, where the rows go and where each
    compressor's begin there."""

    calls: tuple[Call, ...]
    rooms: tuple[Room, ...]
    memory: FarRows | NearRows
    starts: tuple[int, ...]


class DeviceRunner:
    """The thread that runs steps works on the runner's stream from its first step on."""

    def __init__(
        self,
        backend: Backend,
        caches: Caches,
        max_step_bytes: int,
        max_step_tokens: int,
        *,
        graphs: bool,
        cuda: Cuda | None = None,
    ) -> None:
        assert backend.flags is not None
        self._cuda = cuda or Cuda()
        self._cuda.enter()
        self._compressors = caches.compressors
        token_bytes = sum(_width(cache) * wire.ITEM_BYTES["fp32"] for cache in caches.compressors)
        self.most_merged_rows = min(max_step_tokens, max_step_bytes // token_bytes)
        self._began, self._copied, self._done = (self._cuda.timer() for _ in range(3))
        room = max_step_bytes + wire.FRAME_ALIGN * len(caches.compressors)
        self._far = FarRows(self._cuda, room, backend.device)
        self._near = NearRows(self._cuda) if self._cuda.reads_host_memory else None
        ints = sum(most_ints(cache, caches.num_rings, max_step_tokens) for cache in caches.compressors)
        self._plans = PlanBuffer(self._cuda, backend.device, len(caches.compressors), ints, backend.flags)
        self._launches = Launches(backend, caches.compressors, self._plans.flags)
        if backend.reserve_scratch is not None:
            for cache in caches.compressors:
                windows = max(MAX_BUCKET, most_windows(cache, caches.num_rings, max_step_tokens))
                backend.reserve_scratch(cache.rings.device, windows, cache.compressor.geometry.head_dim)
        self._graphs = Graphs(self._cuda, self._fixed, self._launch_fixed) if graphs and backend.takes_counts else None

    def lock(self, block: memoryview) -> None:
        """Page-lock the memory that most rows will come from."""
        self._far.lock(block)

    def run(self, work: Sequence[Work]) -> Ran:
        try:
            self._cuda.enter()
            launches, graph_mode = self._enqueue(work)
            self._done.synchronize()
        except Exception:
            raise self._failure() from None
        self._refuse_non_finite(work)
        copy_us = self._began.elapsed_time(self._copied) * 1000
        kernel_us = self._copied.elapsed_time(self._done) * 1000
        return Ran(launches, round(copy_us), round(kernel_us), graph_mode)

    def _failure(self) -> Exception:
        """What to raise for the exception at hand.

        Nothing of the step may be on its way any more when that is done: the next one writes to the same memory.
        """
        failure = step_failed()
        try:
            self._cuda.synchronize()
        except Exception:  # it stays: every later call of this process fails, too
            log.exception("the device failed")
            return BrokenDeviceError("the device reported an error and must be started anew")
        return failure

    def _refuse_non_finite(self, work: Sequence[Work]) -> None:
        """A flag is the smallest index of a bad value. One behind the step's tokens is of rows that are not its own."""
        for item, flag in zip(work, self._plans.fetched_flags(len(work)), strict=True):
            row, column = divmod(flag, _width(item.cache))
            if row < item.plan.num_tokens:
                raise NonFiniteError(item, row, column)

    def _enqueue(self, work: Sequence[Work]) -> tuple[tuple[int, ...], GraphMode]:
        """Put the step on the stream; the launches of each work, and the graph mode."""
        self._began.record()
        step = self._graphs and self._graphs.find(work)
        if self._graphs is None or step is None:
            launches = self._launch_exact(work)
        else:
            self._send_rows(work, step.operands.memory, step.operands.starts)
            self._copied.record()
            self._plans.fill(step.operands.rooms, [item.plan for item in work])
            launches = self._graphs.run(step)
        self._done.record()
        return launches, "full" if step else "none"

    # -- a step as it is -----------------------------------------------------------------------------------------

    def _launch_exact(self, work: Sequence[Work]) -> tuple[int, ...]:
        starts, end = one_behind_the_other(item.plan.num_tokens * _row_bytes(item) for item in work)
        assert end <= self._far.num_bytes, "a step has more rows than a body may have"
        memory = self._memory_of(end)
        self._send_rows(work, memory, starts)
        plans = self._plans.send([item.plan for item in work])
        self._copied.record()
        calls = [
            Call(
                item.cache,
                *plan,
                memory.view(item.dtype, start, item.plan.num_tokens, _width(item.cache)),
            )
            for item, plan, start in zip(work, plans, starts, strict=True)
        ]
        launches = self._launches.run(calls)
        self._plans.fetch_flags(len(work))
        return launches

    def _memory_of(self, num_bytes: int) -> FarRows | NearRows:
        """Where so many bytes of rows go."""
        return self._near if self._near and num_bytes <= self._near.num_bytes else self._far

    def _send_rows(self, work: Sequence[Work], memory: FarRows | NearRows, starts: Iterable[int]) -> None:
        pieces = []
        for item, start in zip(work, starts, strict=True):
            row_bytes = _row_bytes(item)
            for part in item.parts:
                num_bytes = part.num_tokens * row_bytes
                pieces.append((start, part.tensor.data, num_bytes))
                start += num_bytes
        memory.send(pieces)

    # -- a captured step -----------------------------------------------------------------------------------------

    def _fixed(self, key: Key) -> Fixed | None:
        """None: the rows do not fit. Rows of one size lie beside each other, so that one copy can bring them."""
        caches = [self._compressors[i] for i in key.compressors]
        widths = [_width(cache) for cache in caches]
        sizes = [key.bucket * width * wire.ITEM_BYTES[dtype] for width, dtype in zip(widths, key.dtypes, strict=True)]
        order = sorted(range(len(sizes)), key=sizes.__getitem__)
        placed, end = one_behind_the_other(sizes[i] for i in order)
        if end > self._far.num_bytes:
            return None
        memory = self._memory_of(end)
        starts = [start for _, start in sorted(zip(order, placed, strict=True))]
        rooms = self._plans.rooms(len(caches), key.bucket)
        rows = [
            memory.view(dtype, start, key.bucket, width)
            for dtype, start, width in zip(key.dtypes, starts, widths, strict=True)
        ]
        calls = [
            Call(cache, room.windows, room.appends, view, room.counts)
            for cache, room, view in zip(caches, rooms, rows, strict=True)
        ]
        return Fixed(tuple(calls), tuple(rooms), memory, tuple(starts))

    def _launch_fixed(self, key: Key, fixed: Fixed) -> tuple[int, ...]:
        """All of a captured step but its rows. Looks at nothing that only the host knows."""
        self._plans.send_rooms(len(fixed.calls), key.bucket)
        launches = self._launches.run(fixed.calls)
        self._plans.fetch_flags(len(fixed.calls))
        return launches


def runner_for(
    backend: Backend, caches: Caches, max_step_bytes: int, max_step_tokens: int, graphs: bool = True
) -> Runner:
    """graphs: whether steps may be captured, where the backend's kernels allow it."""
    if backend.device == "cpu":
        return HostRunner(backend)
    return DeviceRunner(backend, caches, max_step_bytes, max_step_tokens, graphs=graphs)


def _width(cache: CompressorCache) -> int:
    return cache.compressor.geometry.row_width


def _row_bytes(item: Work) -> int:
    return _width(item.cache) * wire.ITEM_BYTES[item.dtype]
