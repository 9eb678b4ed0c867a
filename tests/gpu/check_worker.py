"""A worker on a GPU, in this process and over loopback: bytes, failures, allocations, waits, latency by phase.

python tests/gpu/check_worker.py [--backend NAME] [--graphs off|auto|both] [--only bits|latency|http …] [--out FILE]
(PYTHONPATH: clients, service, kernels and the root)
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvfold_kernels import backends
from tests.bench.measure import environment
from tests.gpu import worker_bits as bits
from tests.gpu.worker_latency import all_in_process, over_loopback
from tests.gpu.workers import SETS, Room, make
from tests.walk import Walk

PARTS = ("bits", "latency", "http")


def check_bits(backend: backends.Backend, room: Room, golden: Walk, graphs: bool) -> None:
    subject = Walk(make(backend, room, graphs), golden.worker, SETS, 3, room)
    checks: dict[str, Callable[[], None]] = {
        "ways": lambda: bits.check_ways(golden, subject),
        "refusals": lambda: bits.check_refusals(subject),
        "failures (their log follows)": lambda: bits.check_failures(subject, graphs),
        "full bucket": lambda: bits.check_full_bucket(subject, graphs),
        "walk": lambda: bits.check_walk(subject, 250, graphs),
        "far pages and rings": lambda: check_far(backend, room, golden, graphs),
    }
    for name, check in checks.items():
        print(f" {name}", flush=True)
        began = time.perf_counter()
        check()
        print(f" {name}: {time.perf_counter() - began:.1f} s", flush=True)


def check_far(backend: backends.Backend, room: Room, golden: Walk, graphs: bool) -> None:
    """The same where rings and pages lie beyond 2 GiB."""
    worker = make(backend, room, graphs, max_requests=4096, pages=70000)
    worker.free_slots.reverse()
    for group in worker.caches.groups:
        group.pool._free[:] = group.pool._free[::-1].copy()
    sizes = worker.caches.bytes_by_pool()
    assert max(sizes.values()) > 1 << 31, sizes
    bits.check_walk(Walk(worker, golden.worker, SETS, 4, room), 60, graphs)


def run(backend: backends.Backend, modes: list[str], parts: list[str]) -> dict[str, Any]:
    room = Room(1 << 30)
    golden = Walk(make(backend, room, False, max_requests=4), None, SETS, 0, room)
    results: dict[str, Any] = {}
    for mode in modes:
        graphs = mode == "auto"
        for part in parts:
            print(f"{backend.name}, graphs {mode}: {part}, µs", flush=True)
            began = time.perf_counter()
            if part == "bits":
                check_bits(backend, room, golden, graphs)
            elif part == "latency":
                results[f"in process, graphs {mode}"] = all_in_process(backend, room, graphs)
            else:
                for dtype in ("fp32", "bf16"):
                    results[f"loopback, graphs {mode}, {dtype}"] = over_loopback(backend.name, mode, dtype, golden)
            print(f"{backend.name}, graphs {mode}: {part} took {time.perf_counter() - began:.0f} s", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--graphs", choices=("off", "auto", "both"), default="both")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    backend = backends.load(arguments.backend)
    assert backend.device == "cuda", f"{backend.name} does not run on a GPU"
    torch.set_grad_enabled(False)
    modes = ["off", "auto"] if arguments.graphs == "both" else [arguments.graphs]
    results = run(backend, modes, arguments.only)
    device = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda, "backend": backend.name}
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton")}
    print(f"{backend.name} on {device['gpu']}: all of {', '.join(arguments.only)} hold", flush=True)
    if arguments.out:
        record = {"environment": environment() | device | versions, "results": results}
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
