"""Plans and rows → kernels, on the host or on a GPU. A runner knows the device, never a request.

On a GPU a step costs: one copy of the plans' arrays, one of each tensor's rows (from pinned staging), the kernels, one
copy of the flags of values that are not finite, one synchronisation. Everything lies in memory taken at start.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from kvfold_client import wire
from kvfold_kernels import plan as p
from kvfold_kernels.backends import Backend
from kvfold_service.caches import TORCH_DTYPES, Caches, CompressorCache
from kvfold_service.errors import BrokenDeviceError, ServiceError

log = logging.getLogger("kvfold")


@dataclass(frozen=True)
class Part:
    """One step's rows for a compressor. `member` numbers the step in its batch; rows from num_tokens on are padding."""

    member: int
    tensor: wire.Tensor
    num_tokens: int


@dataclass(frozen=True)
class Work:
    """One compressor's part of a batch. The plan's input rows are the parts' rows, one part behind the other."""

    cache: CompressorCache
    parts: tuple[Part, ...]
    plan: p.Plan


class NonFiniteError(Exception):
    """The step `member` of the batch holds a value that no step may hold; the others may run without it."""

    def __init__(self, work: Work, row: int, column: int) -> None:
        super().__init__()
        for part in work.parts:
            if row < part.num_tokens:
                break
            row -= part.num_tokens
        self.member, self.refusal = part.member, non_finite(work.cache, row, column)


@dataclass(frozen=True, slots=True)
class Ran:
    """Launches of each work, and µs for bringing the bytes to the device and for the kernels."""

    launches_of: tuple[int, ...]
    copy_us: int
    kernel_us: int

    @property
    def launches(self) -> int:
        return sum(self.launches_of)


class Runner(Protocol):
    """Checks values and runs kernels, to their end.

    Raises NonFiniteError, or ServiceError step_failed; then rows and entries may have been written, but only where
    nothing is valid.
    """

    most_merged_rows: int
    """Steps are brought together up to so many rows."""

    def run(self, work: Sequence[Work]) -> Ran: ...


def runner_for(backend: Backend, caches: Caches, max_step_bytes: int, max_step_tokens: int) -> Runner:
    if backend.device == "cpu":
        return HostRunner(backend)
    return DeviceRunner(backend, caches, max_step_bytes, max_step_tokens)


def non_finite(cache: CompressorCache, row: int, column: int) -> ServiceError:
    return ServiceError(
        "non_finite",
        f"the tensor of {cache.name} has a value at row {row}, column {column} that is not finite "
        "(only a score may be −inf)",
        compressor=cache.name,
        row=row,
        column=column,
    )


def step_failed() -> ServiceError:
    log.exception("a kernel failed; the step is undone")
    return ServiceError("step_failed", "a kernel failed; nothing of the step was kept, send it again")


def as_torch(tensor: wire.Tensor) -> torch.Tensor:
    """A view of the tensor's bytes on the host, or a copy if they are read-only."""
    data = tensor.data if not tensor.data.readonly else memoryview(bytearray(tensor.data))
    if not len(data):
        return torch.empty(tensor.shape, dtype=TORCH_DTYPES[tensor.dtype])
    return torch.frombuffer(data, dtype=TORCH_DTYPES[tensor.dtype]).view(tensor.shape)


