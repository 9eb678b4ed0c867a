"""A small model, the bodies that clients send to it, and workers in hand: what the service's tests share."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest

from kvfold_client import wire
from kvfold_client.wire import FRAME
from kvfold_kernels import backends
from kvfold_kernels.backends import Backend
from kvfold_kernels.geometry import Geometry
from kvfold_service import manifest as manifests
from kvfold_service import weights as weight_files
from kvfold_service.caches import CompressorCache
from kvfold_service.calls import parse_export, parse_import
from kvfold_service.errors import ServiceError, StartError
from kvfold_service.step import StepRules, parse_step
from kvfold_service.worker import Worker

HCA, CSA, INDEXER = NAMES = ("layers.0.hca", "layers.1.csa", "layers.1.indexer")
MAX_POSITION = 256
STREAM_TOKENS = 96
SLACK = 3

SMALL: dict[str, Any] = {
    "model": "small",
    "max_position": MAX_POSITION,
    "draft_slack": SLACK,
    "compressors": [
        {"name": HCA, "kind": "hca", "ratio": 8, "head_dim": 128, "page_entries": 2, "cache_format": "fp8_ds_mla"},
        {"name": CSA, "kind": "csa", "ratio": 4, "head_dim": 128, "page_entries": 2, "cache_format": "fp8_ds_mla"},
        {"name": INDEXER, "kind": "indexer", "ratio": 4, "head_dim": 64, "page_entries": 3}
        | {"cache_format": "indexer_fp8"},
    ],
}  # fmt: skip
"""hca and csa share one pool, the indexer has its own; pages are small, so that requests cross them often."""

RATIO = {HCA: 8, CSA: 4, INDEXER: 4}
PAGE_ENTRIES = {HCA: 2, CSA: 2, INDEXER: 3}
PACKED_POOL, INDEXER_POOL = "fp8_ds_mla.128x2", "indexer_fp8.64x3"

REAL_NAMES = ("real.hca", "real.csa")
REAL: dict[str, Any] = {
    "max_position": 512,
    "compressors": [
        {"name": "real.hca", "kind": "hca", "ratio": 128, "head_dim": 128, "page_entries": 2, "cache_format": "bf16"},
        {"name": "real.csa", "kind": "csa", "ratio": 4, "head_dim": 64, "page_entries": 7, "cache_format": "fp8"},
    ],
}  # fmt: skip
"""The ratios and the slack of DeepSeek-V4."""

_STREAMS = {
    part["name"]: (Geometry(part["kind"], part["ratio"], part["head_dim"]), tokens)
    for manifest, tokens in ((SMALL, STREAM_TOKENS), (REAL, 300))
    for part in manifest["compressors"]
}
"""By compressor its geometry, and the tokens that a stream has."""


def rules(manifest: dict[str, Any] = SMALL, max_step_tokens: int = 64) -> StepRules:
    """What a worker of this manifest accepts."""
    parsed = manifests.parse(manifest, "test")
    parts = {part.name: part for part in parsed.compressors}
    widths = {name: part.geometry(0).row_width for name, part in parts.items()}
    return StepRules("c" * 32, parts, widths, parsed.max_position, max_step_tokens, parsed.draft_slack)


@functools.cache
def stream(name: str, request_id: str) -> np.ndarray:
    """fp32 rows `[tokens, row_width]` that a request has in a compressor, however they are cut into steps."""
    geometry, tokens = _STREAMS[name]
    seed = int.from_bytes(f"{name}/{request_id}".encode()[-8:], "little")
    return np.random.default_rng(seed).standard_normal((tokens, geometry.row_width), np.float32)


def bf16(rows: np.ndarray) -> np.ndarray:
    """The upper halves of fp32 rows, as bits."""
    return (rows.view(np.uint32) >> 16).astype(np.uint16)


def tensor(rows: np.ndarray, name: str | None = None, dtype: str = "fp32") -> dict[str, Any]:
    extra = {} if name is None else {"compressor": name}
    return wire.tensor_map(dtype, list(rows.shape), memoryview(np.ascontiguousarray(rows).tobytes()), **extra)


Requests = Iterable[tuple[str, int, int]]
"""(id, start, number of tokens) of each request."""


def step_body(
    requests: Requests,
    names: Iterable[str] = NAMES,
    *,
    pad: int = 0,
    wrong: int = 0,
    dtype: str = "fp32",
    **changes: Any,
) -> dict[str, Any]:
    """A step as a client sends it: every request's next rows of its streams, then `pad` rows of NaN.

    The last `wrong` tokens of each request are not its own: guesses that will be rejected.
    """
    requests = list(requests)
    positions = [start + i for _, start, length in requests for i in range(length)] + [0] * pad
    tensors = []
    for name in names:
        rows = [
            (stream(name, id)[start : end - wrong], stream(name, "wrong")[max(start, end - wrong) : end])
            for id, start, end in ((id, start, start + length) for id, start, length in requests)
        ]
        padding = np.full((pad, stream(name, "").shape[1]), np.nan, np.float32)
        together = np.concatenate([*(part for parts in rows for part in parts), padding])
        tensors.append(tensor(bf16(together) if dtype == "bf16" else together, name, dtype))
    body = {
        "version": 1,
        "step_id": "s1",
        "requests": [{"id": id, "start": start, "num_tokens": length} for id, start, length in requests],
        "query_start_loc": np.cumsum([0, *(length for _, _, length in requests)]).tolist(),
        "positions": positions,
        "tensors": tensors,
    }
    return body | changes


def make_worker(backend: Backend, manifest: dict[str, Any] = SMALL, **limits: Any) -> Worker:
    parsed = manifests.parse(manifest, "test")
    limits = {"max_requests": 4, "pages": 32, "handle_key": b"k" * 32} | limits
    return Worker(parsed, weight_files.seeded(parsed, 1), backend, **limits)


def run(worker: Worker, requests: Requests, names: Iterable[str] = NAMES, *, tenant: str = "", **changes: Any) -> Any:
    """Run a step and return its reply."""
    return worker.step(parse_step(step_body(requests, names, **changes), worker.rules), tenant)


def send(worker: Worker, body: dict[str, Any], tenant: str = "") -> dict[str, Any]:
    return worker.step(parse_step(body, worker.rules), tenant)


def feed(worker: Worker, request_id: str, lengths: Iterable[int], names: Iterable[str] = NAMES, **changes: Any) -> None:
    """The request's next tokens, so many a step, from where its first compressor here stands."""
    names = list(names)
    at = committed(worker, request_id, names[0]) if ("", request_id) in worker.requests else 0
    for length in lengths:
        run(worker, [(request_id, at, length)], names, **changes)
        at += length


