"""May kernels read a small step's rows where they lie, in page-locked memory of the host, instead of after a copy?

    python -m tests.bench.bench_pinned [--backend cute|triton] [--out FILE.json]

Both ways as a step has them: check of the values and compress, behind a copy to the device or on the host's memory
itself, which the check and compress then read over the bus once each. device: µs of a graph replay, many back to back;
graph: µs from a replay to its end as the host sees it; eager: the same, launched one by one. Medians; bytes must agree.
"""

from __future__ import annotations

import argparse
import importlib
import json
import mmap
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kvfold_kernels.backends import DeviceFlags
from tests.bench.bench_gpu import DTYPES, Ours
from tests.bench.measure import environment

BATCHES = (1, 8, 32, 64)
REPEATS = 100


class Mapped:
    """Page-locked host memory, as the device sees it: with one address space, at the same address."""

    def __init__(self, block: mmap.mmap, num_bytes: int) -> None:
        address = np.frombuffer(block, np.uint8).ctypes.data
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


def page_locked(num_bytes: int) -> mmap.mmap:
    """Anonymous memory, registered as staging is."""
    block = mmap.mmap(-1, num_bytes)
    cudart: Any = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(np.frombuffer(block, np.uint8).ctypes.data, num_bytes, 0)) == 0
    return block


def placed(block: mmap.mmap, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows at the block's start: as a tensor of the host, and as one of the device."""
    num_bytes = rows.numel() * rows.element_size()
    host = torch.frombuffer(block, dtype=torch.uint8, count=num_bytes).view(rows.dtype).view(rows.shape)
    host.copy_(rows)
    mapped = torch.as_tensor(Mapped(block, num_bytes), device="cuda").view(rows.dtype).view(rows.shape)
    assert mapped.data_ptr() == host.data_ptr()
    return host, mapped


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def device_us(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(5):
        begin.record()
        for _ in range(REPEATS):
            graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / REPEATS)
    return round(statistics.median(times), 2)


def host_us(run: Callable[[], object]) -> float:
    done, times = torch.cuda.Event(), []
    for _ in range(REPEATS):
        began = time.perf_counter_ns()
        run()
        done.record()
        done.synchronize()
        times.append((time.perf_counter_ns() - began) / 1000)
    return round(statistics.median(times), 1)


def compare(backend: Any, block: mmap.mmap, ratio: int, given: str, batch: int, at_boundary: bool) -> dict[str, Any]:
    start = 4096 + ratio - 1 if at_boundary else 4097
    case = Ours(ratio, [start] * batch, [1] * batch, given)
    windows, appends, rows, rings, pages, compressor, counts = case.call
    host, mapped = placed(block, rows)
    flags = DeviceFlags(backend.flag_non_finite, backend.NO_FLAG)
    flag = torch.full((1,), flags.no_flag, dtype=flags.dtype, device="cuda")

    def after_copy() -> None:
        rows.copy_(host, non_blocking=True)
        backend.flag_non_finite(rows, batch, flag)
        backend.compress(windows, appends, rows, rings, pages, compressor, counts)

    def in_place() -> None:
        backend.flag_non_finite(mapped, batch, flag)
        backend.compress(windows, appends, mapped, rings, pages, compressor, counts)

    before, results, written = (rings.clone(), pages.clone()), {}, []
    for name, run in (("copy", after_copy), ("in place", in_place)):
        rings.copy_(before[0])
        pages.copy_(before[1])
        rows.fill_(torch.nan)
        run()
        torch.cuda.synchronize()
        written.append((rings.clone(), pages.clone()))
        graph = captured(run)
        results[name] = {"device": device_us(graph), "graph": host_us(graph.replay), "eager": host_us(run)}
    assert all(torch.equal(a, b) for a, b in zip(*written, strict=True)), "other bytes"
    assert int(flag) == flags.no_flag
    return {"KiB": round(rows.numel() * rows.element_size() / 1024, 1)} | results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cute", "triton"), default="cute")
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    backend = importlib.import_module(f"kvfold_kernels.compress.{arguments.backend}")
    results, block = {}, page_locked(1 << 20)
    with torch.cuda.stream(torch.cuda.Stream()):
        for kind, ratio in (("hca", 128), ("csa", 4)):
            for given in DTYPES:
                for batch in BATCHES:
                    for at_boundary in (False, True):
                        label = f"{kind} {given} {batch} {'all' if at_boundary else 'none'}"
                        results[label] = compare(backend, block, ratio, given, batch, at_boundary)
                        print(f"{label:20}", results[label], flush=True)
    device = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "backend": arguments.backend}
    if arguments.out:
        arguments.out.write_text(json.dumps({"environment": environment() | device, "µs": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
