"""What a step costs the host of a GPU worker, by number of compressors: a device that does nothing takes its place.

    python -m tests.bench.bench_runner [--out FILE.json]

step: the whole call; plan: its plans; run: the runner, which sends rows and plans and launches (an empty Python
function a kernel) or replays (an empty function); copies: of rows. Medians of the thread's processor time in µs, one
token a request, compressors of deepseek-v4-pro in order, bf16.
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from kvfold_client import calls, wire
from kvfold_kernels import backends
from kvfold_kernels.backends import Backend, DeviceFlags
from kvfold_service import manifest as manifests
from kvfold_service import weights, works
from kvfold_service.device import DeviceRunner
from kvfold_service.manifest import PRESETS
from kvfold_service.staging import Staging
from kvfold_service.step import parse_step
from kvfold_service.worker import Worker
from tests.bench.measure import save
from tests.fake_cuda import NO_FLAG, FakeCuda

NUM_COMPRESSORS = (1, 2, 8, 32, 64, 91)
NUM_REQUESTS = (1, 64)
STEPS, WARM = 40, 10


class IdleGraph:
    def replay(self) -> None: ...

    def reset(self) -> None: ...


class IdleCuda(FakeCuda):
    """Takes everything, does nothing."""

    def put(self, operation: Callable[[], object]) -> None: ...

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None: ...

    def synchronize(self) -> None: ...

    def send(self, target: torch.Tensor, address: int) -> None:
        self.sends.append((0, 1))

    def send_pieces(self, *piece: Any) -> None:
        self.sends.append((0, 1))

    def capture(self, enqueue: Callable[[], Any]) -> tuple[Any, Any]:
        return IdleGraph(), enqueue()


def idle_backend() -> Backend:
    flags = DeviceFlags(lambda *operands: None, NO_FLAG)
    return Backend("idle", "cpu", lambda *operands: 1, lambda *operands: None, flags, takes_counts=True)


def idle_worker(num_compressors: int, graphs: bool, staging: Staging) -> tuple[Worker, IdleCuda]:
    parts = [part | {"input_dtype": "bf16"} for part in PRESETS["deepseek-v4-pro"]["compressors"][:num_compressors]]
    body = PRESETS["deepseek-v4-pro"] | {"max_position": 1 << 14, "compressors": parts}
    manifest, cuda = manifests.parse(body, "bench"), IdleCuda()
    worker = Worker(manifest, weights.seeded(manifest, 1), backends.load("cpu"), max_requests=64, pages=128)
    runner = DeviceRunner(idle_backend(), worker.caches, 256 << 20, 65536, graphs=graphs, cuda=cuda)
    runner.lock(staging.block)
    runner._plans._flags_back.fill_(NO_FLAG)
    worker.runner = runner
    return worker, cuda


def measure(num_compressors: int, num_requests: int, graphs: bool, staging: Staging) -> dict[str, float]:
    worker, cuda = idle_worker(num_compressors, graphs, staging)
    widths = worker.rules.row_widths
    rows = {name: torch.zeros(num_requests, width, dtype=torch.bfloat16) for name, width in widths.items()}
    times: dict[str, list[float]] = {"step": [], "plan": [], "run": []}

    def timed(phase: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            began = time.thread_time_ns()
            result = call(*args)
            times[phase].append((time.thread_time_ns() - began) / 1000)
            return result

        return run

    worker.runner.run = timed("run", worker.runner.run)  # type: ignore[method-assign]
    works.works, planned = timed("plan", works.works), works.works
    step_of = timed("step", worker.step)
    for n in range(STEPS):
        call = calls.step([(f"r{i}", n, 1) for i in range(num_requests)], rows, step_id=f"s{n}")
        frame = wire.encode(wire.FRAME, dict(call.message or {}))
        extent = staging.lend(len(frame))
        assert extent is not None
        extent.view[: len(frame)] = frame
        step = parse_step(wire.decode(wire.FRAME, extent.view[: len(frame)]), worker.rules)
        step_of(step)
        staging.give_back(extent)
    works.works = planned
    result = {name: round(statistics.median(us[WARM:]), 1) for name, us in times.items()}
    return result | {"copies": len(cuda.sends) / STEPS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    results, staging = {}, Staging(64 << 20)
    for num_compressors in NUM_COMPRESSORS:
        for num_requests in NUM_REQUESTS:
            for graphs in (False, True):
                label = f"{num_compressors} compressors, {num_requests} x 1, graphs {'auto' if graphs else 'off'}"
                results[label] = measure(num_compressors, num_requests, graphs, staging)
                print(f"{label:42}", results[label], flush=True)
    if arguments.out:
        save(arguments.out, results)


if __name__ == "__main__":
    main()
