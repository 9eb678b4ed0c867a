"""A step of known answer through the whole data path, on every compressor: before a worker says that it is ready, while
it is idle, and after a step that failed."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from typing import TYPE_CHECKING

import torch

from kvfold_client import wire
from kvfold_kernels import plan as p
from kvfold_kernels.compress.reference import compress_rows
from kvfold_kernels.compressor import Compressor
from kvfold_kernels.entry import encode
from kvfold_service.caches import CompressorCache
from kvfold_service.errors import ServiceError, StartError
from kvfold_service.step import Step, StepRequest
from kvfold_service.worker import Worker

if TYPE_CHECKING:
    from kvfold_service.service import Service

log = logging.getLogger("kvfold")
_ID = "kvfold.canary"
_TENANT = "the canary"
"""No tenant of a token file: their names have no spaces."""
_MOST_DIFFERENT = 0.02
"""Share of bytes that may differ from the reference: roundings that fall the other way, not a wrong row."""


class CanaryError(Exception):
    """The data path gives wrong bytes; str() says where."""


def prove(worker: Worker) -> None:
    """One window in one step and, again, split in two, on one compressor of each layout and kind.

    The two must agree bit for bit and, up to roundings, with the reference. Raises CanaryError. Leaves nothing behind.
    """
    seen = {}
    for cache in worker.caches.compressors:
        geometry = cache.compressor.geometry
        if geometry.window_rows < worker.manifest.max_position:
            seen.setdefault((geometry, cache.group.layout, cache.part.input_dtype), cache)
    totals, by_kind = dict(worker.totals), Counter(worker.by_kind)
    try:
        for cache in seen.values():
            _prove(worker, cache)
    finally:
        worker.totals.update(totals)
        worker.by_kind = by_kind


def _prove(worker: Worker, cache: CompressorCache) -> None:
    geometry = cache.compressor.geometry
    num_tokens = geometry.window_rows
    dtype = "bf16" if cache.part.input_dtype == "bf16" else "fp32"
    generator = torch.Generator().manual_seed(num_tokens)
    rows = torch.randn(num_tokens, geometry.row_width, generator=generator).to(torch.bfloat16)
    rows = rows if dtype == "bf16" else rows.float()
    whole = _run(worker, cache, dtype, rows, [num_tokens])
    split = _run(worker, cache, dtype, rows, [num_tokens - 1, 1])
    if not torch.equal(whole, split):
        raise CanaryError(f"{cache.name}: a window split over two steps gives other bytes than in one")
    expected = _expected(cache.compressor, rows)
    if not _close(whole, expected, cache):
        raise CanaryError(f"{cache.name}: the entries of backend {worker.backend.name} are not the reference's")


def _run(worker: Worker, cache: CompressorCache, dtype: str, rows: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    start = 0
    try:
        for length in lengths:
            part = rows[start : start + length].contiguous()
            data = part.view(torch.uint8).numpy().reshape(-1).data
            step = Step(
                step_id=_ID,
                requests=(StepRequest(_ID, start, length),),
                query_start_loc=torch.tensor([0, length]).numpy(),
                num_rows=length,
                tensors={cache.name: wire.Tensor(dtype, tuple(part.shape), data)},
                draft_tokens=torch.zeros(1, dtype=torch.int64).numpy(),
                all_pages=True,
            )
            worker.step(step, _TENANT)
            start += length
        slot = worker.requests[_TENANT, _ID].slot
        return cache.page_free_rows(slot, 0, cache.num_entries(slot))
    finally:
        worker.release(_ID, _TENANT)


def _expected(compressor: Compressor, rows: torch.Tensor) -> torch.Tensor:
    """Page-free rows by the reference."""
    on_host = dataclasses.replace(
        compressor,
        ape=compressor.ape.cpu(),
        norm_weight=compressor.norm_weight.cpu(),
        cos_sin=compressor.cos_sin[: len(rows)].cpu(),
    )
    geometry = on_host.geometry
    state, num_entries = p.empty_state(1), geometry.num_entries(len(rows))
    loc = torch.tensor([0, len(rows)]).numpy()
    table = torch.zeros((1, num_entries), dtype=torch.int32).numpy()
    plan = p.make_plan(geometry, state, loc[:1], loc, table, num_entries)
    ring = torch.zeros((1, geometry.ring_rows, geometry.row_width))
    values, scales = encode(
        torch.from_numpy(compress_rows(torch.from_numpy(plan.windows.copy()), rows, ring, on_host)), on_host
    )
    return torch.cat((values, scales), 1)


def _close(actual: torch.Tensor, expected: torch.Tensor, cache: CompressorCache) -> bool:
    fmt = cache.group.layout.format.name
    if fmt in ("fp32", "bf16"):
        dtype = torch.float32 if fmt == "fp32" else torch.bfloat16
        a, b = (rows.contiguous().view(dtype).float() for rows in (actual, expected))
        return torch.allclose(a, b, rtol=1e-2 if fmt == "bf16" else 1e-4, atol=1e-4)
    return (actual != expected).float().mean().item() <= _MOST_DIFFERENT


def prove_or_refuse(worker: Worker) -> None:
    """`prove`, as a reason not to start."""
    try:
        prove(worker)
    except CanaryError as error:
        raise StartError(f"the canary step failed: {error}") from None


def fault(worker: Worker) -> str | None:
    """`prove` on a worker in use: why it must not be trusted, or None; also None if its pools have no room for it."""
    try:
        prove(worker)
    except CanaryError as error:
        return f"the canary step failed: {error}"
    except ServiceError as error:
        return None if error.code == "pool_exhausted" else f"the canary step failed: {error.message}"
    return None


async def watch(service: Service, seconds: float) -> None:
    """Prove the worker whenever it is idle, every `seconds` (0: never), and at once when a step has failed."""
    while True:
        try:
            await asyncio.wait_for(service.suspect.wait(), seconds or None)
        except TimeoutError:
            if not service.idle:
                continue
        service.suspect.clear()
        if not service.not_ready and (reason := await service.engine.call(fault, service.worker)):
            service.distrust(reason)