def committed(worker: Worker, request_id: str, name: str) -> int:
    return worker.request(request_id)["compressors"][name]["committed"]


def export(worker: Worker, request_id: str, tenant: str = "", **wanted: Any) -> dict[str, Any]:
    """An export as a client receives it."""
    exported = worker.export(request_id, parse_export({"version": 1} | wanted), tenant)
    return wire.decode(FRAME, wire.encode(FRAME, exported))


def import_(worker: Worker, request_id: str, exported: dict[str, Any], tenant: str = "", **changes: Any) -> Any:
    """Import what `export` gave, as a client sends it; the reply."""
    body = exported | {"id": request_id} | changes
    return worker.import_(parse_import(body, worker.rules, worker.entry_bytes), tenant)


def rows_of(tensor: dict[str, Any]) -> np.ndarray:
    """A received tensor; bf16 as bits."""
    dtype = {"bf16": np.uint16, "fp32": np.float32, "uint8": np.uint8}[tensor["dtype"]]
    return np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])


def open_positions(name: str, num_tokens: int) -> range:
    """Positions whose rows later windows still need, by the contract's table."""
    geometry, _ = _STREAMS[name]
    whole = num_tokens // geometry.ratio * geometry.ratio
    return range(whole if geometry.kind == "hca" else max(0, whole - geometry.ratio), num_tokens)


