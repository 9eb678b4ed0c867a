"""A random walk over a worker's calls: requests come and go, in batches of other sizes, phases and dtypes each time.

Whatever happened on the way, a request's entries must be those that its stream gives in one step of nothing else.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kvfold_client import calls, wire
from kvfold_client.wire import FRAME, MSGPACK
from kvfold_service import execute
from kvfold_service.calls import parse_export, parse_import
from kvfold_service.errors import ServiceError
from kvfold_service.reserve import Wanted
from kvfold_service.step import parse_step
from kvfold_service.worker import Worker

_ROWS = 1009
Place = Callable[[bytes], memoryview]


class Streams:
    """Rows of any request at any position: bf16 values, so that a step's dtype changes nothing."""

    def __init__(self, widths: Mapping[str, int], seed: int = 1) -> None:
        random = np.random.default_rng(seed)
        self._rows = {
            name: (random.standard_normal((_ROWS, width), np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
            for name, width in widths.items()
        }

    def rows(self, name: str, request: str, start: int, end: int) -> np.ndarray:
        """fp32 `[end − start, row_width]`."""
        return self._rows[name][(np.arange(start, end) * 7 + zlib.crc32(request.encode())) % _ROWS]


def entries(worker: Worker, request: str, name: str) -> torch.Tensor:
    """All entries of a request, page-free rows."""
    cache, slot = worker.caches.by_name[name], worker.requests["", request].slot
    return cache.page_free_rows(slot, int(cache.first_entry[slot]), cache.num_entries(slot))


@dataclass
class Part:
    """A request's part of a step: `wrong` of its tokens are another stream's, drafts that will be rejected."""

    request: str
    start: int
    length: int
    wrong: int = 0


class Walk:
    """golden: a worker that gives the entries to compare with. A request's id starts with the number of the set of
    compressors that it has rows for."""

    def __init__(
        self, worker: Worker, golden: Worker | None, sets: list[list[str]], seed: int, place: Place = memoryview
    ) -> None:
        self.worker, self._golden, self._sets, self._place = worker, golden or worker, sets, place
        self.streams = Streams(worker.rules.row_widths)
        self._random = np.random.default_rng(seed)
        self.lengths: dict[str, int] = {}
        """Tokens of each request."""
        self._num = self._made = 0

    def message(
        self, parts: Iterable[Part], names: list[str], dtypes: Mapping[str, str] | None = None, pad: int = 0
    ) -> dict[str, Any]:
        """A step as a worker decodes it; the padding is NaN."""
        parts, tensors = list(parts), {}
        for name in names:
            pieces = [np.full((pad, self.worker.rules.row_widths[name]), np.nan, np.float32)]
            for part in reversed(parts):
                end = part.start + part.length
                pieces.append(self.streams.rows(name, f"not {part.request}", end - part.wrong, end))
                pieces.append(self.streams.rows(name, part.request, part.start, end - part.wrong))
            rows = np.concatenate(pieces[::-1])
            bf16 = dtypes and dtypes.get(name) == "bf16"
            tensors[name] = (rows.view(np.uint32) >> 16).astype(np.uint16) if bf16 else rows
        self._num += 1
        drafts = [part.wrong for part in parts]
        requests = [(part.request, part.start, part.length) for part in parts]
        call = calls.step(requests, tensors, step_id=f"s{self._num}", draft_tokens=drafts)
        encoding = MSGPACK if self._random.random() < 0.1 else FRAME
        return wire.decode(encoding, self._place(wire.encode(encoding, dict(call.message or {}))))

    def run(self, *messages: dict[str, Any]) -> list[dict[str, Any]]:
        """Steps that run as one batch; their replies."""
        wanted = [Wanted(parse_step(message, self.worker.rules), "") for message in messages]
        outcomes = execute.steps(self.worker, wanted)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        return outcomes  # type: ignore[return-value]

    def step(self, most_requests: int, merged: int = 1) -> list[dict[str, Any]]:
        """Some requests go on by a few tokens, in up to `merged` steps; drafts that were wrong are withdrawn."""
        names = self._sets[chosen := int(self._random.integers(len(self._sets)))]
        known = [request for request in self.lengths if request.startswith(f"{chosen}.")]
        self._random.shuffle(known)
        count = int(self._random.integers(1, most_requests + 1))
        while len(known) < count and len(self.lengths) < self.worker.caches.num_rings - 1:
            self._made += 1
            self.lengths[request := f"{chosen}.{self._made}"] = 0
            known.append(request)
        parts = [self._part(request) for request in known[:count]]
        dtypes = {name: str(self._random.choice(["bf16", "fp32"])) for name in names}
        shares = [parts[i::merged] for i in range(merged)]
        pads = self._random.integers(0, 3, merged).tolist()
        replies = self.run(
            *(self.message(share, names, dtypes, pad) for share, pad in zip(shares, pads, strict=True) if share)
        )
        for part in parts:
            kept = part.length - part.wrong
            self.lengths[part.request] += kept
            if part.wrong and (part.start or kept):
                self.worker.truncate(part.request, part.start + kept)
            elif part.wrong:
                self.release(part.request)
        return replies

    def _part(self, request: str) -> Part:
        length = int(self._random.choice([0, 1, 1, 1, 1, 2, 3, 4]))
        most = min(length, self.worker.rules.draft_slack)
        wrong = int(self._random.integers(0, most + 1)) if self._random.random() < 0.2 else 0
        return Part(request, self.lengths[request], length, wrong)

    def move(self) -> None:
        """Export a request, and go on with it as another in its place: other slot, other pages, ring from 0."""
        request = str(self._random.choice([r for r, length in self.lengths.items() if length]))
        exported = wire.encode(FRAME, self.worker.export(request, parse_export({"version": 1}), ""))
        body = wire.decode(FRAME, bytearray(exported)) | {"id": request}
        self.worker.release(request)
        self.worker.import_(parse_import(body, self.worker.rules, self.worker.entry_bytes), "")

    def release(self, request: str | None = None) -> None:
        request = request or str(self._random.choice(list(self.lengths)))
        self.worker.release(request)
        del self.lengths[request]

    def spoil(self, request: str, names: list[str], tokens: int, row: int, column: int) -> ServiceError:
        """A step with one NaN in its last compressor; the refusal."""
        message = self.message([Part(request, self.lengths.get(request, 0), tokens)], names)
        tensor = message["tensors"][-1]
        rows = np.frombuffer(tensor["data"], np.float32).reshape(tensor["shape"]).copy()
        rows[row, column] = np.nan
        tensor["data"] = memoryview(rows.tobytes())
        try:
            self.run(message)
        except ServiceError as error:
            return error
        raise AssertionError("a NaN was taken")

    def check(self) -> int:
        """Compare all requests with their streams in one step each; entries compared."""
        compared = 0
        for request, length in self.lengths.items():
            names = self._sets[int(request.partition(".")[0])]
            if not length:
                continue
            alone = Walk(self._golden, None, self._sets, 0)
            alone.run(alone.message([Part(request, 0, length)], names))
            for name in names:
                ours, expected = entries(self.worker, request, name), entries(self._golden, request, name)
                assert torch.equal(ours, expected), f"{name} of request {request} after {length} tokens"
                compared += len(expected)
            self._golden.release(request)
        self.worker.check_integrity()
        return compared
