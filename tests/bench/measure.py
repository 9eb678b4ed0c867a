"""What every benchmark here shares: medians, versions, worker processes, results kept as JSON."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "torch", "numba", "fastapi", "uvicorn", "uvloop", "msgpack", "httpx", "transformers")


def median_us(call: Callable[[], Any], repeats: int) -> float:
    """Median time of one call, after a warm-up of a tenth of the repeats."""
    for _ in range(max(1, repeats // 10)):
        call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - began)
    return statistics.median(times) / 1000


def percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {f"p{p}": round(ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 1) for p in (50, 90, 99)}


def environment() -> dict[str, Any]:
    versions = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "cpu": cpu.partition(":")[2].strip(),
        "cores": os.cpu_count(),
        "load_before": os.getloadavg()[0],
        "versions": versions,
    }


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
