"""The time of a plan, beside a loop over requests in plain Python that plans the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np

from kvfold_kernels import plan as p
from kvfold_kernels.bench.timing import in_turns
from kvfold_kernels.geometry import KINDS, Geometry

_REQUESTS = 1024
_LONG = 65536


def time_plans(rounds: int) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Case, and µs of each round: `plan`, and where it was planned request by request too, `loop`."""
    table = np.arange(_REQUESTS * 300, dtype=np.int32).reshape(_REQUESTS, 300)
    for kind in ("hca", "csa"):
        geometry = Geometry(kind, KINDS[kind].ratio, KINDS[kind].head_dim)
        yield f"{kind}, one request of {_LONG:,}", in_turns(_one_long_request(geometry, table), rounds, "cpu")
        yield f"{kind}, {_REQUESTS:,} requests of 1", in_turns(_many_decodes(geometry, table), rounds, "cpu")


def by_request(
    geometry: Geometry, state: np.ndarray, loc: list[int], table: list[list[int]], n: int
) -> list[list[int]]:
    """Windows of a batch as a scheduler without numpy would list them: one request, one window at a time."""
    windows = []
    ratio, rows = geometry.ratio, geometry.window_rows
    for slot, (begin, end) in enumerate(pairwise(loc)):
        start, live, ring = (int(value) for value in state[:, slot])
        for entry in range(start // ratio, (start + end - begin) // ratio):
            last = (entry + 1) * ratio - 1
            first = max(last - rows + 1, 0)
            from_ring = max(0, start - first)
            windows.append(
                [
                    begin + last - start,
                    first - (last - rows + 1),
                    from_ring,
                    slot,
                    (ring + first - live) % geometry.ring_rows if from_ring else 0,
                    entry * ratio,
                    table[slot][entry // n] * n + entry % n,
                ]
            )
    return windows


def _one_long_request(geometry: Geometry, table: np.ndarray) -> dict[str, Callable[[], object]]:
    state, slots, loc = p.empty_state(_REQUESTS), np.array([3]), np.array([0, _LONG])
    n = geometry.default_page_entries
    return {"plan": lambda: p.make_plan(geometry, state, slots, loc, table, n)}


def _many_decodes(geometry: Geometry, table: np.ndarray) -> dict[str, Callable[[], object]]:
    state, slots, loc = p.empty_state(_REQUESTS), np.arange(_REQUESTS), np.arange(_REQUESTS + 1)
    n = geometry.default_page_entries
    state[p.COMMITTED] = np.random.default_rng(0).integers(0, 5000, _REQUESTS)
    state[p.LIVE_START] = [geometry.live_start(int(tokens)) for tokens in state[p.COMMITTED]]
    planned, rows, starts = p.make_plan(geometry, state, slots, loc, table, n), table.tolist(), loc.tolist()
    assert by_request(geometry, state, starts, rows, n) == planned.windows.T.tolist()
    return {
        "plan": lambda: p.make_plan(geometry, state, slots, loc, table, n),
        "loop": lambda: by_request(geometry, state, starts, rows, n),
    }
