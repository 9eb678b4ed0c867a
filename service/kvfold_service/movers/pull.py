"""Take a request over from a peer: who it is → handles, tail → slot and pages → entries → verified → known.

The peer keeps its copy and goes on with its other requests. If anything fails, nothing is kept here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from prometheus_client import Counter

from kvfold_client import wire
from kvfold_client.wire import Peer
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

log = logging.getLogger("kvfold")
_MOST_PULLS: Final = 8
"""At a time; each has a thread that waits for its peer."""
_TRIES: Final = 3
"""For handles and tail of one moment, of a request that goes on."""


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
        self._warned: set[str] = set()
        """Peers that NIXL is of no use with."""
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
        settings, worker = self._service.settings, self._service.worker
        line = PeerLine(
            peer,
            authorization,
            wanted.request_id,
            worker.caches.compressors[0].name,
            patience=settings.receive_timeout,
            most_bytes=settings.max_body_bytes,
            threads=self._threads,
        )
        self._num_running += 1
        try:
            async with line:
                return await self._pull(wanted, tenant, line)
        finally:
            self._num_running -= 1

    async def _pull(self, wanted: PullCall, tenant: str, line: PeerLine) -> dict[str, Any]:
        engine, worker, began = self._service.engine, self._service.worker, time.perf_counter_ns()
        source = await line.ask("GET", "/v1/worker")
        if source.get("compat") != worker.compat:
            raise compat_mismatch(worker.compat)
        epoch, peer_limit = str(source.get("epoch")), _int(source, "max_body_bytes", line, 1)
        mover = await self._mover(wanted.mover, source, epoch, line)
        given, handles = await self._tail(wanted, line)
        incoming = await engine.call_for(tenant, arrivals.begin, worker, given, tenant)
        try:
            spans = [_span(cache, part, handles[cache.name]) for cache, part in incoming.parts.items()]
            move = Move(line, incoming, spans, epoch, peer_limit)
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

    async def _mover(self, wanted: str, source: Mapping[str, Any], epoch: str, line: PeerLine) -> BlockMover:
        """The one that was asked for, or the fastest that works with this peer; they have met."""
        with line.reading("its movers"):
            both = [name for name in reversed(NAMES) if name in self.movers and name in source["movers"]]
        for name in both if wanted == "auto" else {wanted} & set(both):
            mover = self.movers[name]
            try:
                await mover.meet(line, epoch)
            except ServiceError as error:
                if wanted != "auto" or error.details.get("reason") != "refused":
                    raise
                self._warn(line.peer, mover, error)
            else:
                return mover
        raise peer_failed(line.peer, "refused", f"mover {wanted} is not there on both sides")

    def _warn(self, peer: Peer, mover: BlockMover, error: ServiceError) -> None:
        """Once for each peer."""
        if peer.name not in self._warned:
            self._warned.add(peer.name)
            log.warning("pulls from peer %s go without %s: %s", peer.name, mover.name, error)

    async def _tail(self, wanted: PullCall, line: PeerLine) -> tuple[ImportCall, dict[str, tuple[str, ...]]]:
        """What is committed, with the open rows, and handles of the pages. The peer's drafts become final.

        The handles come first: as long as they are valid, what is exported is of the request that they name.
        """
        for _ in range(_TRIES):
            state = await line.ask("GET", request_path(wanted.request_id))
            given = await self._exported(wanted, line)
            with line.reading("the state of its request"):
                held = {name: part for name, part in state["compressors"].items() if part["committed"]}
                if {name: part["committed"] for name, part in held.items()} == _committed(given):
                    parts = {name: _held(part, held[name], line) for name, part in given.parts.items()}
                    handles = {name: _handles(part) for name, part in held.items()}
                    return ImportCall(given.request_id, given.compat, parts), handles
        raise peer_failed(line.peer, "changed", "the request goes on too fast; hand it over between its steps")

    async def _exported(self, wanted: PullCall, line: PeerLine) -> ImportCall:
        message = {"version": wire.PROTOCOL_VERSION, "entries": False}
        exported = await line.ask("POST", request_path(wanted.request_id, "/export"), message)
        try:
            body = exported | {"id": wanted.request_id}
            return calls.parse_import(body, self._service.worker.rules, self._service.worker.entry_bytes)
        except ServiceError as error:
            raise peer_failed(
                line.peer, "refused", f"what it exported is refused: {error}", refusal=error.code
            ) from None

    def _finish(self, incoming: Incoming) -> dict[str, Any]:
        arrivals.finish(self._service.worker, incoming)
        tenant, request_id = incoming.key
        return self._service.worker.request(request_id, tenant)


def _int(message: Mapping[str, Any], name: str, line: PeerLine, least: int) -> int:
    value = message.get(name)
    if type(value) is not int or value < least:
        raise peer_failed(line.peer, "refused", f"it does not tell its {name}")
    return value


def _committed(given: ImportCall) -> dict[str, int]:
    return {name: part.committed for name, part in given.parts.items() if part.committed}


def _held(part: ImportPart, state: Mapping[str, Any], line: PeerLine) -> ImportPart:
    """The part, with the entry from which on the peer has them."""
    first = _int({"first_entry": 0} | dict(state), "first_entry", line, 0)
    if first > part.first_entry:  # that of a part without entries is their number
        raise peer_failed(line.peer, "refused", f"it cannot have entries from {first} on")
    return replace(part, first_entry=first)


def _handles(state: Mapping[str, Any]) -> tuple[str, ...]:
    handles = state["pages"]
    if not isinstance(handles, list) or not set(map(type, handles)) <= {str}:
        raise TypeError("pages are no handles")
    return tuple(handles)


def _span(cache: CompressorCache, part: ImportPart, handles: tuple[str, ...]) -> Span:
    return Span(cache, part.first_entry, cache.compressor.geometry.num_entries(part.committed), handles)


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
