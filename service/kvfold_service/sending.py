"""Large replies: bounded before they are made, counted while they are sent, cut off when nobody takes them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvfold_client import wire
from kvfold_service.errors import ServiceError
from kvfold_service.ingest import SLOWEST_BYTES

if TYPE_CHECKING:
    from kvfold_service.transfer import ExportCall
    from kvfold_service.worker import Worker

log = logging.getLogger("kvfold")
_SLICE_BYTES: Final = 1 << 20


class Sending:
    """Bytes of replies that are made or sent now: each at most `limit`, all together at most `total`."""

    def __init__(self, limit: int, total: int) -> None:
        self.limit, self.total = limit, total
        self.num_bytes = self.num_replies = 0

    def begin(self, num_bytes: int, advice: str) -> Held:
        """Raises body_too_large with the advice, queue_full."""
        if num_bytes > self.limit:
            raise ServiceError(
                "body_too_large", f"the reply would exceed {self.limit} bytes; {advice}", limit=self.limit
            )
        if self.num_bytes + num_bytes > self.total:
            raise ServiceError("queue_full", "too many replies are on their way; try again later", retry_after=1.0)
        return Held(self, num_bytes)


class Held:
    """A reply's share, until `end`."""

    def __init__(self, sending: Sending, num_bytes: int) -> None:
        self._sending: Sending | None = sending
        self._num_bytes = num_bytes
        sending.num_bytes += num_bytes
        sending.num_replies += 1

    @contextmanager
    def unless_sent(self) -> Iterator[None]:
        """Ends it if the block fails: then nothing will be sent."""
        try:
            yield
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Once more is harmless."""
        if self._sending is not None:
            self._sending.num_bytes -= self._num_bytes
            self._sending.num_replies -= 1
            self._sending = None


class Streamed(StreamingResponse):
    """A message whose tensors are sent from where they lie, a slice at a time.

    The client has `patience` seconds to take it, and one more for each SLOWEST_BYTES.
    """

    def __init__(self, message: dict[str, Any], media_type: str, held: Held, patience: float) -> None:
        parts = [memoryview(part) for part in wire.encode_parts(media_type, message)]
        self.num_bytes = sum(map(len, parts))
        super().__init__(_slices(parts), headers={"Content-Length": str(self.num_bytes)}, media_type=media_type)
        self._held, self._patience = held, patience

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self._patience + self.num_bytes / SLOWEST_BYTES):
                await super().__call__(scope, receive, send)
        except TimeoutError:  # the server closes a connection whose reply is not whole
            log.info("a reply of %d bytes was not taken in time", self.num_bytes)
        finally:
            self._held.end()


async def _slices(parts: list[memoryview]) -> AsyncIterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), _SLICE_BYTES):
            yield part[start : start + _SLICE_BYTES]


def export_bytes(worker: Worker, request_id: str, wanted: ExportCall, tenant: str) -> int:
    """Bytes of an export's tensors. Raises unknown_request. Engine thread."""
    slot = worker.known(request_id, tenant).slot
    num_bytes = 0
    for cache in worker.caches.compressors:
        if wanted.compressors is None or cache.name in wanted.compressors:
            geometry = cache.compressor.geometry
            num_bytes += geometry.max_live_rows * geometry.row_width * cache.rings.element_size()
            if wanted.entries:
                first = max(wanted.from_entry, int(cache.first_entry[slot]))
                num_bytes += max(0, cache.num_entries(slot) - first) * worker.entry_bytes[cache.name]
    return num_bytes
