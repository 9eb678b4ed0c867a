"""Truncate: rejected draft tokens leave the state as if they had never come."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvfold_kernels import plan as p
from kvfold_service.caches import CompressorCache
from kvfold_service.errors import ServiceError

if TYPE_CHECKING:
    from kvfold_service.worker import Request, Worker


def truncate(worker: Worker, request_id: str, length: int, tenant: str) -> None:
    """Withdraw the tokens from `length` on, in every compressor that has them; all or nothing.

    A compressor's last step may be undone by as many tokens as it named drafts, and only while all compressors that the
    step carried stand where it left them. Entries of withdrawn tokens are withdrawn: their pages get a new generation
    and, if nothing is left in them, are freed. Raises unknown_request, truncate_too_far.
    """
    request = worker.known(request_id, tenant)
    slot = request.slot
    longer = [cache for cache in worker.caches.compressors if cache.committed(slot) > length]
    if not longer and all(cache.committed(slot) < length for cache in worker.caches.compressors):
        raise _too_far(f"request {request_id} has fewer than {length} tokens", request=request_id)
    for cache in longer:
        _check(worker, cache, request, length)
    for cache in longer:
        _withdraw(cache, slot, length)
    worker.renew(request)


def _check(worker: Worker, cache: CompressorCache, request: Request, length: int) -> None:
    committed, drafts = cache.committed(request.slot), int(cache.drafts[request.slot])
    if committed - length > drafts:
        raise _too_far(
            f"{cache.name} has {committed} tokens of which the last {drafts} may be withdrawn; {length} is too short",
            compressor=cache.name,
            committed=committed,
            draft_tokens=drafts,
        )
    partners = request.carried_with[cache.name]
    if any(worker.caches.by_name[name].committed(request.slot) != committed for name in partners):
        raise _too_far(
            f"the last step of {cache.name} also carried compressors that have gone on since", compressor=cache.name
        )


def _too_far(message: str, **details: Any) -> ServiceError:
    return ServiceError("truncate_too_far", message, **details)


def _withdraw(cache: CompressorCache, slot: int, length: int) -> None:
    geometry, n = cache.compressor.geometry, cache.page_entries
    before, after = cache.num_entries(slot), geometry.num_entries(length)
    cache.drafts[slot] -= cache.committed(slot) - length
    cache.state[p.COMMITTED, slot] = length
    if after == before:
        return
    if after % n:  # the page of the last entry kept had later ones
        cache.group.pool.withdraw(cache.page_table[slot, after // n : after // n + 1])
    cache.drop_pages(slot, -(-after // n))
