"""A device in the host's memory that is as late as it may be: what is put on its stream happens when somebody waits.

So a test sees torn memory where a runner writes to what is still on its way, and a replay that depends on what the host
knew at the capture. Fresh memory is full of 0xFF: NaN as a number, −1 as an index.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch

from kvfold_kernels import backends
from kvfold_kernels.backends import Backend, DeviceFlags
from kvfold_kernels.compressor import Compressor
from kvfold_service.caches import Caches
from kvfold_service.cuda import Cuda
from kvfold_service.device import DeviceRunner
from kvfold_service.worker import Worker

NO_FLAG = 2**31 - 1
POISON = -(2**30)
TAKES_COUNTS = True


class FakeGraph:
    def __init__(self, cuda: FakeCuda, operations: list[Callable[[], object]]) -> None:
        self._cuda, self._operations, self.alive = cuda, operations, True

    def replay(self) -> None:
        assert self.alive, "a graph that was given up is replayed"
        if self._cuda.fails_replays:
            raise RuntimeError("injected: replay")
        self._cuda.replays += 1
        for operation in self._operations:
            self._cuda.put(operation)

    def reset(self) -> None:
        self.alive = False


class Timer:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def record(self) -> None:
        self._cuda.put(lambda: None)

    def synchronize(self) -> None:
        self._cuda.synchronize()

    def elapsed_time(self, other: Timer) -> float:
        assert not self._cuda.pending, "a time was asked for before its work had ended"
        return 0.0


class FakeCuda(Cuda):
    def __init__(self, sends_pieces: bool = True) -> None:
        self.pending: list[Callable[[], object]] = []
        self._captured: list[Callable[[], object]] | None = None
        self._pieces = sends_pieces
        self.locked: list[range] = []
        self.sends: list[tuple[int, int]] = []
        """(bytes, pieces) of each copy of rows."""
        self.graphs: list[FakeGraph] = []
        self.copies = self.waits = self.replays = self.unlocked_sends = 0
        self.fails_captures = self.fails_replays = False
        self.broken = False

    @property
    def captures(self) -> int:
        return len(self.graphs)

    def put(self, operation: Callable[[], object]) -> None:
        (self.pending if self._captured is None else self._captured).append(operation)

    def enter(self) -> None:
        """Threads are the engine's business."""

    def synchronize(self) -> None:
        assert self._captured is None, "waiting cannot be captured"
        self.waits += 1
        if self.broken:
            raise RuntimeError("injected: an illegal memory access")
        operations, self.pending = self.pending, []
        for operation in operations:
            operation()

    def timer(self) -> Any:
        return Timer(self)

    def page_locked(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        memory = torch.full((size * dtype.itemsize,), 0xFF, dtype=torch.uint8)
        self.locked.append(range(memory.data_ptr(), memory.data_ptr() + len(memory)))
        return memory.view(dtype)

    def seen_by_device(self, locked: torch.Tensor) -> torch.Tensor:
        return locked

    def lock_pages(self, address: int, num_bytes: int) -> bool:
        self.locked.append(range(address, address + num_bytes))
        return True

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copies += 1
        self.put(lambda: target.copy_(source))

    def send(self, target: torch.Tensor, address: int) -> None:
        self._send(target, 0, address, 0, len(target), 1)

    @property
    def sends_pieces(self) -> bool:
        return self._pieces

    def send_pieces(
        self, target: torch.Tensor, target_pitch: int, address: int, pitch: int, num_bytes: int, count: int
    ) -> None:
        assert self._pieces
        assert max(target_pitch, pitch) < 2**31
        assert min(target_pitch, pitch) >= num_bytes > 0
        assert count > 1
        last = address + (count - 1) * pitch + num_bytes - 1
        assert any(address in block and last in block for block in self.locked), "pieces of several blocks"
        self._send(target, target_pitch, address, pitch, num_bytes, count)

    def _send(
        self, target: torch.Tensor, target_pitch: int, address: int, pitch: int, num_bytes: int, count: int
    ) -> None:
        assert self._captured is None, "rows come from another address each time"
        self.sends.append((num_bytes, count))
        start, last = target.data_ptr(), address + (count - 1) * pitch + num_bytes - 1

        def move() -> None:
            for i in range(count):
                ctypes.memmove(start + i * target_pitch, address + i * pitch, num_bytes)

        if any(address in block and last in block for block in self.locked):
            self.put(move)
        else:  # other memory is read before the call returns, once the stream has come so far
            self.unlocked_sends += 1
            self.put(move)
            self.synchronize()
            self.waits -= 1

    def capture(self, enqueue: Callable[[], Any]) -> tuple[FakeGraph, Any]:
        self._captured = []
        try:
            result = enqueue()
            if self.fails_captures:
                raise RuntimeError("injected: capture")
            self.graphs.append(FakeGraph(self, self._captured))
            return self.graphs[-1], result
        finally:
            self._captured = None


def fake_backend(cuda: FakeCuda, *, layer: bool = False, real: str = "cpu") -> Backend:
    """The real backend's ops, put on the stream. layer: has `compress_layer`."""
    host = backends.load(real)

    def compress(
        windows: torch.Tensor,
        appends: torch.Tensor,
        rows: torch.Tensor,
        rings: torch.Tensor,
        pages: torch.Tensor,
        compressor: Compressor,
        counts: torch.Tensor | None = None,
    ) -> int:
        def run() -> None:
            num_windows, num_appends = (windows.shape[1], appends.shape[1]) if counts is None else counts.tolist()
            assert num_windows <= windows.shape[1]
            assert num_appends <= appends.shape[1]
            host.compress(
                windows[:, :num_windows].contiguous(),
                appends[:, :num_appends].contiguous(),
                rows,
                rings,
                pages,
                compressor,
            )

        cuda.put(run)
        return int(windows.shape[1] + appends.shape[1] > 0)

    def compress_layer(main: tuple[Any, ...], indexer: tuple[Any, ...]) -> int:
        assert main[2].dtype == indexer[2].dtype
        assert main[3].dtype == indexer[3].dtype
        assert (main[5].geometry.kind, indexer[5].geometry.kind) == ("csa", "indexer")
        return int(compress(*main) + compress(*indexer) > 0)

    def flag(rows: torch.Tensor, num_tokens: int, flag: torch.Tensor) -> None:
        def run() -> None:
            if found := host.find_non_finite(rows, num_tokens):
                flag[0] = min(int(flag[0]), found[0] * rows.shape[1] + found[1])

        cuda.put(run)

    return Backend(
        "fake",
        "cpu",
        compress,
        host.find_non_finite,
        DeviceFlags(flag, NO_FLAG),
        takes_counts=TAKES_COUNTS,
        compress_layer=compress_layer if layer else None,
    )


class PoisonedRunner(DeviceRunner):
    """Before each step, all that it must bring itself is rubbish: plans, flags and counts on the device, rows."""

    def run(self, work: Any) -> Any:
        self._plans._device.fill_(POISON)
        self._plans._array[self._plans._counts_at :] = POISON
        self._plans._flags_back.fill_(0)
        for memory in filter(None, (self._far, self._near)):
            memory._bytes.fill_(0xFF)
        return super().run(work)


def on_device(worker: Worker, cuda: FakeCuda, *, graphs: bool = True, layer: bool = False, **limits: int) -> Worker:
    """The worker, with a runner of the fake device in place of its own."""
    limits = {"max_step_bytes": 8 << 20, "max_step_tokens": 65536} | limits
    backend = fake_backend(cuda, layer=layer)
    caches: Caches = worker.caches
    worker.runner = PoisonedRunner(backend, caches, **limits, graphs=graphs, cuda=cuda)
    return worker
