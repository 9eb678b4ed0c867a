"""Plans and rows → kernels. A runner knows the device, never a request; this is the host's, `device` has the GPU's."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from kvfold_client import wire
from kvfold_kernels import plan as p
from kvfold_kernels.backends import Backend
from kvfold_service.caches import TORCH_DTYPES, CompressorCache
from kvfold_service.errors import ServiceError

log = logging.getLogger("kvfold")
GraphMode = Literal["none", "full"]


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

    @property
    def dtype(self) -> str:
        """That of all parts."""
        return self.parts[0].tensor.dtype


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
    """Launches of each work, and µs for bringing the bytes to the device and for the kernels.

    graph_mode  full: what was launched does not depend on what only the host knows, so nothing was left out
    """

    launches_of: tuple[int, ...]
    copy_us: int
    kernel_us: int
    graph_mode: GraphMode = "none"

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

    def lock(self, block: memoryview) -> None:
        """Most rows will come from this memory of the host."""
        ...

    def run(self, work: Sequence[Work]) -> Ran: ...


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

    def lock(self, block: memoryview) -> None:
        """It is read where it lies."""

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
