"""Take a request over from a peer: who it is → tail → slot and pages → entries → verified → known.

The peer keeps its copy and goes on with its other requests. If anything fails, nothing is kept here.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Counter

from kvfold_client import wire
from kvfold_service import arrivals, calls
from kvfold_service.arrivals import ImportCall, ImportPart, Incoming
from kvfold_service.caches import CompressorCache
from kvfold_service.control.peers import Peers
from kvfold_service.errors import ServiceError
from kvfold_service.movers import NAMES, BlockMover, Move, Span
from kvfold_service.movers.agent import Agent
from kvfold_service.movers.http import HttpMover
from kvfold_service.movers.nixl import NixlMover
from kvfold_service.movers.peer import PeerLine, peer_failed, request_path
from kvfold_service.movers.verify import verify
from kvfold_service.settings import peer_authorization
from kvfold_service.step import compat_mismatch, expect_fields, expect_id, expect_version, malformed

if TYPE_CHECKING:
    from kvfold_service.service import Service

_MOST_PULLS: Final = 8
"""At a time; each has a thread that waits for its peer."""


@dataclass(frozen=True, slots=True)
class PullCall:
    request_id: str
    source: str
    mover: str


def parse_pull(body: Mapping[str, Any]) -> PullCall:
    """Raises malformed, unsupported_version."""
    expect_fields(body, "the call", {"version", "id", "from"}, {"mover"})
    mover = body.get("mover", "auto")
    if mover not in ("auto", *NAMES):
        raise malformed(f"mover must be one of auto, {', '.join(NAMES)}")
    call = PullCall(expect_id(body["id"], "id"), expect_id(body["from"], "from"), mover)
    expect_version(body)
    return call


class Pulls:
    """The pulls of one worker."""

    def __init__(self, service: Service) -> None:
        self._service, settings = service, service.settings
        self.peers = Peers(settings.peers_file)
        self.movers: dict[str, BlockMover] = {"http": HttpMover(service)}
        self.agent = Agent(f"kvfold-{service.worker.epoch.hex()}", service.worker.caches) if settings.nixl else None
        if self.agent is not None:
            self.movers["nixl"] = NixlMover(service, self.agent, peer_authorization(settings))
        self._threads = ThreadPoolExecutor(_MOST_PULLS, "kvfold-pull")
        self._num_running = 0
        self._bytes = Counter(
            "kvfold_pulled_bytes",
            "Bytes of entries and open rows taken over from peers.",
            ["mover"],
            registry=service.metrics.registry,
        )
        for name in self.movers:
            self._bytes.labels(name)  # a rate needs a zero before the first

    async def pull(self, wanted: PullCall, tenant: str, authorization: str | None) -> dict[str, Any]:
        """The request as GET tells it, and what moved.

        The peer is asked in our caller's name. Raises unknown_peer, queue_full, compat_mismatch, peer_failed, and what
        an import may be refused with.
        """
        peer = self.peers.find(wanted.source)
        if self._num_running >= _MOST_PULLS:
            raise ServiceError("queue_full", "too many pulls run; try again later", retry_after=1.0)
        settings = self._service.settings
        line = PeerLine(peer, authorization, settings.receive_timeout, settings.max_body_bytes, self._threads)
        self._num_running += 1
        try:
            with closing(line):
                return await self._pull(wanted, tenant, line)
        finally:
            self._num_running -= 1

    async def _pull(self, wanted: PullCall, tenant: str, line: PeerLine) -> dict[str, Any]:
        engine, worker, began = self._service.engine, self._service.worker, time.perf_counter_ns()
        source = await line.ask("GET", "/v1/worker")
        if source.get("compat") != worker.compat:
            raise compat_mismatch(worker.compat)
        mover = self._mover(wanted.mover, source, line)
        given, state = await self._tail(wanted, line)
        incoming = await engine.call_for(tenant, arrivals.begin, worker, given, tenant)
        try:
            spans = [_span(cache, part, state, line) for cache, part in incoming.parts.items()]
            move = Move(line, incoming, spans, str(source.get("epoch")), _int(source, "max_body_bytes", line))
            asked = time.perf_counter_ns()
            await mover.move(move)
            brought = time.perf_counter_ns()
            await verify(engine, move)
            told = await engine.call_for(tenant, self._finish, incoming)
        except BaseException:
            await engine.call_for(tenant, arrivals.abandon, worker, incoming)
            raise
        moved = _moved(mover, incoming, spans)
        self._bytes.labels(mover.name).inc(moved["entry_bytes"] + moved["open_row_bytes"])
        marks = {"ask": asked - began, "move": brought - asked, "verify": time.perf_counter_ns() - brought}
        return told | {"moved": moved | {"timings_us": {phase: ns // 1000 for phase, ns in marks.items()}}}

    def _mover(self, wanted: str, source: Mapping[str, Any], line: PeerLine) -> BlockMover:
        """The one that was asked for, or the fastest that both sides have."""
        offered = source.get("movers")
        both = [name for name in reversed(NAMES) if name in self.movers and name in (offered or ())]
        if wanted == "auto" and both:
            return self.movers[both[0]]
        if wanted not in both:
            raise peer_failed(line.peer, "refused", f"mover {wanted} is not there on both sides")
        return self.movers[wanted]

    async def _tail(self, wanted: PullCall, line: PeerLine) -> tuple[ImportCall, dict[str, Any]]:
        """What is committed, with the open rows, and the pages of just that state. The peer's drafts become final."""
        version = {"version": wire.PROTOCOL_VERSION}
        exported = await line.ask("POST", request_path(wanted.request_id, "/export"), version | {"entries": False})
        state = (await line.ask("GET", request_path(wanted.request_id))).get("compressors", {})
        try:
            body = {"version": wire.PROTOCOL_VERSION, "id": wanted.request_id} | exported
            given = calls.parse_import(body, self._service.worker.rules, self._service.worker.entry_bytes)
        except ServiceError as error:
            raise peer_failed(
                line.peer, "refused", f"what it exported is refused: {error}", refusal=error.code
            ) from None
        parts = {name: _held(part, state.get(name), line) for name, part in given.parts.items()}
        return ImportCall(given.request_id, given.compat, parts), state

    def _finish(self, incoming: Incoming) -> dict[str, Any]:
        arrivals.finish(self._service.worker, incoming)
        tenant, request_id = incoming.key
        return self._service.worker.request(request_id, tenant)