def parts_of(reply: dict[str, Any], request_id: str) -> dict[str, Any]:
    """A request's compressors in a step's reply."""
    return next(request["compressors"] for request in reply["requests"] if request["id"] == request_id)


def entries_of(worker: Worker, request_id: str, name: str, tenant: str = "") -> np.ndarray:
    """Page-free rows `[num_entries, entry_bytes]` of a request, read as a client does: by its handles."""
    part = worker.request(request_id, tenant)["compressors"][name]
    rows = [page_entries(worker.caches.by_name[name], page) for page in read(worker, part["pages"], tenant)]
    found = np.concatenate(rows) if rows else np.empty((0, worker.entry_bytes[name]), np.uint8)
    assert len(found) == part["num_entries"] - part.get("first_entry", 0)
    return found


@functools.cache
def alone(backend: Backend, request_id: str, name: str) -> np.ndarray:
    """All entries of a request's stream, from one step of nothing else."""
    worker = make_worker(backend, SMALL if name in NAMES else REAL, pages=64, max_requests=1)
    feed(worker, request_id, [len(stream(name, request_id))], [name])
    return entries_of(worker, request_id, name)


def assert_entries(worker: Worker, request_id: str, name: str, tenant: str = "", of: str | None = None) -> None:
    """What can be read of a request is what one step of its whole stream, or that of `of`, gives, as far as it goes."""
    part = worker.request(request_id, tenant)["compressors"][name]
    expected = alone(worker.backend, of or request_id, name)[part.get("first_entry", 0) : part["num_entries"]]
    np.testing.assert_array_equal(entries_of(worker, request_id, name, tenant), expected)


def read(worker: Worker, handles: list[str], tenant: str = "") -> list[dict[str, Any]]:
    return worker.read_pages(handles, tenant)["pages"]


def page_entries(cache: CompressorCache, page: dict[str, Any]) -> np.ndarray:
    """The valid entries of a page of a reply, as page-free rows, without those not held; all else must be zero."""
    layout, held = cache.group.layout, slice(page.get("first_entry", 0), page["num_entries"])
    data = np.frombuffer(page["data"], np.uint8)
    assert page["shape"] == [layout.page_bytes] == [len(data)]
    values = data[: layout.scale_offset].reshape(layout.entries, -1)
    scales = data[layout.scale_offset :][: layout.entries * layout.format.scale_bytes].reshape(layout.entries, -1)
    entries = np.concatenate([values, scales], axis=1)
    assert not entries[: held.start].any()
    assert not entries[held.stop :].any()
    assert not data[layout.entries * layout.format.entry_bytes :].any()
    return entries[held]


@contextmanager
def refused(code: str, **details: Any) -> Iterator[pytest.ExceptionInfo[ServiceError]]:
    """The block raises a ServiceError of this code, with these details among its own."""
    with pytest.raises(ServiceError) as caught:
        yield caught
    assert caught.value.code == code, caught.value
    assert caught.value.details | details == caught.value.details
    assert caught.value.message


@contextmanager
def no_start(*words: str) -> Iterator[None]:
    """The block raises a StartError of one sentence that has these words."""
    with pytest.raises(StartError) as caught:
        yield
    sentence = str(caught.value)
    assert "\n" not in sentence.strip()
    assert not [word for word in words if word not in sentence], sentence


