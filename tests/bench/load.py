"""What a worker holds, what it does when twice as much comes, and what it gains by running waiting steps together.

Decode steps of `_BATCH` requests in all compressors of preset tiny. Worker and sender are two processes; steps come
from kvfold_client.loadtest's generator, over connections of our own that do little but write bytes, so that the sender
does not stand in the way. Latency counts from the time at which a step was due.

    python -m tests.bench.load [--out FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import urllib.request
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from kvfold_client import wire
from kvfold_client.loadtest import OK, Sample, Traffic, poisson, precise_loop, summarise
from tests.bench.measure import process, save

_BATCH = 8
_SESSIONS = 96
_MAX_QUEUE = 32
_WARMUP_S, _SECONDS = 2.0, 12.0
_MOST_STEPS = 4000
_CALLERS = (1, 4, 16, 32)
_ROW_WIDTHS = {"layers.0.hca": 1024, "layers.1.csa": 2048, "layers.1.indexer": 512}


@dataclass
class _Session:
    """Requests that decode together: the next step is their idx-th."""

    name: str
    idx: int = 0


class Sender:
    """Steps of free sessions over kept connections; a step that was refused is the session's next again."""

    def __init__(self, url: str, connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> None:
        self._host = urlsplit(url).netloc
        self._connections = deque(connections)
        self._sessions = deque(_Session(f"s{i}") for i in range(_SESSIONS))
        rng = np.random.default_rng(0)
        self._tensors = [
            wire.tensor_map(
                "bf16",
                [_BATCH, width],
                (rng.standard_normal((_BATCH, width), np.float32).view(np.uint32) >> 16).astype(np.uint16).data,
                compressor=name,
            )
            for name, width in _ROW_WIDTHS.items()
        ]

    async def send(self, sample: Sample) -> None:
        connection, session = self._connections.popleft(), self._sessions.popleft()
        sample.num_tokens = _BATCH
        data = self._request(session)
        sample.begin()
        status, body = await _exchange(*connection, data)
        sample.end(OK if status == 200 else wire.decode(wire.MSGPACK, body)["code"])
        session.idx += status == 200
        self._sessions.append(session)
        self._connections.append(connection)

    def _request(self, session: _Session) -> bytes:
        at = session.idx
        message = {
            "version": 1,
            "step_id": f"{session.name}.{at}",
            "requests": [{"id": f"{session.name}.{i}", "start": at, "num_tokens": 1} for i in range(_BATCH)],
            "query_start_loc": list(range(_BATCH + 1)),
            "positions": [at] * _BATCH,
            "tensors": self._tensors,
        }
        body = wire.encode(wire.FRAME, message)
        head = f"POST /v1/step HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: {wire.FRAME}\r\n"
        return f"{head}Accept: {wire.MSGPACK}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


async def _exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> tuple[int, bytes]:
    writer.write(data)
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
    return int(head.split(b" ", 2)[1]), await reader.readexactly(length)


@contextlib.asynccontextmanager
async def _sender(url: str) -> AsyncIterator[Sender]:
    address = urlsplit(url)
    connections = [await asyncio.open_connection(address.hostname, address.port) for _ in range(_SESSIONS)]
    yield Sender(url, connections)
    for _, writer in connections:
        writer.close()


def _stats(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/v1/stats") as reply:
        return json.load(reply)


def _measure(url: str, drive: Callable[[Traffic, Sender], Any]) -> dict[str, Any]:
    """One stretch of traffic on a worker that has just started."""

    async def run() -> dict[str, Any]:
        async with _sender(url) as sender:
            await Traffic().closed_loop(4, 3.0, sender.send)  # kernels compile, memory is touched
            before = _stats(url)["totals"]
            traffic = Traffic()
            await drive(traffic, sender)
            after = _stats(url)["totals"]
            summary = summarise(traffic.samples, _WARMUP_S, _WARMUP_S + _SECONDS)
            summary["steps_a_batch"] = (after["steps"] - before["steps"]) / (after["batches"] - before["batches"])
            return summary

    with asyncio.Runner(loop_factory=precise_loop) as runner:
        return runner.run(run())


def _worker(module: str = "kvfold_service") -> contextlib.AbstractContextManager[tuple[str, int]]:
    options = {
        "manifest": "tiny",
        "weights": "random:1",
        "backend": "cpu",
        "port": 0,
        "max-requests": _SESSIONS * _BATCH,
        "pages": _SESSIONS * _BATCH * (_MOST_STEPS // 256),
        "max-body-bytes": 4 << 20,
        "staging-bytes": 64 << 20,
        "max-queue": _MAX_QUEUE,
        "lease-seconds": 600,
        "drain-seconds": 0,
        "log-level": "error",
    }
    return process("-m", module, *(f"--{name}={value}" for name, value in options.items()))


def closed(concurrency: int, module: str = "kvfold_service") -> dict[str, Any]:
    """So many callers, each with its next step as soon as it has its answer."""
    seconds = _WARMUP_S + _SECONDS
    with _worker(module) as (url, _):
        return _measure(url, lambda traffic, sender: traffic.closed_loop(concurrency, seconds, sender.send))


def offered(rate: float) -> dict[str, Any]:
    """Steps at this rate, whatever becomes of them."""
    arrivals = poisson(rate, _WARMUP_S + _SECONDS)
    with _worker() as (url, _):
        return _measure(url, lambda traffic, sender: traffic.open_loop(arrivals, sender.send, max_in_flight=_SESSIONS))


def _figures(summary: dict[str, Any]) -> dict[str, float]:
    refused = {f"{code}_share": n / summary["due"] for code, n in summary["outcomes"].items() if code != OK}
    latency = {f"{name}_ms": value for name, value in summary["latency_ms"].items() if name in ("p50", "p90", "p99")}
    latency["sender_late_p99_ms"] = summary["late_ms"]["p99"]
    named = ("offered_per_s", "throughput_per_s", "tokens_per_s", "steps_a_batch")
    return {name: round(summary[name], 2) for name in named} | latency | refused


def run() -> dict[str, Any]:
    results: dict[str, Any] = {}

    def add(name: str, summary: dict[str, Any]) -> None:
        results[name] = _figures(summary)
        print(f"{name:32}", "  ".join(f"{key} {value:.2f}" for key, value in results[name].items()), flush=True)

    for concurrency in _CALLERS:
        for name, module in (("merged", "kvfold_service"), ("one by one", "tests.bench.unmerged")):
            add(f"{concurrency} callers, {name}", closed(concurrency, module))
    most = max(result["throughput_per_s"] for result in results.values())
    add("more than it can take", offered(1.2 * most))
    capacity = results["more than it can take"]["throughput_per_s"]
    for share in (0.5, 0.8, 1.0, 2.0):
        add(f"{share:g} of {capacity:.0f} steps/s", offered(share * capacity))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    results = run()
    if given.out:
        save(given.out, results)


if __name__ == "__main__":
    main()