def _int(message: Mapping[str, Any], name: str, line: PeerLine) -> int:
    value = message.get(name)
    if type(value) is not int:
        raise peer_failed(line.peer, "refused", f"it does not tell its {name}")
    return value


def _held(part: ImportPart, state: Mapping[str, Any] | None, line: PeerLine) -> ImportPart:
    """The part, with the entry from which on the peer has them. Raises peer_failed: changed."""
    if state is None or state.get("committed") != part.committed:
        raise peer_failed(line.peer, "changed", "the request went on meanwhile; hand it over between its steps")
    first = _int({"first_entry": 0} | dict(state), "first_entry", line)
    if not 0 <= first <= part.first_entry:  # that of a part without entries is their number
        raise peer_failed(line.peer, "refused", f"it cannot have entries from {first} on")
    return replace(part, first_entry=first)


def _span(cache: CompressorCache, part: ImportPart, state: Mapping[str, Any], line: PeerLine) -> Span:
    handles = state[cache.name].get("pages")
    if not isinstance(handles, list) or not set(map(type, handles)) <= {str}:
        raise peer_failed(line.peer, "refused", "it does not tell the pages of the request")
    return Span(cache, part.first_entry, cache.compressor.geometry.num_entries(part.committed), tuple(handles))


def _moved(mover: BlockMover, incoming: Incoming, spans: list[Span]) -> dict[str, Any]:
    """What a client is told of it."""
    open_rows = [part.open_rows for part in incoming.parts.values()]
    return {
        "mover": mover.name,
        "num_entries": sum(span.end - span.first for span in spans),
        "entry_bytes": sum(span.num_bytes for span in spans),
        "num_open_rows": sum(rows.shape[0] for rows in open_rows),
        "open_row_bytes": sum(len(rows.data) for rows in open_rows),
    }
