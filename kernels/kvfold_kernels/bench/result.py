"""What a benchmark gives: times of every round, from which every table and comparison is made."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

PACKAGES = (
    *("kvfold", "numpy", "torch", "triton", "nvidia-cutlass-dsl", "numba", "transformers"),
    *("fastapi", "uvicorn", "uvloop", "msgpack", "httpx"),
)
Samples = list[float]
"""µs a call, one number a round."""


@dataclass
class Row:
    """One case in one dtype. `us` by backend; `min_bytes` is what the case must move."""

    case: str
    dtype: str
    num_windows: int
    min_bytes: int
    us: dict[str, Samples] = field(default_factory=dict)


@dataclass
class BenchResult:
    environment: dict[str, Any]
    copy_bytes_per_s: dict[str, list[float]] = field(default_factory=dict)
    """By device, measured at the beginning of every pass."""
    plans: dict[str, dict[str, Samples]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    """Backends that could not run here, and why."""

    def row(self, case: str, dtype: str) -> Row | None:
        return next((row for row in self.rows if (row.case, row.dtype) == (case, dtype)), None)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> BenchResult:
    """Raises ValueError for a file that is no result, OSError for one that cannot be read."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        return BenchResult(**read | {"rows": [Row(**row) for row in read["rows"]]})
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path.name} is not a result of kvfold bench: {error}") from None


def rate(result: BenchResult, device: str) -> float | None:
    """The copy rate of a device in bytes a second: the median over the passes."""
    rates = result.copy_bytes_per_s.get(device)
    return statistics.median(rates) if rates else None


def interval(samples: Sequence[float]) -> tuple[float, float]:
    """Around the median, so wide that it holds the true one with 95 % if rounds are independent.

    Ranks ⌊n/2 − 0.98·√n⌋ and its mirror: of the binomial distribution, whatever the samples' own is.
    """
    ordered = sorted(samples)
    below = max(0, int(len(ordered) / 2 - 0.98 * len(ordered) ** 0.5))
    return ordered[below], ordered[len(ordered) - 1 - below]


def environment() -> dict[str, Any]:
    """When, with what, and on which machine."""
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    found = {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "versions": versions,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu() -> str:
    """The CPU's name, where Linux tells it."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        return next(names, platform.processor())
    return platform.processor()
