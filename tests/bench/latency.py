"""Latency of a decode step of 64 requests, one hca layer, over loopback, beyond the compute.

Beyond the compute: the client's wall time less the reply's `kernel`. A bare HTTP client sends bodies made beforehand;
ours makes them, and parses the reply.
"""

from __future__ import annotations

import http.client
import statistics
import time
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from kvfold_client import Client, wire
from tests.bench.measure import median_us, percentiles, worker

_REQUESTS = 64


def _body(i: int, rows: np.ndarray) -> bytes:
    starts = np.full(_REQUESTS, i, np.int64)
    message = {
        "version": 1,
        "step_id": f"bare{i}",
        "requests": [{"id": f"bare{r}", "start": i, "num_tokens": 1} for r in range(_REQUESTS)],
        "query_start_loc": list(range(_REQUESTS + 1)),
        "positions": starts.tolist(),
        "tensors": [wire.tensor_map("bf16", list(rows.shape), rows.data, compressor="layers.0.hca")],
    }
    return wire.encode(wire.FRAME, message)


def _bare(url: str, rows: np.ndarray, steps: int, phases: list[dict[str, float]]) -> list[float]:
    """µs of each step beyond its kernels; its timings go to `phases`."""
    bodies = [_body(i, rows) for i in range(steps)]
    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.connect()
    headers = {"Content-Type": wire.FRAME, "Accept": wire.MSGPACK}
    beyond_us = []
    for body in bodies:
        began = time.perf_counter()
        connection.request("POST", "/v1/step", body, headers)
        reply = connection.getresponse()
        data = reply.read()
        took = time.perf_counter() - began
        assert reply.status == 200, data[:500]
        phases.append(wire.decode(wire.MSGPACK, data)["timings_us"])
        beyond_us.append(took * 1e6 - phases[-1]["kernel"])
    return beyond_us


def _ours(url: str, rows: np.ndarray, steps: int) -> list[float]:
    beyond_us = []
    with Client(url) as client:
        for i in range(steps):
            began = time.perf_counter()
            reply = client.step([(f"ours{r}", i, 1) for r in range(_REQUESTS)], {"layers.0.hca": rows})
            beyond_us.append((time.perf_counter() - began) * 1e6 - reply.timings_us["kernel"])
    return beyond_us


def _floor(url: str, path: str, repeats: int = 300) -> float:
    """Median µs of a call without a body: what the way there and back costs alone."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc)

    def ask() -> None:
        connection.request("GET", path)
        connection.getresponse().read()

    return median_us(ask, repeats)


def run(steps: int = 600) -> dict[str, Any]:
    rows = np.random.default_rng(0).standard_normal((_REQUESTS, 1024), np.float32).view(np.uint32) >> 16
    rows = rows.astype(np.uint16)
    results = {}
    with worker(max_requests=2 * _REQUESTS) as (url, _):
        phases: list[dict[str, float]] = []
        for name, beyond_us in (
            ("bare client", _bare(url, rows, steps, phases)),
            ("our client", _ours(url, rows, steps)),
        ):
            results[f"64 decodes, {name}"] = {f"{p}_us": v for p, v in percentiles(beyond_us[20:]).items()}
        results["64 decodes, phases"] = {f"{p}_us": statistics.median(t[p] for t in phases[20:]) for p in phases[0]}
        results["calls without a body"] = {
            "livez_us": _floor(url, "/livez"),
            "by_the_engine_us": _floor(url, "/v1/requests/unknown"),
        }
    return results
