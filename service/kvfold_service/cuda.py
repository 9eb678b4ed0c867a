"""What a runner needs of torch.cuda: one stream, page-locked memory, copies, timers, captured graphs.

torch calls ROCm's devices `cuda`, too. Tests put a device of their own in this one's place.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

log = logging.getLogger("kvfold")
T = TypeVar("T")
_Memory = ctypes.c_uint8 * (1 << 46)
"""Any memory of the host; a type for each length would be kept for ever."""
_ALREADY_LOCKED = 712
"""cudaErrorHostMemoryAlreadyRegistered"""


class Graph(Protocol):
    """Captured work; `replay` runs it on the stream again, with what then stands in the memory that it names."""

    def replay(self) -> None: ...

    def reset(self) -> None: ...


class _Mapped:
    """Memory of the host by its address, as torch takes it from other libraries of the device."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class Cuda:
    """The current device, and a stream of its own: what is captured must not lie on the default one."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._runtime = _runtime()

    def enter(self) -> None:
        """The calling thread works on this stream from now on, its other calls too: so they stay in order."""
        current = torch.cuda.current_stream()
        if current != self._stream:
            self._stream.wait_stream(current)
            torch.cuda.set_stream(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def timer(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def page_locked(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, pin_memory=True)

    @property
    def reads_host_memory(self) -> bool:
        """Whether `seen_by_device` can be called: on ROCm it was never tried."""
        return torch.version.hip is None

    def seen_by_device(self, locked: torch.Tensor) -> torch.Tensor:
        """Page-locked uint8 `[n]` as a tensor of the device: both have one address space."""
        return torch.as_tensor(_Mapped(locked.data_ptr(), locked.numel()), device="cuda")

    def lock_pages(self, address: int, num_bytes: int) -> bool:
        """Page-lock memory of the host, so that copies from it do not wait; False (and a warning) if that fails."""
        cudart: Any = torch.cuda.cudart()
        result = cudart.cudaHostRegister(address, num_bytes, 0)
        if int(result):
            log.warning("staging could not be page-locked (%s); copies will be slower", result)
            with contextlib.suppress(RuntimeError):  # else the next kernel would be blamed for it
                torch.zeros(1, device="cuda")
        return not int(result)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Host ↔ device, without waiting; may be captured."""
        target.copy_(source, non_blocking=True)

    def send(self, target: torch.Tensor, address: int) -> None:
        """The host's bytes from `address` on → target, uint8 `[n]` on the device, without waiting."""
        source = torch.frombuffer(_Memory.from_address(address), dtype=torch.uint8, count=target.numel())
        target.copy_(source, non_blocking=True)

    @property
    def sends_pieces(self) -> bool:
        """Whether `send_pieces` can be called: NVIDIA's bindings come with torch for CUDA."""
        return self._runtime is not None

    def send_pieces(
        self, target: torch.Tensor, target_pitch: int, address: int, pitch: int, num_bytes: int, count: int
    ) -> None:
        """`count` pieces of num_bytes, `pitch` apart on the host and `target_pitch` on the device, in one copy."""
        runtime = self._runtime
        kind, stream = runtime.cudaMemcpyKind.cudaMemcpyHostToDevice, self._stream.cuda_stream
        (error,) = runtime.cudaMemcpy2DAsync(
            target.data_ptr(), target_pitch, address, pitch, num_bytes, count, kind, stream
        )
        if int(error):
            raise RuntimeError(f"a copy to the device failed: {error}")

    def capture(self, enqueue: Callable[[], T]) -> tuple[Graph, T]:
        """What `enqueue` puts on the stream, as a graph, and what it returned; nothing of it runs.

        Raises whatever keeps it from being captured; the stream is usable afterwards.
        """
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            result = enqueue()
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError as error:  # also says that the capture has failed, which is known
                log.debug("the capture ended with %s", error)
            raise
        graph.capture_end()
        return graph, result


def _forget_error() -> None:
    """The runtime keeps a refused call's error, and torch would raise it at its next launch: let it, here."""
    try:
        torch.zeros(1, device="cuda")
    except torch.AcceleratorError as error:
        log.debug("refused: %s", error)


def _runtime() -> Any:
    if torch.version.hip is not None:
        return None
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ImportError:
        return None
