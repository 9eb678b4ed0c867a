"""Workers on a GPU in this process, whose steps come out of page-locked staging, as those of a served worker do."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvfold_kernels import backends
from kvfold_service import weights
from kvfold_service.device import DeviceRunner
from kvfold_service.manifest import PRESETS, parse
from kvfold_service.staging import Extent, Staging
from kvfold_service.worker import Worker

BODY: dict[str, Any] = PRESETS["tiny"] | {"max_position": 1 << 17}
HCA, CSA, INDEXER = NAMES = [part["name"] for part in BODY["compressors"]]
SETS = [NAMES, [HCA], [CSA, INDEXER], [CSA]]


class Room:
    """Page-locked staging that bodies are put into, one behind the other; `clear` gives all of it back."""

    def __init__(self, num_bytes: int) -> None:
        self.staging, self._lent = Staging(num_bytes), list[Extent]()
        self.locked = range(0)

    def __call__(self, body: bytes) -> memoryview:
        if (extent := self.staging.lend(len(body))) is None:
            self.clear()
            extent = self.staging.lend(len(body))
        assert extent is not None
        self._lent.append(extent)
        extent.view[: len(body)] = body
        return extent.view[: len(body)]

    def clear(self) -> None:
        while self._lent:
            self.staging.give_back(self._lent.pop())


def make(backend: backends.Backend, room: Room, graphs: bool, body: dict[str, Any] = BODY, **limits: int) -> Worker:
    manifest = parse(body, "check")
    limits = {"max_requests": 300, "pages": 20000, "max_step_bytes": 256 << 20} | limits
    worker = Worker(manifest, weights.seeded(manifest, 1), backend, graphs=graphs, **limits)
    assert isinstance(worker.runner, DeviceRunner)
    rows = worker.runner._far
    if not room.locked:  # memory can be page-locked once; later workers are told
        rows.lock(room.staging.block)
        room.locked = rows._locked
        assert room.locked, "staging cannot be page-locked here"
    rows._locked = room.locked
    return worker


@contextmanager
def no_errors() -> Iterator[None]:
    """The block logs no error: batches that fail are run again step by step, and nobody would notice."""
    seen: list[str] = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("kvfold")
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
    assert not seen, seen


@contextmanager
def counted(owner: type, method: str) -> Iterator[list[int]]:
    """[calls of a method so far]."""
    real, calls = getattr(owner, method), [0]

    def call(*args: Any) -> Any:
        calls[0] += 1
        return real(*args)

    setattr(owner, method, call)
    try:
        yield calls
    finally:
        setattr(owner, method, real)
