"""Replies of past steps, so that a step sent twice runs once."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass

from kvfold_service.errors import ServiceError


@dataclass(frozen=True, slots=True)
class Encoded:
    """A reply's bytes and their content type."""

    media_type: str
    data: bytes


@dataclass(slots=True)
class _Entry:
    fingerprint: bytes
    num_bytes: int
    reply: asyncio.Future[Encoded]


class StepMemory:
    """The last `keep` step ids of each tenant with the fingerprint of the body and the (coming) reply.

    Only replies that succeeded are kept; a refused step may be sent again under its id. A step that still runs is never
    dropped; a tenant's kept replies together stay under `max_bytes`. The event loop owns it.
    """

    def __init__(self, keep: int, max_bytes: int = 64 << 20) -> None:
        self._keep, self._max_bytes = keep, max_bytes
        self._tenants: dict[str, OrderedDict[str, _Entry]] = {}
        self._bytes: dict[str, int] = {}

    def begin(self, tenant: str, step_id: str, fingerprint: bytes, num_bytes: int) -> asyncio.Future[Encoded] | None:
        """None: run the step, then `finish` or `forget` it. Else: the reply of the same step, come or to come.

        Raises step_conflict if the id was used for another body.
        """
        entries = self._tenants.setdefault(tenant, OrderedDict())
        entry = entries.get(step_id)
        if entry is None:
            entries[step_id] = _Entry(fingerprint, num_bytes, asyncio.get_running_loop().create_future())
            return None
        if entry.fingerprint != fingerprint:
            raise ServiceError(
                "step_conflict", f"step id {step_id} was used for another body; give each step its own id"
            )
        return entry.reply

    def may_know(self, tenant: str, num_bytes: int | None) -> bool:
        """Whether a body of this length may be one that is remembered."""
        return any(entry.num_bytes == num_bytes for entry in self._tenants.get(tenant, {}).values())

    def recall(self, tenant: str, step_id: object, fingerprint: bytes) -> asyncio.Future[Encoded] | None:
        """The reply of this very step, come or to come; None if it never was."""
        entry = self._tenants.get(tenant, {}).get(step_id) if isinstance(step_id, str) else None
        return entry.reply if entry and entry.fingerprint == fingerprint else None

    def finish(self, tenant: str, step_id: str, reply: Encoded) -> None:
        entries = self._tenants[tenant]
        entries[step_id].reply.set_result(reply)
        entries.move_to_end(step_id)
        self._bytes[tenant] = self._bytes.get(tenant, 0) + len(reply.data)
        while len(entries) > self._keep or self._bytes[tenant] > self._max_bytes:
            oldest, entry = next(iter(entries.items()))
            if not entry.reply.done() or oldest == step_id:
                break
            del entries[oldest]
            self._bytes[tenant] -= len(entry.reply.result().data)

    def forget(self, tenant: str, step_id: str, error: BaseException) -> None:
        """The step was refused: whoever waited for it is told so, and the id is free."""
        entry = self._tenants[tenant].pop(step_id)
        entry.reply.set_exception(error)
        entry.reply.exception()  # nobody has to be waiting
