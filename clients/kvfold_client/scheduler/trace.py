"""Arrival traces: who comes when, with how many tokens. Mooncake's JSONL, and a seeded generator of the same shape.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, …]}

timestamp in ms from the beginning; hash_ids name the prompt's blocks of BLOCK_TOKENS tokens, each id standing for its
block and all before it, so that equal ids are a shared prefix.
"""

import json
import math
import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

BLOCK_TOKENS = 512
LATEST_MS = 1e10
"""Of a timestamp: 116 days. Beyond that a µs is too little to be counted."""
LONGEST = 10**9
"""Tokens of a prompt or an output."""


class TraceError(ValueError):
    """A trace that cannot be read or run; str() says which line and what to do."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request as the trace has it."""

    timestamp: float
    """ms from the trace's beginning."""
    input_length: int
    """Tokens of the prompt, at least 1."""
    output_length: int
    """Tokens to generate, at least 1; the last one is never fed back."""
    hash_ids: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Tokens whose rows a worker sees."""
        return self.input_length + self.output_length - 1


def read_trace(path: Path) -> tuple[Arrival, ...]:
    """The arrivals of a JSONL file in the order of their timestamps; blank lines are skipped. Raises TraceError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"trace {path.name} cannot be read: {error}") from None
    arrivals = [_arrival(line, f"trace {path.name}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not arrivals:
        raise TraceError(f"trace {path.name} has no request")
    return tuple(sorted(arrivals, key=lambda arrival: arrival.timestamp))


def write_trace(path: Path, trace: Iterable[Arrival]) -> None:
    """One line an arrival, as `read_trace` reads them. Raises TraceError."""
    try:
        path.write_text("".join(json.dumps(asdict(arrival)) + "\n" for arrival in trace), encoding="utf-8")
    except OSError as error:
        raise TraceError(f"trace {path.name} cannot be written: {error.strerror}") from None


def _arrival(line: str, where: str) -> Arrival:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where}: not JSON: {error}") from None
    except RecursionError:
        raise TraceError(f"{where}: nested too deep for a request") from None
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: must be an object with timestamp, input_length, output_length, hash_ids")
    timestamp = _number(fields, "timestamp", where)
    input_length, output_length = (_number(fields, name, where) for name in ("input_length", "output_length"))
    if not 0 <= timestamp <= LATEST_MS:
        raise TraceError(f"{where}: timestamp must be from 0 to {LATEST_MS:g} ms")
    if not all(type(length) is int and 1 <= length <= LONGEST for length in (input_length, output_length)):
        raise TraceError(f"{where}: the lengths must be whole numbers from 1 to {LONGEST}")
    hash_ids = fields.get("hash_ids", [])
    if not isinstance(hash_ids, list) or not all(type(id) is int for id in hash_ids):
        raise TraceError(f"{where}: hash_ids must be a list of whole numbers")
    num_blocks = _num_blocks(input_length)
    if hash_ids and len(hash_ids) != num_blocks:
        raise TraceError(f"{where}: {input_length} tokens have {num_blocks} hash_ids, not {len(hash_ids)}")
    return Arrival(timestamp, input_length, output_length, tuple(hash_ids))


def _number(fields: dict[str, Any], name: str, where: str) -> Any:
    value: Any = fields.get(name)
    if type(value) not in (int, float) or value != value:
        raise TraceError(f"{where}: {name} must be a number, not {reprlib.repr(value)}")
    return value


def _num_blocks(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK_TOKENS)


def synthetic(
    num_requests: int,
    seed: int,
    *,
    rate: float = 2.0,
    mean_input: float = 1024,
    mean_output: float = 64,
    spread: float = 0.8,
    shared: float = 0.3,
) -> tuple[Arrival, ...]:
    """Poisson arrivals, `rate` a second; lengths log-normal of these means, σ = `spread` of their logarithm.

    A request begins with some blocks of an earlier one with probability `shared`. The same for the same arguments.
    """
    if num_requests < 1 or not rate > 0 or mean_input < 1 or mean_output < 1 or spread < 0:
        raise TraceError("a trace needs at least one request, a rate above 0, means of 1 or more, no negative spread")
    random = np.random.Generator(np.random.Philox(key=seed))
    timestamps = np.cumsum(random.exponential(1000 / rate, num_requests))
    timestamps -= timestamps[0]
    if not timestamps[-1] <= LATEST_MS:
        raise TraceError(f"{num_requests} requests at {rate:g} a second take longer than {LATEST_MS:g} ms")
    inputs, outputs = (_lengths(random, mean, spread, num_requests) for mean in (mean_input, mean_output))
    arrivals: list[Arrival] = []
    next_id = 0
    for i in range(num_requests):
        num_blocks = _num_blocks(inputs[i])
        prefix: tuple[int, ...] = ()
        if arrivals and random.random() < shared:
            earlier = arrivals[random.integers(len(arrivals))].hash_ids
            prefix = earlier[: random.integers(1, len(earlier) + 1)][:num_blocks]
        own = range(next_id, next_id + num_blocks - len(prefix))
        next_id = own.stop
        arrivals.append(Arrival(round(float(timestamps[i]), 3), inputs[i], outputs[i], (*prefix, *own)))
    return tuple(arrivals)


def _lengths(random: np.random.Generator, mean: float, spread: float, count: int) -> list[int]:
    """exp(N(µ, σ²)) has the mean exp(µ + σ²/2)."""
    drawn = random.lognormal(math.log(mean) - spread**2 / 2, spread, count)
    return np.maximum(1, np.rint(drawn)).astype(int).tolist()


def fit(trace: Sequence[Arrival], max_rows: int, longest: int | None = None) -> tuple[Arrival, ...]:
    """The trace as a worker of `max_rows` positions can take it: with `longest`, prompts are cut to leave so many rows.

    Raises TraceError for a request that is too long.
    """
    limit = max_rows if longest is None else min(longest, max_rows)
    if longest is not None:
        trace = [_shortened(arrival, limit) for arrival in trace]
    for idx, arrival in enumerate(trace):
        if arrival.num_rows > limit:
            raise TraceError(
                f"request {idx} of the trace has {arrival.num_rows} tokens, and {limit} fit: give --longest {limit}"
            )
    return tuple(trace)


def _shortened(arrival: Arrival, limit: int) -> Arrival:
    output_length = min(arrival.output_length, limit)
    input_length = min(arrival.input_length, limit - output_length + 1)
    hash_ids = arrival.hash_ids[: _num_blocks(input_length)]
    return replace(arrival, input_length=input_length, output_length=output_length, hash_ids=hash_ids)


def shared_tokens(trace: Iterable[Arrival]) -> int:
    """Prompt tokens in blocks that an earlier request had: what a prefix cache could save. No worker here has one."""
    seen: set[int] = set()
    shared = 0
    for arrival in trace:
        known = sum(id in seen for id in arrival.hash_ids)
        shared += min(known * BLOCK_TOKENS, arrival.input_length)
        seen.update(arrival.hash_ids)
    return shared
