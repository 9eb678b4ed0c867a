"""What comes of a step that has run: its requests are known from now on, and its reply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kvfold_client import wire
from kvfold_kernels import plan as p
from kvfold_service.reserve import Prepared
from kvfold_service.runner import Ran

if TYPE_CHECKING:
    from kvfold_service.worker import Worker


def commit(worker: Worker, member: Prepared, ran: Ran, timings: dict[str, int]) -> dict[str, Any]:
    """Make a step's requests known, and say what came of it."""
    step, tenant, active = member.step, member.wanted.tenant, member.active
    worker.caches.tables.drafts[member.numbers[:, None], member.slots[active]] = step.draft_tokens[active]
    carried_with = dict.fromkeys(step.tensors, tuple(step.tensors))
    for named, old, request in zip(step.requests, member.known, member.requests, strict=True):
        if request is None:
            continue
        if named.num_tokens:
            request.carried_with.update(carried_with)
        if old is None:
            worker.add((tenant, named.id), request)
        else:
            worker.renew(request)
    return {
        "version": wire.PROTOCOL_VERSION,
        "step_id": step.step_id,
        "epoch": worker.epoch.hex(),
        "compat": worker.compat,
        "launches": ran.launches,
        "skipped": [] if ran.graph_mode == "full" else _skipped(member),
        "requests": _parts(worker, member),
        "timings_us": dict(timings),
    }


def _skipped(member: Prepared) -> list[str]:
    """Compressors in which the step closes no window."""
    step = member.step
    starts = np.array([request.start for request in step.requests], np.int64)
    ratios = {cache.compressor.geometry.ratio for cache in member.caches}
    idle = {ratio for ratio in ratios if not p.has_boundary(starts, step.query_start_loc, ratio)}
    return [cache.name for cache in member.caches if cache.compressor.geometry.ratio in idle]


def _parts(worker: Worker, member: Prepared) -> list[dict[str, Any]]:
    """By request and compressor. Those of one ratio that have nothing to list say the same, so it is made once."""
    step, tenant = member.step, member.wanted.tenant
    known = member.slots[member.slots >= 0]
    whole = not worker.caches.tables.first_entry[member.numbers[:, None], known].any()
    columns = [(cache.name, cache, cache.compressor.geometry.ratio) for cache in member.caches]
    replies = []
    for request, slot in zip(step.requests, member.slots.tolist(), strict=True):
        parts, idle = {}, {}
        for name, cache, ratio in columns:
            part = idle.get(ratio)
            if part is None:
                part = worker.part(tenant, slot, cache, request.start, request.num_tokens, step.all_pages)
                if whole and not part["pages"]:
                    idle[ratio] = part
            parts[name] = part
        replies.append({"id": request.id, "compressors": parts})
    return replies
