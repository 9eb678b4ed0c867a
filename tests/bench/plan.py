"""Time of a plan, beside a loop over requests in plain Python that plans the same."""

from __future__ import annotations

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
    for slot, (begin, end) in enumerate(zip(loc[:-1], loc[1:], strict=True)):
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


def run() -> dict[str, Any]:
    results = {}
    for kind in ("hca", "csa"):
        usual = KINDS[kind]
        geometry = Geometry(kind, usual.ratio, usual.head_dim)
        n = geometry.default_page_entries
        table = np.arange(1024 * 300, dtype=np.int32).reshape(1024, 300)
        fresh = p.empty_state(1024)
        one = np.array([3]), np.array([0, 65536])
        results[f"{kind}, one request of 65,536"] = {
            "us": median_us(lambda: p.make_plan(geometry, fresh, *one, table, n), 1000)
        }
        state = p.empty_state(1024)
        state[p.COMMITTED] = np.random.default_rng(0).integers(0, 5000, 1024)
        state[p.LIVE_START] = [geometry.live_start(int(tokens)) for tokens in state[p.COMMITTED]]
        slots, loc = np.arange(1024), np.arange(1025)
        planned = p.make_plan(geometry, state, slots, loc, table, n)
        rows = table.tolist()
        assert by_request(geometry, state, loc.tolist(), rows, n) == planned.windows.T.tolist()
        ours = median_us(lambda: p.make_plan(geometry, state, slots, loc, table, n), 1000)
        loop = median_us(lambda: by_request(geometry, state, loc.tolist(), rows, n), 100)
        results[f"{kind}, 1,024 requests of 1"] = {"us": ours, "loop_us": loop, "ratio": loop / ours}
    return results
