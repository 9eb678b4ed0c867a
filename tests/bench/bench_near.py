"""What a worker's small decode steps take by how few rows the kernels read where the host has them (`rows.NEAR_BYTES`).

    python -m tests.bench.bench_near [--backend cute|triton] [--out FILE.json]

In process, µs by phase as check_worker has them, one token a request; the limits take turns, twice.
"""

from __future__ import annotations

import argparse
import json
import pathlib
from unittest import mock

import torch

from kvfold_kernels import backends
from tests.bench.measure import environment
from tests.gpu import worker_latency as w
from tests.gpu.workers import Room, make

LIMITS = (0, 64 << 10, 256 << 10)
REQUESTS = (1, 8, 16, 32, 64)
REPEATS = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("cute", "triton"), default="cute")
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.set_grad_enabled(False)
    backend, room, rows = backends.load(arguments.backend), Room(1 << 30), []
    for near_bytes in LIMITS * 2:
        for graphs in (True, False):
            for dtype in ("fp32", "bf16"):
                with mock.patch("kvfold_service.rows.NEAR_BYTES", near_bytes):
                    worker = make(backend, room, graphs, w.body_of(dtype))
                for requests in REQUESTS:
                    for layer, names in w.LAYERS.items():
                        case = {"near_bytes": near_bytes, "graphs": graphs, "requests": requests}
                        case |= {"layer": layer, "dtype": dtype}
                        steps = w.steps_of(worker, room, requests, 1, names, dtype, REPEATS)
                        times = w.in_process(worker, room, f"{case}", steps, requests)
                        rows.append(case | {phase: times[phase] for phase in ("wall", "plan", "copy", "kernel")})
                del worker
    if arguments.out:
        device = {"gpu": torch.cuda.get_device_name(), "backend": backend.name}
        lines = ",\n".join(json.dumps(row) for row in rows)
        head = json.dumps(environment() | device)
        arguments.out.write_text(f'{{"environment": {head},\n"µs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
