"""A batch of steps → one work for each compressor: its plan, and where its rows come from.

Compressors of one geometry mostly stand at the same positions and ring indices, layer after layer, so their plans
differ in nothing but pages: such a plan is made once.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfold_kernels import plan as p
from kvfold_service.caches import Caches, CompressorCache
from kvfold_service.reserve import Prepared
from kvfold_service.runner import Part, Work

I64 = NDArray[np.int64]


class _Joined(NamedTuple):
    """Some members' requests, one member behind the other; drafts None: there are none."""

    members: tuple[int, ...]
    slots: I64
    query_start_loc: I64
    drafts: I64 | None
    states: I64
    """`[num_compressors, 3, num_requests]`, as they are before the step."""


def works(caches: Caches, members: Sequence[Prepared]) -> list[Work]:
    """In the order in which the members' tensors name compressors first."""
    named: dict[CompressorCache, list[int]] = {}
    for i, member in enumerate(members):
        for cache in member.caches:
            named.setdefault(cache, []).append(i)
    joined: dict[tuple[int, ...], _Joined] = {}
    plans: dict[Hashable, p.Plan] = {}
    found = []
    for cache, carrying in named.items():
        key = tuple(carrying)
        if key not in joined:
            joined[key] = _join(caches, members, key)
        parts = tuple(Part(i, members[i].step.tensors[cache.name], members[i].step.num_tokens) for i in carrying)
        found.append(Work(cache, parts, _plan(cache, joined[key], plans)))
    return found


def commit(caches: Caches, work: Sequence[Work]) -> None:
    """Make all plans' rows and entries valid: `Plan.commit`, at once for those that are one plan but for pages."""
    same: dict[int, list[Work]] = {}
    for item in work:
        same.setdefault(id(item.plan.next_state), []).append(item)
    for items in same.values():
        plan, numbers = items[0].plan, np.array([item.cache.index for item in items])
        fields = np.arange(p.STATE_FIELDS)[:, None]
        caches.tables.states[numbers[:, None, None], fields, plan.slots] = plan.next_state


def _join(caches: Caches, members: Sequence[Prepared], carrying: tuple[int, ...]) -> _Joined:
    chosen = [members[i] for i in carrying]
    slots = np.concatenate([member.slots[member.active] for member in chosen])
    drafts = np.concatenate([member.step.draft_tokens[member.active] for member in chosen])
    loc = np.zeros(len(slots) + 1, np.int64)
    np.cumsum(np.concatenate([np.diff(m.step.query_start_loc)[m.active] for m in chosen]), out=loc[1:])
    states = caches.tables.states.take(slots, axis=2)
    return _Joined(carrying, slots, loc, drafts if drafts.any() else None, states)


def _plan(cache: CompressorCache, joined: _Joined, plans: dict[Hashable, p.Plan]) -> p.Plan:
    geometry = cache.compressor.geometry
    key = (joined.members, geometry, joined.states[cache.index].tobytes())
    if (made := plans.get(key)) is not None:
        return made.on_pages(geometry.ratio, cache.page_table, cache.page_entries)
    made = plans[key] = p.make_plan(
        geometry,
        cache.state,
        joined.slots,
        joined.query_start_loc,
        cache.page_table,
        cache.page_entries,
        joined.drafts,
    )
    return made