class HostRunner:
    """The rows of a single step are read where they lie; those of several are copied together, so these are small."""

    most_merged_rows = 1024

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def run(self, work: Sequence[Work]) -> Ran:
        began = time.perf_counter_ns()
        rows = [_together(item) for item in work]
        copied = time.perf_counter_ns()
        for item, tensor in zip(work, rows, strict=True):
            if found := self._backend.find_non_finite(tensor, item.plan.num_tokens):
                raise NonFiniteError(item, *found)
        try:
            launches = tuple(
                self._backend.compress(
                    torch.from_numpy(item.plan.windows.copy()),
                    torch.from_numpy(item.plan.appends.copy()),
                    tensor,
                    item.cache.rings,
                    item.cache.group.pages,
                    item.cache.compressor,
                )
                for item, tensor in zip(work, rows, strict=True)
            )
        except Exception:
            raise step_failed() from None
        done = time.perf_counter_ns()
        return Ran(launches, (copied - began) // 1000, (done - copied) // 1000)


def _together(work: Work) -> torch.Tensor:
    if len(work.parts) == 1:
        return as_torch(work.parts[0].tensor)
    return torch.cat([as_torch(part.tensor)[: part.num_tokens] for part in work.parts])


class DeviceRunner:
    """Rows and plans go to the device; everything runs on the current stream of the thread that first runs a step."""

    def __init__(self, backend: Backend, caches: Caches, max_step_bytes: int, max_step_tokens: int) -> None:
        assert backend.flags is not None
        self._backend, self._raise_for, self._no_flag = backend, backend.flags.raise_for, backend.flags.no_flag
        self.most_merged_rows = max_step_tokens
        self._copied, self._done = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._began = torch.cuda.Event(enable_timing=True)
        device = backend.device
        room = max_step_bytes + wire.FRAME_ALIGN * len(caches.compressors)
        self._rows = torch.empty(room, dtype=torch.uint8, device=device)
        plan_ints = sum(_plan_ints(cache, caches.num_rings, max_step_tokens) for cache in caches.compressors)
        self._plan = torch.empty(plan_ints, dtype=torch.int32, device=device)
        self._plan_host = torch.empty(plan_ints, dtype=torch.int32, pin_memory=True)
        self._flags = torch.empty(len(caches.compressors), dtype=backend.flags.dtype, device=device)
        if backend.reserve_scratch is not None:
            for cache in caches.compressors:
                most = _most_windows(cache, caches.num_rings, max_step_tokens)
                backend.reserve_scratch(self._rows.device, most, cache.compressor.geometry.head_dim)
        self._flags_host = torch.empty(len(caches.compressors), dtype=backend.flags.dtype, pin_memory=True)

    def run(self, work: Sequence[Work]) -> Ran:
        try:
            launches = self._launch(work)
            self._done.synchronize()
        except Exception as error:
            if isinstance(error, torch.AcceleratorError):  # sticky: every later call of this process fails, too
                log.exception("the device failed")
                raise BrokenDeviceError("the device reported an error and must be started anew") from None
            raise step_failed() from None
        flags = self._flags_host.numpy()
        for i, item in enumerate(work):
            if flags[i] != self._no_flag:
                raise NonFiniteError(item, *divmod(int(flags[i]), item.cache.compressor.geometry.row_width))
        copy_us = self._began.elapsed_time(self._copied) * 1000
        return Ran(launches, round(copy_us), round(self._copied.elapsed_time(self._done) * 1000))

    def _launch(self, work: Sequence[Work]) -> tuple[int, ...]:
        self._began.record()
        plans = self._send_plans(work)
        rows = self._send_rows(work)
        self._copied.record()
        self._flags.fill_(self._no_flag)
        launches = []
        for i, (item, (windows, appends), tensor) in enumerate(zip(work, plans, rows, strict=True)):
            self._raise_for(tensor, item.plan.num_tokens, self._flags[i : i + 1])
            cache = item.cache
            launches.append(
                self._backend.compress(windows, appends, tensor, cache.rings, cache.group.pages, cache.compressor)
            )
        self._flags_host.copy_(self._flags, non_blocking=True)
        self._done.record()
        return tuple(launches)

    def _send_plans(self, work: Sequence[Work]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        host, end, views = self._plan_host.numpy(), 0, []
        for item in work:
            pair = []
            for array in (item.plan.windows, item.plan.appends):
                start, end = end, end + array.size
                host[start:end] = array.reshape(-1)
                pair.append(self._plan[start:end].view(array.shape))
            views.append(tuple(pair))
        self._plan[:end].copy_(self._plan_host[:end], non_blocking=True)
        return views

    def _send_rows(self, work: Sequence[Work]) -> list[torch.Tensor]:
        end, views = 0, []
        for item in work:
            width, num_tokens = item.cache.compressor.geometry.row_width, item.plan.num_tokens
            dtype = TORCH_DTYPES[item.parts[0].tensor.dtype]
            start = -(-end // wire.FRAME_ALIGN) * wire.FRAME_ALIGN
            end = start + num_tokens * width * dtype.itemsize
            rows = self._rows[start:end].view(dtype).view(num_tokens, width)
            filled = 0
            for part in item.parts:
                source = as_torch(part.tensor)[: part.num_tokens]
                rows[filled : filled + part.num_tokens].copy_(source, non_blocking=True)
                filled += part.num_tokens
            views.append(rows)
        return views


def _most_windows(cache: CompressorCache, num_rings: int, max_step_tokens: int) -> int:
    return max_step_tokens // cache.compressor.geometry.ratio + num_rings


def _plan_ints(cache: CompressorCache, num_rings: int, max_step_tokens: int) -> int:
    """Most int32 that a plan of this compressor can have."""
    geometry = cache.compressor.geometry
    windows = _most_windows(cache, num_rings, max_step_tokens)
    appends = min(max_step_tokens, num_rings * geometry.max_live_rows)
    return p.WINDOW_FIELDS * windows + p.APPEND_FIELDS * appends


def pin(block: memoryview) -> None:
    """Page-lock host memory, so that copies from it do not wait."""
    address = np.frombuffer(block, np.uint8).ctypes.data
    runtime: Any = torch.cuda.cudart()
    result = runtime.cudaHostRegister(address, len(block), 0)
    if int(result):
        log.warning("staging could not be pinned (%s); copies will be slower", result)
