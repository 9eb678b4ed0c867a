"""Plans on their way to the device: flags, counts and plan arrays in one page-locked block, one copy a step.

Nothing here may ever be written by a kernel, `fill_` included. Kernels with an early start (programmatic dependent
launch) read counts and plan arrays before the stream's earlier kernels have ended; only a copy is certain to have ended
before any kernel behind it begins. That is why the same copy also sets the flags back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from kvfold_kernels import plan as p
from kvfold_kernels.backends import DeviceFlags
from kvfold_service.caches import CompressorCache
from kvfold_service.cuda import Cuda
from kvfold_service.graphs import MAX_BUCKET

FIELDS = p.WINDOW_FIELDS + p.APPEND_FIELDS


@dataclass(frozen=True, slots=True)
class Room:
    """Room for one compressor's plan of up to `bucket` windows and appends, at fixed addresses.

    windows, appends, counts   int32 on the device: `[7, bucket]`, `[2, bucket]`, `[2]`
    from_windows, from_appends where these are copied from
    """

    windows: torch.Tensor
    appends: torch.Tensor
    counts: torch.Tensor
    from_windows: NDArray[np.int32]
    from_appends: NDArray[np.int32]


class PlanBuffer:
    """`[flags of all compressors | counts of all | arrays]`, int32, on the host and on the device."""

    def __init__(self, cuda: Cuda, device: str, num_compressors: int, num_ints: int, flags: DeviceFlags) -> None:
        self._cuda, self.num_ints = cuda, num_ints
        flag_ints = num_compressors * flags.dtype.itemsize // 4
        self._counts_at, self._arrays_at = flag_ints, flag_ints + 2 * num_compressors
        self._host = cuda.page_locked(self._arrays_at + num_ints, torch.int32)
        self._array = self._host.numpy()
        self._host[:flag_ints].view(flags.dtype).fill_(flags.no_flag)
        self._device = torch.empty(self._arrays_at + num_ints, dtype=torch.int32, device=device)
        self._flags = self._device[:flag_ints].view(flags.dtype)
        self._flags_back = cuda.page_locked(num_compressors, flags.dtype)
        self.flags = [self._flags[i : i + 1] for i in range(num_compressors)]
        """`[1]` on the device, one for each work of a step."""

    def send(self, plans: Sequence[p.Plan]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Bring the plans, set the flags back; windows and appends of each on the device."""
        arrays = [array for plan in plans for array in (plan.windows, plan.appends)]
        start, views = self._arrays_at, []
        for array in arrays:
            views.append(self._device.as_strided(array.shape, (array.shape[1], 1), start))
            start += array.size
        np.concatenate([array.reshape(-1) for array in arrays], out=self._array[self._arrays_at : start])
        self._send(start)
        return list(zip(views[::2], views[1::2], strict=True))

    def rooms(self, num_plans: int, bucket: int) -> list[Room]:
        """Room for so many plans, at the same addresses whenever it is asked for."""
        return [self._room(i, self._arrays_at + i * FIELDS * bucket, bucket) for i in range(num_plans)]

    def _room(self, i: int, start: int, bucket: int) -> Room:
        counts = self._counts_at + 2 * i
        middle, end = start + p.WINDOW_FIELDS * bucket, start + FIELDS * bucket
        return Room(
            self._device[start:middle].view(p.WINDOW_FIELDS, bucket),
            self._device[middle:end].view(p.APPEND_FIELDS, bucket),
            self._device[counts : counts + 2],
            self._array[start:middle].reshape(p.WINDOW_FIELDS, bucket),
            self._array[middle:end].reshape(p.APPEND_FIELDS, bucket),
        )

    def fill(self, rooms: Sequence[Room], plans: Sequence[p.Plan]) -> None:
        """Write the plans where `send_rooms` copies them from. Behind their counts stays what was there."""
        counts = []
        for room, plan in zip(rooms, plans, strict=True):
            counts += (plan.num_windows, plan.num_appends)
            room.from_windows[:, : counts[-2]] = plan.windows
            room.from_appends[:, : counts[-1]] = plan.appends
        self._array[self._counts_at : self._counts_at + len(counts)] = counts

    def send_rooms(self, num_plans: int, bucket: int) -> None:
        """Bring what `fill` has written, set the flags back. May be captured: addresses and size are fixed."""
        self._send(self._arrays_at + num_plans * FIELDS * bucket)

    def _send(self, end: int) -> None:
        self._cuda.copy(self._device[:end], self._host[:end])

    def fetch_flags(self, num_plans: int) -> None:
        """Bring the flags back, without waiting; may be captured."""
        self._cuda.copy(self._flags_back[:num_plans], self._flags[:num_plans])

    def fetched_flags(self, num_plans: int) -> list[int]:
        return self._flags_back[:num_plans].tolist()


def most_windows(cache: CompressorCache, num_rings: int, max_step_tokens: int) -> int:
    """Most windows that a step closes in this compressor."""
    return max_step_tokens // cache.compressor.geometry.ratio + num_rings


def most_ints(cache: CompressorCache, num_rings: int, max_step_tokens: int) -> int:
    """Most int32 that a plan of this compressor can have, captured or not."""
    windows = most_windows(cache, num_rings, max_step_tokens)
    appends = min(max_step_tokens, num_rings * cache.compressor.geometry.max_live_rows)
    return max(FIELDS * MAX_BUCKET, p.WINDOW_FIELDS * windows + p.APPEND_FIELDS * appends)
