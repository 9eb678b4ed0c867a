"""How many sessions the workers have room for, by what they tell of themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .sessions import Life

MOST_SESSIONS = 16
UNTOLD = 4
"""Where a worker does not show its statistics to this token."""


def fitting_sessions(workers: Sequence[Mapping[str, Any]], life: Life, *, prompts: bool) -> int:
    """At least 1, at most 16; with `prompts` beside them, they may take half of the room."""
    if not all("stats" in worker for worker in workers):
        return UNTOLD
    room = sum(_requests(worker, life.most_tokens) for worker in workers)
    return max(1, min(MOST_SESSIONS, (room // 2 if prompts else room) // life.num_requests))


def _requests(worker: Mapping[str, Any], num_tokens: int) -> int:
    """How many more requests of so many tokens fit into its slots and its pages."""
    needed: Counter[str] = Counter()
    for part in worker["manifest"]["compressors"]:
        pool = f"{part['cache_format']}.{part['head_dim']}x{part['page_entries']}"
        needed[pool] += -(-num_tokens // (part["ratio"] * part["page_entries"]))
    stats = worker["stats"]
    by_pages = [stats["pools"][pool]["free"] // num for pool, num in needed.items()]
    return min(stats["requests"]["max"] - stats["requests"]["live"], *by_pages)
