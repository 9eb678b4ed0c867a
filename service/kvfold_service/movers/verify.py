"""What came is what the peer has: digests of its pages, and of the same entries as they lie in ours.

The peer answers by handles, which are stale when a page was freed or changed since they were given: so equal digests
also say that all bytes are of the one request that was asked for.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import xxhash

from kvfold_client import wire
from kvfold_service.arrivals import Incoming
from kvfold_service.movers import Move, Span
from kvfold_service.movers.peer import peer_failed

if TYPE_CHECKING:
    from kvfold_service.engine import Engine

_AT_A_TIME: Final = 256
"""Pages of one question; neither worker's engine is held up for longer than these take."""
_Page = tuple[int, int, str]
"""Entries [first, end) and their XXH3-64."""


async def verify(engine: Engine, move: Move) -> None:
    """While we digest some pages, the peer does the next. Raises peer_failed: changed, corrupt."""
    for span in move.spans:
        some = [list(span.handles[i : i + _AT_A_TIME]) for i in range(0, len(span.handles), _AT_A_TIME)]
        asked = [asyncio.create_task(_ask(move, some[0]))] if some else []
        base = None
        try:
            for i in range(len(some)):
                theirs, base = _pages(move, span, await asked.pop(), base)
                asked = [asyncio.create_task(_ask(move, handles)) for handles in some[i + 1 : i + 2]]
                await _compare(engine, move, span, theirs)
        finally:
            for task in asked:
                task.cancel()
                await asyncio.wait({task})
        if (span.first if base is None else base) != span.end:
            raise _changed(move, span)


async def _ask(move: Move, handles: list[str]) -> dict[str, Any]:
    return await move.line.ask("POST", "/v1/verify", {"version": wire.PROTOCOL_VERSION, "handles": handles})


async def _compare(engine: Engine, move: Move, span: Span, theirs: list[_Page]) -> None:
    ranges = [(first, end) for first, end, _ in theirs]
    ours = await engine.call_for(move.incoming.key[0], _digests, move.incoming, span, ranges)
    if ours != [digest for _, _, digest in theirs]:
        raise peer_failed(move.line.peer, "corrupt", f"entries of {span.cache.name} did not arrive as they are")


def _pages(move: Move, span: Span, reply: dict[str, Any], base: int | None) -> tuple[list[_Page], int]:
    """The pages of a reply, each with the entries it holds of the request, and the entry behind the last of them.

    base  the entry behind the pages before, None for the first page: its first held entry is the span's
    """
    found: list[_Page] = []
    try:
        for page in reply["pages"]:
            first_in_page, end_in_page = page.get("first_entry", 0), page["num_entries"]
            base = span.first - first_in_page if base is None else base
            first, end = base + first_in_page, base + end_in_page
            if not span.first <= first < end <= span.end:
                raise _changed(move, span)
            found.append((first, end, str(page["xxh3_64"])))
            base = end
    except (KeyError, TypeError, AttributeError):
        raise peer_failed(move.line.peer, "refused", "its digests cannot be read") from None
    if base is None:
        raise _changed(move, span)
    return found, base


def _digests(incoming: Incoming, span: Span, ranges: list[tuple[int, int]]) -> list[str]:
    """XXH3-64 of entries as they lie in our pages. Engine thread."""
    slot = incoming.request.slot
    rows = (span.cache.page_free_rows(slot, first, end) for first, end in ranges)
    return [xxhash.xxh3_64_hexdigest(part.contiguous().numpy().data) for part in rows]


def _changed(move: Move, span: Span) -> Exception:
    return peer_failed(
        move.line.peer, "changed", f"its pages of {span.cache.name} are not those of the request any more"
    )
