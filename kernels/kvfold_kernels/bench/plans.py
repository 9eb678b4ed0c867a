"""Time of a plan, beside a loop over requests in plain Python that plans the same."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from kvfold_kernels import plan as p
from kvfold_kernels.geometry import KINDS, Geometry
from tests.bench.measure import median_us


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


def one_long_request(geometry: Geometry, table: np.ndarray) -> dict[str, float]:
    state, slots, loc = p.empty_state(1024), np.array([3]), np.array([0, 65536])
    n = geometry.default_page_entries
    return {"us": median_us(lambda: p.make_plan(geometry, state, slots, loc, table, n), 1000)}


def many_decodes(geometry: Geometry, table: np.ndarray) -> dict[str, float]:
    state, slots, loc = p.empty_state(1024), np.arange(1024), np.arange(1025)
    n = geometry.default_page_entries
    state[p.COMMITTED] = np.random.default_rng(0).integers(0, 5000, 1024)
    state[p.LIVE_START] = [geometry.live_start(int(tokens)) for tokens in state[p.COMMITTED]]
    planned, rows, starts = p.make_plan(geometry, state, slots, loc, table, n), table.tolist(), loc.tolist()
    assert by_request(geometry, state, starts, rows, n) == planned.windows.T.tolist()
    ours = median_us(lambda: p.make_plan(geometry, state, slots, loc, table, n), 1000)
    loop = median_us(lambda: by_request(geometry, state, starts, rows, n), 100)
    return {"us": ours, "loop_us": loop, "ratio": loop / ours}


def run() -> dict[str, Any]:
    results = {}
    table = np.arange(1024 * 300, dtype=np.int32).reshape(1024, 300)
    for kind in ("hca", "csa"):
        geometry = Geometry(kind, KINDS[kind].ratio, KINDS[kind].head_dim)
        results[f"{kind}, one request of 65,536"] = one_long_request(geometry, table)
        results[f"{kind}, 1,024 requests of 1"] = many_decodes(geometry, table)
    return results
