"""What the benchmarks of a worker share: percentiles, worker processes, results kept as JSON."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvfold_kernels.bench.result import environment
from kvfold_kernels.bench.timing import median_us

__all__ = ["environment", "from_root", "median_us", "percentiles", "process", "save", "worker"]


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 1) for p in (50, 90, 99)}


def from_root(text: str) -> str:
    """Paths of this checkout as they are from its root."""
    return text.replace(f"{Path(__file__).parents[2]}/", "")


def save(path: Path, results: dict[str, Any]) -> None:
    path.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")


@contextlib.contextmanager
def process(*arguments: str) -> Iterator[tuple[str, int]]:
    """A server process; its URL (from its line `ready URL …`) and pid."""
    with subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line.startswith("ready "), f"the server did not start: {line!r}"
        try:
            yield line.split()[1], server.pid
        finally:
            server.terminate()


def worker(**options: Any) -> contextlib.AbstractContextManager[tuple[str, int]]:
    fixed = {"port": 0, "log_level": "error", "drain_seconds": 0}
    arguments = {"manifest": "tiny", "weights": "random:1"} | fixed | options
    flags = [part for name, value in arguments.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return process("-m", "kvfold_service", *flags)
