"""The mover that is always there: ranges of entries as page-free rows, one connection, two ranges in hand.

While one range is put into our pages, the next is on its way. What lies in memory is two ranges, however long the
request is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfold_client import wire
from kvfold_service import arrivals
from kvfold_service.caches import CompressorCache
from kvfold_service.errors import ServiceError
from kvfold_service.movers import Move, Span
from kvfold_service.movers.peer import PeerLine, entries_call, peer_failed

if TYPE_CHECKING:
    from kvfold_service.admission import Place
    from kvfold_service.service import Service

RANGE_BYTES: Final = 8 << 20
_HEADER_BYTES: Final = 1024
"""What a reply has around its entries, at most."""


class Range(NamedTuple):
    cache: CompressorCache
    first: int
    end: int


class HttpMover:
    """Entries by `POST /v1/requests/{id}/entries`."""

    name = "http"

    def __init__(self, service: Service) -> None:
        self._service = service

    async def meet(self, line: PeerLine, peer_epoch: str) -> None:
        """Nothing is needed."""

    async def move(self, move: Move) -> None:
        if not any(span.num_bytes for span in move.spans):
            return
        admission, tenant = self._service.admission, move.incoming.key[0]
        wanted = max(span.num_bytes for span in move.spans) + _HEADER_BYTES
        size = min(RANGE_BYTES, wanted, move.peer_limit, admission.limit(tenant) // 2)
        place = admission.admit(tenant, 2 * size)
        try:
            await self._move(move, place, size)
        finally:
            place.leave()

    async def _move(self, move: Move, place: Place, size: int) -> None:
        call, tenant = self._service.engine.call_for, move.incoming.key[0]
        halves = place.view[:size], place.view[size : 2 * size]
        putting: asyncio.Task[None] | None = None
        try:
            for i, part in enumerate(ranges(move.spans, size)):
                entries = await fetch(move, part, halves[i % 2])
                if putting is not None:
                    await putting
                putting = asyncio.create_task(
                    call(tenant, arrivals.put, move.incoming, part.cache, part.first, entries)
                )
        finally:
            if putting is not None:
                await asyncio.wait({putting})
                putting.exception()  # told below, unless something else failed before
        if putting is not None:
            putting.result()


def ranges(spans: Sequence[Span], size: int) -> Iterator[Range]:
    """The spans, cut so that a reply of each fits into `size` bytes."""
    for span in spans:
        step = (size - _HEADER_BYTES) // span.cache.group.layout.format.entry_bytes
        if step < 1:
            raise ServiceError("body_too_large", "an entry does not fit into a body; raise --max-body-bytes")
        for first in range(span.first, span.end, step):
            yield Range(span.cache, first, min(first + step, span.end))


async def fetch(move: Move, part: Range, view: memoryview | None = None) -> NDArray[np.uint8]:
    """uint8 `[end − first, entry_bytes]`, over the view if there is one. Raises peer_failed, unknown_request."""
    path, message = entries_call(move.incoming.key[1], part.cache.name, part.first, part.end)
    reply = await move.line.ask("POST", path, message, view=view)
    shape = part.end - part.first, part.cache.group.layout.format.entry_bytes
    with move.line.reading("its entries"):
        tensor = wire.tensor_of(reply.get("entries"), "entries")
        if reply.get("first_entry") != part.first or (tensor.dtype, tensor.shape) != ("uint8", shape):
            raise peer_failed(move.line.peer, "changed", "the request has other entries than it said")
        return np.frombuffer(tensor.data, np.uint8).reshape(shape)
