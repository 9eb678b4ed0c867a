"""Rows of a step on their way to the device: where each compressor's will lie there, and with how few copies they come.

A frame's tensors lie one behind the other in staging, each at a multiple of 64 bytes. Laid out alike on the device they
come in one copy; with room between them, as a captured graph has it, in one copy for all of the same size. Few rows do
not come at all: the kernels read them where the host has put them, in page-locked memory.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from kvfold_client import wire
from kvfold_service.caches import TORCH_DTYPES
from kvfold_service.cuda import Cuda

BOUNCE_BYTES: Final = 4 << 20
"""Rows from memory that is not page-locked (msgpack bodies, the canary) pass through so many bytes that are: a copy
from other memory waits for the stream."""
NEAR_BYTES: Final = 64 << 10
"""Rows of a step that the kernels read over the bus. Measured (docs/performance.md): up to here that is sooner done
than a copy and its launch, from 256 KiB on it is not."""
MAX_PITCH: Final = 2**31 - 1
"""Of a copy in pieces, on both sides: cudaDeviceProp.memPitch."""
_STAGING, _BOUNCE = 0, 1


@dataclass(frozen=True, slots=True)
class Move:
    """`count` pieces of num_bytes: host address → byte of the device's rows; the pitches lie between their starts.

    block: of page-locked memory, in which the pieces lie and what is between them; None: not page-locked
    """

    target: int
    address: int
    num_bytes: int
    block: int | None = 0
    count: int = 1
    target_pitch: int = 0
    pitch: int = 0


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // wire.FRAME_ALIGN) * wire.FRAME_ALIGN


def one_behind_the_other(sizes: Iterable[int]) -> tuple[list[int], int]:
    """Start of each size, as a frame has them, and the end of all."""
    starts, end = [], 0
    for size in sizes:
        starts.append(aligned(end))
        end = starts[-1] + size
    return starts, end


def together(moves: Iterable[Move], in_pieces: bool) -> list[Move]:
    """The same bytes in fewer copies. in_pieces: a copy may have several pieces."""
    joined: list[Move] = []
    for move in sorted(moves, key=lambda move: move.address):
        last = joined[-1] if joined else None
        if last and last.block is not None and last.block == move.block and _adjoin(last, move):
            joined[-1] = dataclasses.replace(last, num_bytes=move.address + move.num_bytes - last.address)
        else:
            joined.append(move)
    return _in_pieces(joined) if in_pieces else joined


@functools.lru_cache(maxsize=256)
def _copies(pieces: tuple[tuple[int, int, int, int | None], ...], in_pieces: bool) -> tuple[Move, ...]:
    """`together` of (target, address, num_bytes, block). Addresses count from the first piece's: so steps of one shape
    are alike, wherever their frames lie."""
    return tuple(together((Move(*piece) for piece in pieces), in_pieces))


def _adjoin(last: Move, move: Move) -> bool:
    """Whether both lie behind each other, on the host as on the device, with no more between than alignment leaves."""
    distance = move.address - last.address
    return move.target - last.target == distance and 0 <= distance - last.num_bytes < wire.FRAME_ALIGN


def _in_pieces(moves: list[Move]) -> list[Move]:
    """Moves of one size whose starts are equally far apart, on both sides, become one."""
    by_size: dict[tuple[int, int | None], list[Move]] = {}
    for move in moves:
        by_size.setdefault((move.num_bytes, move.block), []).append(move)
    result: list[Move] = []
    for (_, block), same in by_size.items():
        run = same[:1]
        for move in same[1:]:
            if block is not None and _goes_on(run, move):
                run.append(move)
            else:
                result.append(_pieces(run))
                run = [move]
        result.append(_pieces(run))
    return result


def _goes_on(run: list[Move], move: Move) -> bool:
    last = run[-1]
    steps = move.target - last.target, move.address - last.address
    if len(run) == 1:
        return min(steps) >= move.num_bytes and max(steps) <= MAX_PITCH
    return steps == (last.target - run[-2].target, last.address - run[-2].address)


def _pieces(run: list[Move]) -> Move:
    if len(run) == 1:
        return run[0]
    first, second = run[:2]
    return dataclasses.replace(
        first,
        count=len(run),
        target_pitch=second.target - first.target,
        pitch=second.address - first.address,
    )


def _address(data: memoryview) -> int:
    if data.readonly:
        return np.frombuffer(data, np.uint8).ctypes.data
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


class _Memory:
    """uint8 `[num_bytes]` as a device sees it."""

    def __init__(self, on_device: torch.Tensor) -> None:
        self.num_bytes = on_device.numel()
        self._bytes = on_device
        self._typed = {name: on_device.view(dtype) for name, dtype in TORCH_DTYPES.items()}

    def view(self, dtype: str, start: int, num_rows: int, width: int) -> torch.Tensor:
        """`[num_rows, width]` from byte `start` on."""
        return self._typed[dtype].as_strided((num_rows, width), (width, 1), start // wire.ITEM_BYTES[dtype])


class NearRows(_Memory):
    """Page-locked memory of the host, for few rows: the kernels read them there."""

    def __init__(self, cuda: Cuda) -> None:
        host = cuda.page_locked(NEAR_BYTES, torch.uint8)
        super().__init__(cuda.seen_by_device(host))
        self._host = host.numpy()

    def send(self, sources: Iterable[tuple[int, memoryview, int]]) -> None:
        """See `FarRows.send`; what was here before must have been read."""
        for start, data, num_bytes in sources:
            self._host[start : start + num_bytes] = data[:num_bytes]


class FarRows(_Memory):
    """Memory of the device, and the way there."""

    def __init__(self, cuda: Cuda, num_bytes: int, device: str) -> None:
        super().__init__(torch.empty(aligned(num_bytes), dtype=torch.uint8, device=device))
        self._cuda = cuda
        self._bounce = cuda.page_locked(BOUNCE_BYTES, torch.uint8).numpy()
        self._locked = range(0)

    def lock(self, block: memoryview) -> None:
        """Most rows will come from this memory: page-lock it."""
        address = _address(block)
        if self._cuda.lock_pages(address, len(block)):
            self._locked = range(address, address + len(block))

    def send(self, sources: Iterable[tuple[int, memoryview, int]]) -> None:
        """(start, bytes, how many of them) of each piece of rows → the device, without waiting; the bytes must stay
        until they have come."""
        pieces: list[tuple[int, int, int, int | None]] = []
        base = end = 0
        for start, data, num_bytes in sources:
            if not num_bytes:
                continue
            address = _address(data)
            block = _STAGING if address in self._locked else None
            if block is None and aligned(end) + num_bytes <= BOUNCE_BYTES:
                begin, end = aligned(end), aligned(end) + num_bytes
                self._bounce[begin:end] = data[:num_bytes]
                address, block = _address(self._bounce.data) + begin, _BOUNCE
            base = base or address
            pieces.append((start, address - base, num_bytes, block))
        for move in _copies(tuple(pieces), self._cuda.sends_pieces):
            self._send(move, base + move.address)

    def _send(self, move: Move, address: int) -> None:
        target = self._bytes[move.target : move.target + move.num_bytes]
        if move.count > 1:
            self._cuda.send_pieces(target, move.target_pitch, address, move.pitch, move.num_bytes, move.count)
        else:
            self._cuda.send(target, address)
