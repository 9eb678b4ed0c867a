"""What came is what the peer has: digests of its pages, and of the same entries as they lie in ours.

The peer answers by handles, which are stale when a page was freed or an entry withdrawn from it since they were given:
so equal digests also say that all bytes are of the one request that was asked for.

If the request went on, its last page may hold more entries than we took over, and its digest is of all of them. Of that
page ours are compared as bytes with the same entries of the peer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvfold_client import wire
from kvfold_service.arrivals import Incoming
from kvfold_service.caches import Entries
from kvfold_service.errors import ServiceError
from kvfold_service.movers import Move, Span
from kvfold_service.movers.http import fetch, ranges
from kvfold_service.movers.peer import peer_failed

if TYPE_CHECKING:
    from kvfold_service.engine import Engine

_AT_A_TIME: Final = 256
"""Pages of one question; neither worker's engine is held up for longer than these take."""
_BYTES_AT_A_TIME: Final = 1 << 20


class _Page(NamedTuple):
    """Entries [first, end) that the peer has in it, and their XXH3-64."""

    handle: str
    first: int
    end: int
    digest: str


async def verify(engine: Engine, move: Move) -> None:
    """While we digest some pages, the peer does the next. Raises peer_failed: changed, corrupt."""
    for span in move.spans:
        some = [list(span.handles[i : i + _AT_A_TIME]) for i in range(0, len(span.handles), _AT_A_TIME)]
        asked = [asyncio.create_task(_ask(move, some[0]))] if some else []
        base = None
        try:
            for i, handles in enumerate(some):
                theirs, base = _pages(move, span, handles, await asked.pop(), base)
                if base > span.end and handles is not some[-1]:
                    raise _changed(move, span)
                asked = [asyncio.create_task(_ask(move, handles)) for handles in some[i + 1 : i + 2]]
                await _compare(engine, move, span, theirs)
            if (span.first if base is None else base) < span.end:
                raise _changed(move, span)
        finally:
            for task in asked:
                task.cancel()
                await asyncio.wait({task})


async def _ask(move: Move, handles: list[str]) -> dict[str, Any]:
    return await move.line.ask("POST", "/v1/verify", {"version": wire.PROTOCOL_VERSION, "handles": handles})


def _pages(
    move: Move, span: Span, handles: list[str], reply: dict[str, Any], base: int | None
) -> tuple[list[_Page], int]:
    """The pages of a reply, each with the entries it holds of the request, and the entry behind the last of them.

    base  the entry behind the pages before, None for the first page: its first held entry is the span's
    """
    found: list[_Page] = []
    with move.line.reading("its digests"):
        if len(reply["pages"]) != len(handles):
            raise _changed(move, span)
        for handle, page in zip(handles, reply["pages"], strict=True):
            first_in_page, end_in_page = page.get("first_entry", 0), page["num_entries"]
            if not type(first_in_page) is type(end_in_page) is int:
                raise TypeError
            base = span.first - first_in_page if base is None else base
            first, end = base + first_in_page, base + end_in_page
            if not span.first <= first < min(end, span.end):
                raise _changed(move, span)
            found.append(_Page(handle, first, end, page["xxh3_64"]))
            base = end
    assert base is not None  # there was a handle
    return found, base


async def _compare(engine: Engine, move: Move, span: Span, theirs: list[_Page]) -> None:
    whole = [page for page in theirs if page.end <= span.end]
    ours = await engine.call_for(move.incoming.key[0], _digests, move.incoming, span, whole)
    if ours != [page.digest for page in whole]:
        raise _corrupt(move, span)
    for page in theirs[len(whole) :]:  # none, or the last
        await _compare_bytes(engine, move, span, page)


async def _compare_bytes(engine: Engine, move: Move, span: Span, page: _Page) -> None:
    """The handle is asked for once more behind the entries: they are of the request whose page it is."""
    size = min(_BYTES_AT_A_TIME, move.peer_limit)
    is_equal = True
    for part in ranges([Span(span.cache, page.first, span.end, ())], size):
        theirs = await fetch(move, part)
        slot = move.incoming.request.slot
        rows = await engine.call_for(move.incoming.key[0], span.cache.page_free_rows, slot, part.first, part.end)
        is_equal = is_equal and np.array_equal(theirs, rows.numpy())
    await _ask(move, [page.handle])
    if not is_equal:
        raise _corrupt(move, span)


def _digests(incoming: Incoming, span: Span, pages: list[_Page]) -> list[str]:
    """XXH3-64 of entries as they lie in our pages. Engine thread."""
    return span.cache.digests(Entries(incoming.request.slot, page.first, page.end) for page in pages)


def _corrupt(move: Move, span: Span) -> ServiceError:
    return peer_failed(move.line.peer, "corrupt", f"entries of {span.cache.name} did not arrive as they are")


def _changed(move: Move, span: Span) -> ServiceError:
    return peer_failed(
        move.line.peer, "changed", f"its pages of {span.cache.name} are not those of the request any more"
    )
