"""One load test, from its first call to the release of its last request."""

from __future__ import annotations

import asyncio
from typing import Any

from ..errors import KvfoldError
from ..scheduler.trace import Arrival, TraceError, fit, read_trace
from .fitting import fitting_sessions
from .held import Held
from .load import ShapedLoad, TraceLoad
from .options import Options
from .result import LoadtestError, Result, Stop, Watcher
from .rows import Rows
from .sessions import Life, Sessions
from .shape import Shape, shape_of
from .sweep import Sweep
from .workers import Workers

_SPARE_SECONDS = 60


async def perform(options: Options, workers: Workers, watcher: Watcher, stop: Stop) -> Result:
    """Raises LoadtestError. Whatever happens, what was made is released."""
    trace = _trace(options)
    try:
        described = await workers.describe()
    except KvfoldError as error:
        raise LoadtestError(f"the worker does not answer as one: {error}") from None
    held = Held()
    result = Result(held.run, described)
    timer = asyncio.get_running_loop().call_later(options.max_seconds, stop, "--max-seconds were over")
    try:
        sweep = Sweep(options, result, watcher, stop, held.settle)
        await _send(options, workers, held, sweep, result, trace, watcher)
    finally:
        timer.cancel()
        watcher.note(f"releasing {len(held)} requests")
        await held.release_all()
    result.stopped, result.not_released = stop.reason, held.failed
    try:
        result.after = await workers.describe()
    except KvfoldError as error:
        watcher.note(f"the worker does not answer at the end: {error}")
    return result


async def _send(
    options: Options,
    workers: Workers,
    held: Held,
    sweep: Sweep,
    result: Result,
    trace: tuple[Arrival, ...],
    watcher: Watcher,
) -> None:
    manifest = result.workers[0]["manifest"]
    shape = shape_of(options.profile, options.batch, options.prompt, options.drafts, options.accept)
    _check(options, shape, manifest)
    rows = _rows(options, shape, manifest)
    if trace:
        fitting = fit(trace, manifest["max_position"], longest=manifest["max_position"])
        result.num_shortened = sum(a != b for a, b in zip(trace, fitting, strict=True))
        pace_s = options.pace_ms / 1e3
        load = TraceLoad(workers, held, rows, options.seed, fitting, chunk_tokens=options.chunk, pace_s=pace_s)
        begin = fitting[0].timestamp
        await sweep.trace([(arrival.timestamp - begin) / 1e3 / options.speed for arrival in fitting], load.send)
        return
    sessions = _sessions(options, shape, workers, held, rows, result)
    try:
        if shape.decode_requests:
            watcher.note("preparing the requests that decode")
            await sessions.fill()
        await sweep.points(ShapedLoad(workers, held, rows, options.seed, shape, sessions).send)
    except KvfoldError as error:
        raise LoadtestError(f"the requests that decode cannot be prepared: {error}") from None
    finally:
        await sessions.end()


def _trace(options: Options) -> tuple[Arrival, ...]:
    try:
        return () if options.trace is None else read_trace(options.trace)
    except TraceError as error:
        raise LoadtestError(str(error)) from None


def _check(options: Options, shape: Shape, manifest: dict[str, Any]) -> None:
    """Raises LoadtestError for what the worker's model cannot take."""
    most, slack = manifest["max_position"], manifest.get("draft_slack", 8)
    each = 1 + shape.draft_tokens
    if shape.prompt_tokens > most or (shape.decode_requests and options.context + each > most):
        raise LoadtestError(f"the model has {most} positions; lower --prompt or --context")
    if shape.draft_tokens > slack:
        raise LoadtestError(f"the model allows {slack} guessed tokens in a step; lower --drafts")


def _rows(options: Options, shape: Shape, manifest: dict[str, Any]) -> Rows:
    most = max(shape.num_tokens, shape.decode_requests * options.context, options.chunk if options.trace else 0)
    try:
        return Rows(manifest, options.compressors, options.dtype, most)
    except ValueError as error:
        raise LoadtestError(str(error)) from None


def _sessions(options: Options, shape: Shape, workers: Workers, held: Held, rows: Rows, result: Result) -> Sessions:
    most_tokens = min(result.workers[0]["manifest"]["max_position"], options.context + options.output)
    life = Life(shape.decode_requests, options.context, most_tokens, options.max_seconds + _SPARE_SECONDS)
    most = options.sessions
    if most is None and shape.decode_requests:
        most = fitting_sessions(result.workers, life, prompts=shape.prompt_tokens > 0)
    return Sessions(workers, held, rows, life, most or 0, options.seed)
