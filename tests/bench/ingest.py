"""A 64 MiB frame over loopback: the worker, beside a bare uvicorn handler that streams the body into a pool.

Both fingerprint the body. The worker's time is the reply's latency less its plan, copy and kernel. Runs alternate, and
who goes first, too.
"""

from __future__ import annotations

import http.client
import mmap
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from kvfold_client import wire
from tests.bench.measure import process, worker

_BYTES = 64 << 20
_ROWS = _BYTES // 4096  # hca rows in fp32


def serve_bare() -> None:
    """The baseline's process."""
    import uvicorn
    import xxhash

    pool = memoryview(mmap.mmap(-1, 2 * _BYTES))

    async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
        end, more, fingerprint = 0, True, xxhash.xxh3_128()
        while more:
            message = await receive()
            chunk, more = message.get("body", b""), message.get("more_body", False)
            pool[end : end + len(chunk)] = chunk
            end += len(chunk)
            fingerprint.update(chunk)
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": fingerprint.digest()[:0]})

    listener = socket.create_server(("127.0.0.1", 0))
    print(f"ready http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, http="httptools", loop="uvloop", log_level="warning", access_log=False, lifespan="off")
    uvicorn.Server(config).run([listener])


class _Sender:
    """One kept connection that sends a body from memory, in slices, without a copy."""

    def __init__(self, url: str) -> None:
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc)

    def post(self, path: str, parts: list[bytes | memoryview]) -> tuple[float, bytes]:
        """Seconds and the reply's body."""
        headers = {"Content-Type": wire.FRAME, "Accept": wire.MSGPACK, "Content-Length": str(sum(map(len, parts)))}
        began = time.perf_counter()
        self._connection.request("POST", path, iter(parts), headers)
        reply = self._connection.getresponse()
        body = reply.read()
        took = time.perf_counter() - began
        assert reply.status == 200, body[:500]
        return took, body


def _frame(request: str, rows: np.ndarray) -> list[bytes | memoryview]:
    message = {
        "version": 1,
        "step_id": request,
        "requests": [{"id": request, "start": 0, "num_tokens": _ROWS}],
        "query_start_loc": [0, _ROWS],
        "positions": wire.tensor_map("int32", [_ROWS], np.arange(_ROWS, dtype=np.int32).data),
        "tensors": [wire.tensor_map("fp32", list(rows.shape), rows.data, compressor="layers.0.hca")],
    }
    return wire.encode_parts(wire.FRAME, message)


def _peak_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def run(repeats: int = 15) -> dict[str, Any]:
    rows = np.random.default_rng(0).standard_normal((_ROWS, 1024), np.float32)
    bare_s, ours_s = [], []
    options = {"max_body_bytes": 80 << 20, "max_step_tokens": _ROWS, "manifest": _manifest()}
    with process("-m", "tests.bench.ingest", "bare") as (bare, _), worker(**options) as (url, pid):
        senders = _Sender(bare), _Sender(url)
        for i in range(repeats + 2):
            if i == 2:  # staging, pages and caches have been touched
                Path(f"/proc/{pid}/clear_refs").write_text("5")
                peak_before = _peak_kib(pid)
            parts = _frame(f"r{i}", rows)
            for bare_turn in (i % 2 == 0, i % 2 == 1):
                took, body = senders[0 if bare_turn else 1].post("/" if bare_turn else "/v1/step", parts)
                if bare_turn:
                    bare_s.append(took)
                else:
                    timings = wire.decode(wire.MSGPACK, body)["timings_us"]
                    ours_s.append(took - sum(timings[phase] for phase in ("plan", "copy", "kernel")) * 1e-6)
            release = http.client.HTTPConnection(urlsplit(url).netloc)
            release.request("DELETE", f"/v1/requests/r{i}")
            assert release.getresponse().status == 204
        extra_kib = _peak_kib(pid) - peak_before
    bare_ms, ours_ms = (statistics.median(times[2:]) * 1000 for times in (bare_s, ours_s))
    ratio = ours_ms / bare_ms
    return {"64 MiB frame": {"bare_ms": bare_ms, "ours_ms": ours_ms, "ratio": ratio, "extra_mib": extra_kib / 1024}}


def _manifest() -> str:
    """A hca compressor with room for the rows."""
    import json
    import tempfile

    compressor = {"name": "layers.0.hca", "kind": "hca", "ratio": 128, "head_dim": 512, "cache_format": "fp8_ds_mla"}
    body = {"model": "bench", "max_position": 1 << 17, "compressors": [compressor]}
    with tempfile.NamedTemporaryFile("w", suffix=".json", delete=False) as file:
        json.dump(body, file)
    return file.name


if __name__ == "__main__" and sys.argv[1:] == ["bare"]:
    serve_bare()
