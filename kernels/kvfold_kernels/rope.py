"""Rotation table: cos and sin of every position, computed once, the same bits on every machine and device.

    angle[p, i]  = fp32(p) · inv_freq[i]                              (fp32 product)
    inv_freq[i]  = 1 / theta^(2i / dim)                               without YaRN
                 = 1 / (factor · theta^(2i / dim)) · ramp[i] + 1 / theta^(2i / dim) · (1 − ramp[i])      with it
    ramp[i]      = clamp((i − low) / (high − low), 0, 1)
    low, high    = floor, ceil of dim · ln(original / (beta · 2π)) / (2 ln theta) at beta_fast, beta_slow

Engines take positions and frequencies in fp32, so the angle's fp32 rounding is part of the definition; cos and sin of
that angle are then rounded once, from fp64. YaRN's attention factor (mscale) is not applied by DeepSeek-V4.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Yarn:
    factor: float = 16.0
    original_max_position: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclass(frozen=True, slots=True)
class Rope:
    dim: int = 64
    theta: float = 160000.0
    yarn: Yarn | None = Yarn()

    def inv_freq(self) -> F32:
        """fp32 `[dim / 2]`."""
        one = np.float32(1)
        period = np.power(self.theta, np.arange(0, self.dim, 2, dtype=np.float64) / self.dim).astype(np.float32)
        if self.yarn is None:
            return (one / period).astype(np.float32)
        low = max(math.floor(self._turns_to_index(self.yarn.beta_fast)), 0)
        high = min(math.ceil(self._turns_to_index(self.yarn.beta_slow)), self.dim - 1)
        ramp = (np.arange(self.dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(max(high - low, 0.001))
        keep = one - np.clip(ramp, 0, 1)
        stretched = one / (np.float32(self.yarn.factor) * period)
        return (stretched * (one - keep) + one / period * keep).astype(np.float32)

    def _turns_to_index(self, beta: float) -> float:
        """Index of the frequency that makes `beta` turns over the original context."""
        assert self.yarn is not None
        turns = self.yarn.original_max_position / (beta * 2 * math.pi)
        return self.dim * math.log(turns) / (2 * math.log(self.theta))

    def table(self, max_position: int) -> F32:
        """fp32 `[max_position, dim]` = [cos(dim / 2) | sin(dim / 2)]."""
        table = np.empty((max_position, self.dim), np.float32)
        inv_freq = self.inv_freq()
        half = self.dim // 2
        for start in range(0, max_position, 65536):
            stop = min(start + 65536, max_position)
            angle = np.arange(start, stop, dtype=np.float32)[:, None] * inv_freq
            wide = angle.astype(np.float64)
            table[start:stop, :half] = np.cos(wide)
            table[start:stop, half:] = np.sin(wide)
        return table
