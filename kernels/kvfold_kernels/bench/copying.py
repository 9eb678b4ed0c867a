"""How fast this machine moves bytes: what every kernel here is held against."""

from __future__ import annotations

import statistics

import torch

from kvfold_kernels.bench.timing import event_us, seconds

_BYTES = {"cpu": 1 << 28, "cuda": 1 << 30}
"""More than any cache holds."""


def copy_rate(device: str, rounds: int = 7) -> float:
    """Bytes read and written a second by torch's copy of one large tensor: the median of some."""
    source = torch.zeros(_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.ones_like(source)

    def copy() -> torch.Tensor:
        return target.copy_(source)

    copy()
    # On a GPU not from a graph: there a copy is a node of its own kind, and measured slower by a third on an H200.
    times = [event_us(copy) if device == "cuda" else seconds(copy, 1) * 1e6 for _ in range(rounds)]
    return 2 * source.numel() / (statistics.median(times) * 1e-6)
