"""A step of known answer through the whole data path, on every compressor: before a worker says that it is ready, from
time to time, and after a step that failed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from typing import TYPE_CHECKING, Final

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

_ID = "kvfold.canary"
_TENANT = "the canary"
"""No tenant of a token file: their names have no spaces."""
_MOST_DIFFERENT = 0.02
"""Share of bytes that may differ from the reference: roundings that fall the other way, not a wrong row."""
PASSED: Final = "passed"
NO_ROOM: Final = "no_room"
FAILED: Final = "failed"
_LOOK_AGAIN_S: Final = 1.0
"""Until the next try where there was no room."""


class CanaryError(Exception):
    """The data path gives wrong bytes; str() says where."""


@dataclasses.dataclass(frozen=True)
class Proof:
    """One window of a compressor: its rows `[window_rows, row_width]`, and the page-free rows that they must become."""

    cache: CompressorCache
    dtype: str
    rows: torch.Tensor
    expected: torch.Tensor

    @classmethod
    def of(cls, cache: CompressorCache) -> Proof:
        geometry = cache.compressor.geometry
        dtype = "bf16" if cache.part.input_dtype == "bf16" else "fp32"
        generator = torch.Generator().manual_seed(geometry.window_rows)
        rows = torch.randn(geometry.window_rows, geometry.row_width, generator=generator).to(torch.bfloat16)
        rows = rows if dtype == "bf16" else rows.float()
        return cls(cache, dtype, rows, _expected(cache.compressor, rows))


def proofs(worker: Worker) -> list[Proof]:
    """For one compressor of each layout and kind."""
    seen = {}
    for cache in worker.caches.compressors:
        geometry = cache.compressor.geometry
        if geometry.window_rows < worker.manifest.max_position:
            seen.setdefault((geometry, cache.group.layout, cache.part.input_dtype), cache)
    return [Proof.of(cache) for cache in seen.values()]


def prove(worker: Worker) -> None:
    """All proofs. Raises CanaryError. Leaves nothing behind."""
    for proof in proofs(worker):
        prove_one(worker, proof)


def prove_one(worker: Worker, proof: Proof) -> None:
    """The window in one step and, again, split in two.

    The two must agree bit for bit and, up to roundings, with the reference. Raises CanaryError. Leaves nothing behind.
    """
    num_tokens, name = len(proof.rows), proof.cache.name
    totals, by_kind = dict(worker.totals), Counter(worker.by_kind)
    try:
        whole = _run(worker, proof, [num_tokens])
        split = _run(worker, proof, [num_tokens - 1, 1])
    finally:
        worker.totals.update(totals)
        worker.by_kind = by_kind
    if not torch.equal(whole, split):
        raise CanaryError(f"{name}: a window split over two steps gives other bytes than in one")
    if not _close(whole, proof.expected, proof.cache):
        raise CanaryError(f"{name}: the entries of backend {worker.backend.name} are not the reference's")


def _run(worker: Worker, proof: Proof, lengths: list[int]) -> torch.Tensor:
    start, cache = 0, proof.cache
    try:
        for length in lengths:
            part = proof.rows[start : start + length].contiguous()
            data = part.view(torch.uint8).numpy().reshape(-1).data
            step = Step(
                step_id=_ID,
                requests=(StepRequest(_ID, start, length),),
                query_start_loc=torch.tensor([0, length]).numpy(),
                num_rows=length,
                tensors={cache.name: wire.Tensor(proof.dtype, tuple(part.shape), data)},
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


def fault(worker: Worker, proof: Proof) -> tuple[str, str]:
    """Prove a worker in use: PASSED, NO_ROOM (its pools are full) or FAILED, and why it must not be trusted."""
    try:
        prove_one(worker, proof)
    except CanaryError as error:
        return FAILED, f"the canary step failed: {error}"
    except ServiceError as error:
        return (NO_ROOM, "") if error.code == "pool_exhausted" else (FAILED, f"the canary step failed: {error.message}")
    return PASSED, ""


async def watch(service: Service, seconds: float) -> None:
    """Prove the worker every `seconds` (0: never), and at once when a step has failed.

    Whatever else it has to do: each proof takes its turn on the engine, so that between two of them others run.
    """
    made = await service.engine.call(proofs, service.worker)
    pause = seconds
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(service.suspect.wait(), pause or None)
        service.suspect.clear()
        pause = seconds
        for proof in made if not service.not_ready else ():
            outcome, reason = await service.engine.call(fault, service.worker, proof)
            service.metrics.proofs.labels(outcome).inc()
            if outcome == FAILED:
                service.distrust(reason)
                break
            if outcome == NO_ROOM:
                pause = min(seconds or _LOOK_AGAIN_S, _LOOK_AGAIN_S)
