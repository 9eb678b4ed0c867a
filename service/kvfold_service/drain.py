"""From the first signal to the end, in one budget: admit nothing new → finish what was admitted → wait for reads."""

from __future__ import annotations

import asyncio
import logging

from kvfold_service import reads
from kvfold_service.service import Service

log = logging.getLogger("kvfold")
_LOOK_AGAIN_S = 0.05


async def drain(service: Service, seconds: float) -> float:
    """Ends when nothing runs, nothing is being sent and every page has been read, or when the time is over.

    Returns the seconds that are left. Reads, exports, lease renewals and releases are served meanwhile.
    """
    service.draining = True
    log.info("draining for at most %g s", seconds)
    loop = asyncio.get_running_loop()
    began = loop.time()
    quiet = asyncio.create_task(_quiet(service, service.admission.num_admitted))
    await asyncio.wait([quiet], timeout=seconds)
    if not quiet.done():
        quiet.cancel()  # and not awaited: a device that hangs must not keep the worker
        log.warning("still busy after draining for %g s", seconds)
    return max(0.0, began + seconds - loop.time())


async def _quiet(service: Service, num_admitted: int) -> None:
    while service.admission.holds_any_of(num_admitted) or service.running:
        await asyncio.sleep(_LOOK_AGAIN_S)
    while service.sending.num_replies or (
        not service.not_ready and await service.engine.call(reads.num_unread, service.worker)
    ):
        await asyncio.sleep(_LOOK_AGAIN_S)