def snapshot(worker: Worker) -> dict[str, Any]:
    """All that a later call can see or build on: requests, ring rows, pages, handles, and the bytes they read."""
    caches, state = worker.caches, {}
    for (tenant, request_id), request in worker.requests.items():
        told = worker.request(request_id, tenant)
        for name, part in told["compressors"].items():
            cache, slot = caches.by_name[name], request.slot
            committed, live, ring = (int(x) for x in cache.state[:, slot])
            index = (ring + np.arange(committed - live)) % cache.compressor.geometry.ring_rows
            state[tenant, request_id, name] = {
                "told": part,
                "state": (committed, live, ring, int(cache.drafts[slot])),
                "live_rows": cache.rings[slot, index].numpy().tobytes(),
                "pages": cache.page_table[slot, : cache.num_pages[slot]].tolist(),
                "read": [bytes(page["data"]) for page in read(worker, part["pages"], tenant)],
            }
    pools = [
        (pool.num_free, pool.owner_slot.tolist(), pool.owner_compressor.tolist(), pool.owner_page_idx.tolist())
        for pool in (group.pool for group in caches.groups)
    ]
    slots = {key: request.slot for key, request in worker.requests.items()}
    return {"state": state, "pools": pools, "slots": slots, "free": set(worker.free_slots), **worker.totals}


def whole_workers(backend: Backend) -> Iterator[Callable[..., Worker]]:
    """For `pytest.fixture`: makes workers; all of them must be whole when the test ends."""
    workers: list[Worker] = []

    def make(backend: Backend = backend, *args: Any, **limits: Any) -> Worker:
        workers.append(make_worker(backend, *args, **limits))
        return workers[-1]

    yield make
    for worker in workers:
        worker.check_integrity()


def changed(backend: Backend, compress: Callable[..., int]) -> Backend:
    """The backend with `compress(real compress, *arguments)` in place of its own."""
    real = backend.compress
    return Backend(backend.name, backend.device, lambda *args: compress(real, *args), backend.find_non_finite)


class Gate:
    """A backend whose kernels wait until they may go on."""

    def __init__(self, backend: str = "reference") -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self.backend = changed(backends.load(backend), self)

    def __call__(self, real: Callable[..., int], *arguments: Any) -> int:
        self.entered.set()
        assert self.go.wait(30)
        return real(*arguments)

    async def running(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 30)


class Process:
    """`python -m kvfold_service` on a free port; it does not wait long for its pages to be read."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        manifest: dict[str, Any] = SMALL,
        backend: str = "cpu",
        module: str = "kvfold_service",
        log: str | None = None,
        **environment: str,
    ) -> None:
        (folder / "small.json").write_text(json.dumps(manifest))
        command = [sys.executable, "-m", module, "--manifest", str(folder / "small.json")]
        command += ["--weights", "random:1", "--backend", backend, "--port", "0", *flags]
        self.log = folder / "log" if log is None else Path(log)
        environment = {**os.environ, "KVFOLD_DRAIN_SECONDS": "1", **environment}
        with self.log.open("a") as file:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment)
        self.ready_line = self.process.stdout.readline()
        found = re.fullmatch(
            r"ready (https?://127\.0\.0\.1:(\d+)) backend=(\w+) compat=([0-9a-f]+)(?: metrics=(\S+))?\n",
            self.ready_line,
        )
        assert found, (self.ready_line, log or self.log.read_text())
        self.url, self.port, self.backend, self.compat, self.metrics = found[1], int(found[2]), *found.group(3, 4, 5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Whatever happened, it does not live on."""
        self.process.kill()
        self.wait()

    def signal(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        """SIGSTOP, and until each of its threads has stopped: the signal alone leaves them some time."""
        self.signal(signal.SIGSTOP)
        for stat in Path(f"/proc/{self.process.pid}/task").glob("*/stat"):
            while stat.read_text().rpartition(")")[2].split()[0] != "T":
                time.sleep(0.001)

    def kill(self) -> None:
        """SIGKILL, and until it is gone."""
        self.process.kill()
        self.process.wait(30)

    def wait(self) -> int:
        with self.process:
            return self.process.wait(30)

    def end(self) -> int:
        """Exit code after SIGTERM."""
        self.signal()
        return self.wait()
