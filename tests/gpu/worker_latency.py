"""What a step costs on a GPU, by phase: in this process, and over loopback by a process of its own."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import statistics
import tempfile
import time
from typing import Any

import numpy as np
import torch

from kvfold_client import Client, calls, wire
from kvfold_kernels import backends
from kvfold_service.manifest import PRESETS
from kvfold_service.step import parse_step
from kvfold_service.worker import Worker
from tests.bench.measure import percentiles
from tests.bench.measure import worker as worker_process
from tests.gpu.workers import BODY, CSA, HCA, INDEXER, NAMES, Room, counted, make
from tests.walk import Part, Walk, entries

CASES = ((1, 1), (64, 1), (256, 1), (1, 8192))
"""(requests, tokens of each)."""
LAYERS = {"hca": [HCA], "csa": [CSA, INDEXER]}


def body_of(dtype: str) -> dict[str, Any]:
    """A manifest of one hca and one csa layer; bf16: rings are bf16, too."""
    compressors = [part | {"input_dtype": dtype} for part in BODY["compressors"]]
    return BODY | {"compressors": compressors}


@functools.lru_cache(maxsize=4)
def rows_of(width: int, num_tokens: int, dtype: str) -> np.ndarray:
    rows = np.random.default_rng(width).standard_normal((num_tokens, width), np.float32)
    return rows if dtype == "fp32" else (rows.view(np.uint32) >> 16).astype(np.uint16)


def steps_of(
    worker: Worker, room: Room, num_requests: int, num_tokens: int, names: list[str], dtype: str, repeats: int
) -> list[Any]:
    """Steps one behind the other, decoded, in staging."""
    room.clear()
    widths, made = worker.rules.row_widths, []
    tensors = {name: rows_of(widths[name], num_requests * num_tokens, dtype) for name in names}
    for n in range(repeats):
        requests = [(f"t{i}", n * num_tokens, num_tokens) for i in range(num_requests)]
        message = dict(calls.step(requests, tensors, step_id=f"s{n}").message or {})
        frame = wire.encode(wire.FRAME, message)
        assert room.staging.num_lent + len(frame) < room.staging.num_bytes, "the steps before would be overwritten"
        made.append(parse_step(wire.decode(wire.FRAME, room(frame)), worker.rules))
    return made


def in_process(worker: Worker, room: Room, label: str, steps: list[Any], num_requests: int) -> dict[str, Any]:
    """Medians by phase in the steady state, which must allocate nothing on the device and wait once a step."""
    times: dict[str, list[float]] = {"wall": [], "plan": [], "copy": [], "kernel": []}
    warm, reply = len(steps) // 2, {}
    with counted(torch.cuda.Event, "synchronize") as waits, counted(torch.cuda.Stream, "synchronize") as others:
        for n, step in enumerate(steps):
            if n == warm:
                before = torch.cuda.memory_stats()["allocation.all.allocated"]
                waits[0] = others[0] = 0
                torch.cuda.set_sync_debug_mode("error")
            began = time.perf_counter()
            reply = worker.step(step)
            times["wall"].append((time.perf_counter() - began) * 1e6)
            for phase in ("plan", "copy", "kernel"):
                times[phase].append(reply["timings_us"][phase])
    torch.cuda.set_sync_debug_mode("default")
    allocations = torch.cuda.memory_stats()["allocation.all.allocated"] - before
    result: dict[str, Any] = {phase: round(statistics.median(us[warm:]), 1) for phase, us in times.items()}
    result |= {"launches": reply["launches"], "allocations": allocations}
    result |= {"synchronisations_a_step": (waits[0] + others[0]) / (len(steps) - warm)}
    print(f"  {label:34}", result, flush=True)
    assert allocations == 0, "a step allocates device memory"
    assert waits[0] + others[0] == len(steps) - warm, "a step synchronises more than once"
    for i in range(num_requests):
        worker.release(f"t{i}")
    room.clear()
    return result


def all_in_process(backend: backends.Backend, room: Room, graphs: bool) -> dict[str, Any]:
    results = {}
    for dtype in ("fp32", "bf16"):
        worker = make(backend, room, graphs, body_of(dtype))
        for num_requests, num_tokens in CASES:
            for layer, names in LAYERS.items():
                repeats = 60 if num_tokens == 1 else 4
                steps = steps_of(worker, room, num_requests, num_tokens, names, dtype, repeats)
                label = f"{num_requests} x {num_tokens} {layer} {dtype}"
                results[label] = in_process(worker, room, label, steps, num_requests)
        del worker
    return results | whole_model(backend, room, graphs)


def whole_model(backend: backends.Backend, room: Room, graphs: bool) -> dict[str, Any]:
    """A step that carries every compressor of deepseek-v4-pro, bf16."""
    compressors = [part | {"input_dtype": "bf16"} for part in PRESETS["deepseek-v4-pro"]["compressors"]]
    body = PRESETS["deepseek-v4-pro"] | {"max_position": 1 << 14, "compressors": compressors}
    worker = make(backend, room, graphs, body, max_requests=64, pages=128)
    names, results = [part["name"] for part in compressors], {}
    for num_requests in (1, 64):
        steps = steps_of(worker, room, num_requests, 1, names, "bf16", 16)
        label = f"{num_requests} x 1, {len(names)} compressors"
        results[label] = in_process(worker, room, label, steps, num_requests)
    return results


def over_loopback(backend: str, graphs: str, dtype: str, golden: Walk) -> dict[str, Any]:
    """The same bits over HTTP, and latency by phase, of `kvfold serve`."""
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json"))
        json.dump(body_of(dtype), file)
        file.flush()
        began = time.perf_counter()
        limits = {"max_requests": 300, "pages": 20000, "max_body_bytes": 256 << 20, "graphs": graphs}
        url, _ = stack.enter_context(worker_process(backend=backend, manifest=file.name, **limits))
        results["seconds to ready"] = round(time.perf_counter() - began, 2)
        client = stack.enter_context(Client(url))
        check_http(client, golden, dtype)
        for num_requests, num_tokens in CASES:
            for layer, names in LAYERS.items():
                label = f"{num_requests} x {num_tokens} {layer}"
                results[label] = latency(client, golden.worker, num_requests, num_tokens, names, dtype)
                print(f"  graphs {graphs:4} {dtype} {label:24}", results[label], flush=True)
    return results


def check_http(client: Client, golden: Walk, dtype: str) -> None:
    """What a client exports has the bits that one step in this process gives."""
    start, streams = 0, golden.streams
    for length in (1, 1, 1, 1, 130, *[1] * 120, 2, 3, 40):
        rows = {name: streams.rows(name, "http", start, start + length) for name in NAMES}
        if dtype == "bf16":
            rows = {name: (part.view(np.uint32) >> 16).astype(np.uint16) for name, part in rows.items()}
        client.step([("http", start, length)], rows)
        start += length
    golden.run(golden.message([Part("http", 0, start)], NAMES))
    exported = client.export("http")
    for name in NAMES:
        expected = entries(golden.worker, "http", name).numpy()
        assert np.array_equal(exported.compressors[name].entries, expected), f"{name}: other bits over HTTP"
    client.release("http")
    golden.worker.release("http")


def latency(
    client: Client, worker: Worker, num_requests: int, num_tokens: int, names: list[str], dtype: str
) -> dict[str, Any]:
    """µs of the whole call, and medians by phase."""
    rows = {name: rows_of(worker.rules.row_widths[name], num_requests * num_tokens, dtype) for name in names}
    gc.collect()
    gc.freeze()  # this process is the client here; looking through all that it holds takes a tenth of a second
    wall, phases, repeats = [], [], 100 if num_tokens == 1 else 6
    for n in range(repeats):
        requests = [(f"t{i}", n * num_tokens, num_tokens) for i in range(num_requests)]
        began = time.perf_counter()
        reply = client.step(requests, rows)
        wall.append((time.perf_counter() - began) * 1e6)
        phases.append(reply.timings_us)
    for i in range(num_requests):
        client.release(f"t{i}")
    warm = phases[repeats // 3 :]
    by_phase = {phase: round(statistics.median(times[phase] for times in warm), 1) for phase in warm[0]}
    return percentiles(wall[repeats // 3 :]) | by_phase
