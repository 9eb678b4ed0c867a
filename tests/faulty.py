"""`python -m tests.faulty …`: `kvfold serve` on a bad day.

Its wall clock jumps by years with every look, its pages and rings are full of NaN from the start, and a fault happens
whenever the file $FAULT_FILE names it: once (`launch once`; the file is emptied) or always (`launch`).
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvfold_kernels import backends, plan
from kvfold_kernels.backends import Backend
from kvfold_kernels.pages import write_rows
from kvfold_service import caches, runner, serve, worker

FILE = Path(os.environ.get("FAULT_FILE", ""))
PHASES = ("slots", "pages", "plan", "copy", "check", "launch", "half", "written")
"""Where a step may fail, from the first thing that it takes to the last that it writes."""


def is_on(fault: str) -> bool:
    words = FILE.read_text().split()
    if words[:1] != [fault]:
        return False
    if words[1:] == ["once"]:
        FILE.write_text("")
    return True


def failing(fault: str, real: Callable[..., Any], *, after: bool = False) -> Callable[..., Any]:
    """The function; before it, or behind it, the fault."""

    def call(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs) if after else None
        if is_on(fault):
            raise RuntimeError(f"injected: {fault}")
        return result if after else real(*args, **kwargs)

    return call


def bad_backend(name: str) -> Backend:
    real = _load(name)

    def compress(windows: Any, appends: Any, rows: Any, rings: Any, pages: Any, compressor: Any) -> int:
        if is_on("slow"):
            (FILE.parent / "entered").touch()
            time.sleep(60)
        if is_on("half"):  # rubbish wherever the plan allows to write
            rings.view(-1, rings.shape[-1])[appends[plan.APPEND_RING].long()] = torch.nan
            layout, slots = compressor.layout, windows[plan.SLOT].long()
            rubbish = torch.full((len(slots), layout.format.entry_bytes), 0xFF, dtype=torch.uint8)
            write_rows(pages, slots, layout, rubbish)
            raise RuntimeError("injected: half")
        return real.compress(windows, appends, rows, rings, pages, compressor)

    compress = failing("launch", failing("written", compress, after=True))
    return Backend(real.name, real.device, compress, failing("check", real.find_non_finite))


def full_of_nan(*args: Any) -> caches.Caches:
    made = _allocate(*args)
    for group in made.groups:
        group.pages.fill_(0xFF)
    for cache in made.compressors:
        cache.rings.fill_(torch.nan)
    return made


_load, _allocate, _time = backends.load, caches.Caches.allocate, time.time

if __name__ == "__main__":
    jumps = itertools.cycle([0.0, 3e8, -3e8])
    time.time = lambda: _time() + next(jumps)
    backends.load = bad_backend
    caches.Caches.allocate = full_of_nan  # type: ignore[method-assign,assignment]
    worker.Worker.take_slot = failing("slots", worker.Worker.take_slot)  # type: ignore[method-assign]
    caches.Reservation.take = failing("pages", caches.Reservation.take, after=True)  # type: ignore[method-assign]
    plan.make_plan = failing("plan", plan.make_plan)
    runner.as_torch = failing("copy", runner.as_torch)
    sys.exit(serve.run(sys.argv[1:]))
