"""A worker on a GPU, in this process and over loopback: bytes, allocations, synchronisations, latency by phase.

python tests/gpu/check_worker.py [--backend NAME] [--out FILE]      (PYTHONPATH: clients, service, kernels and the root)
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvfold_client import Client
from kvfold_kernels import backends
from kvfold_service import canary, execute, weights
from kvfold_service.errors import ServiceError
from kvfold_service.manifest import PRESETS, parse
from kvfold_service.step import Step, parse_step
from kvfold_service.worker import Worker
from tests.bench.measure import environment, percentiles, worker

BODY = PRESETS["tiny"] | {"max_position": 1 << 17}
NAMES = [part["name"] for part in BODY["compressors"]]
CASES = ((1, 1), (64, 1), (256, 1), (1, 8192))
"""(requests, tokens of each)."""


def rows_of(name: str, num_tokens: int, seed: int) -> np.ndarray:
    width = {"layers.0.hca": 1024, "layers.1.csa": 2048, "layers.1.indexer": 512}[name]
    rows = np.random.default_rng([seed, width]).standard_normal((num_tokens, width), np.float32)
    return (rows.view(np.uint32) >> 16).astype(np.uint16)


def make_step(subject: Worker, requests: list[tuple[str, int, int]], tensors: dict[str, np.ndarray], n: int) -> Step:
    from kvfold_client.calls import step as message

    body = dict(message(requests, tensors, step_id=f"s{n}").message or {})
    for tensor in body["tensors"]:
        tensor["data"] = memoryview(bytearray(tensor["data"]))
    return parse_step(body, subject.rules)


def feed(subject: Worker, request: str, streams: dict[str, np.ndarray], lengths: list[int]) -> None:
    start = 0
    for n, length in enumerate(lengths):
        part = {name: rows[start : start + length] for name, rows in streams.items()}
        subject.step(make_step(subject, [(request, start, length)], part, n))
        start += length


def entries(subject: Worker, request: str) -> dict[str, torch.Tensor]:
    slot = subject.requests["", request].slot
    caches = subject.caches.compressors
    return {cache.name: cache.page_free_rows(slot, 0, cache.num_entries(slot)) for cache in caches}


def check_bytes(subject: Worker) -> None:
    canary.prove(subject)
    total = 1400
    streams = {name: rows_of(name, total, 1) for name in NAMES}
    feed(subject, "whole", streams, [total])
    random = np.random.default_rng(3)
    chunks: list[int] = []
    while (left := total - sum(chunks)) > 0:
        chunks.append(min(left, int(random.choice([1, 2, 3, 7, 64, 127, 128, 129, 300]))))
    feed(subject, "chunked", streams, chunks)
    feed(subject, "single", {name: rows[:300] for name, rows in streams.items()}, [1] * 300)
    whole, chunked, single = (entries(subject, request) for request in ("whole", "chunked", "single"))
    for name in NAMES:
        assert torch.equal(whole[name], chunked[name]), f"{name}: chunks change bytes"
        assert torch.equal(whole[name][: len(single[name])], single[name]), f"{name}: single tokens change bytes"
    wanted = [
        execute.Wanted(
            make_step(subject, [(f"m{i}", 0, 200 + i)], {n: s[: 200 + i] for n, s in streams.items()}, i), ""
        )
        for i in range(8)
    ]
    for outcome in execute.steps(subject, wanted):
        assert isinstance(outcome, dict), outcome
    for i in range(8):
        for name, rows in entries(subject, f"m{i}").items():
            assert torch.equal(rows, whole[name][: len(rows)]), f"{name}: merging changes bytes"
    spoilt = {name: rows[:50].copy() for name, rows in streams.items()}
    spoilt["layers.1.csa"][31, 77] = 0x7FC0
    (refusal,) = execute.steps(subject, [execute.Wanted(make_step(subject, [("bad", 0, 50)], spoilt, 0), "")])
    assert isinstance(refusal, ServiceError), "a NaN was taken"
    assert (refusal.code, refusal.details["row"], refusal.details["column"]) == ("non_finite", 31, 77)
    for request in ("whole", "chunked", "single", *(f"m{i}" for i in range(8))):
        subject.release(request)
    subject.check_integrity()


def count_and_time(subject: Worker) -> dict[str, Any]:
    """Steady state: device allocations and synchronisations a step, and medians by phase."""
    results = {}
    synchronised = 0
    original = torch.cuda.Event.synchronize

    def counted(event: torch.cuda.Event) -> None:
        nonlocal synchronised
        synchronised += 1
        original(event)

    for num_requests, num_tokens in CASES:
        for names in (["layers.0.hca"], ["layers.1.csa"], NAMES):
            repeats = 150 if num_tokens == 1 else 8
            requests = [f"t{i}" for i in range(num_requests)]
            tensors = {name: rows_of(name, num_requests * num_tokens, 5) for name in names}
            made = [
                make_step(subject, [(r, n * num_tokens, num_tokens) for r in requests], tensors, n)
                for n in range(repeats)
            ]
            times: dict[str, list[float]] = {"wall": [], "plan": [], "copy": [], "kernel": []}
            torch.cuda.Event.synchronize = counted  # type: ignore[method-assign]
            for n, step in enumerate(made):
                if n == repeats // 2:
                    before, synchronised = torch.cuda.memory_stats()["allocation.all.allocated"], 0
                    torch.cuda.set_sync_debug_mode("error")
                began = time.perf_counter()
                reply = subject.step(step)
                times["wall"].append((time.perf_counter() - began) * 1e6)
                for phase, us in reply["timings_us"].items():
                    times[phase].append(us)
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.Event.synchronize = original  # type: ignore[method-assign]
            allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
            steps = repeats - repeats // 2
            label = f"{num_requests} x {num_tokens} {'+'.join(name.rpartition('.')[2] for name in names)}"
            results[label] = {phase: round(statistics.median(us[repeats // 2 :]), 1) for phase, us in times.items()}
            results[label] |= {"allocations": allocations, "synchronisations_a_step": synchronised / steps}
            results[label] |= {"launches": reply["launches"]}
            print(f"in process  {label:24}", results[label], flush=True)
            assert allocations == 0, "a step allocates device memory"
            assert synchronised == steps, "a step synchronises more than once"
            for request in requests:
                subject.release(request)
    return results


def over_loopback(backend: str) -> dict[str, Any]:
    results = {}
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(BODY, file)
        file.flush()
        began = time.perf_counter()
        with (
            worker(backend=backend, manifest=file.name, max_requests=300, pages=20000) as (url, _),
            Client(url) as client,
        ):
            results["seconds to ready"] = round(time.perf_counter() - began, 2)
            for num_requests, num_tokens in CASES:
                for name in ("layers.0.hca", "layers.1.csa"):
                    rows = rows_of(name, num_requests * num_tokens, 5)
                    wall, phases = [], []
                    repeats = 150 if num_tokens == 1 else 10
                    for n in range(repeats):
                        requests = [(f"{name}{i}", n * num_tokens, num_tokens) for i in range(num_requests)]
                        began = time.perf_counter()
                        reply = client.step(requests, {name: rows})
                        wall.append((time.perf_counter() - began) * 1e6)
                        phases.append(reply.timings_us)
                    label = f"{num_requests} x {num_tokens} {name}"
                    warm = phases[repeats // 3 :]
                    results[label] = percentiles(wall[repeats // 3 :]) | {
                        phase: round(statistics.median(t[phase] for t in warm), 1) for phase in warm[0]
                    }
                    print(f"loopback    {label:24}", results[label], flush=True)
                    for i in range(num_requests):
                        client.release(f"{name}{i}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    backend = backends.load(arguments.backend)
    assert backend.device == "cuda", f"{backend.name} does not run on a GPU"
    manifest = parse(BODY, "check")
    torch.set_grad_enabled(False)
    with torch.cuda.stream(torch.cuda.Stream()):
        subject = Worker(manifest, weights.seeded(manifest, 1), backend, max_requests=300, pages=20000)
        check_bytes(subject)
        print(f"{backend.name} on {torch.cuda.get_device_name()}: bytes agree", flush=True)
        results: dict[str, Any] = {"in process": count_and_time(subject)}
    results["loopback"] = over_loopback(backend.name)
    device = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "backend": backend.name}
    if arguments.out:
        arguments.out.write_text(
            json.dumps({"environment": environment() | device, "results": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
