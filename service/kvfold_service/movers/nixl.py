"""The mover for RDMA, NVLink and shared memory: NIXL over UCX, out of the peer's pages straight into ours.

All page pools are registered at start. Whoever has a worker's NIXL metadata can read all of them: only peers with the
admin token get it. What is read is described by addresses that the peer tells for handles of our caller's, as plain
integers, and by our own pages; descriptors are made here, never read from a peer.

A NIXL read cannot be called back: its bytes may still arrive after it was released. So pages that one may still write
to are set aside until it has ended, however long that takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvfold_client import wire
from kvfold_kernels.geometry import PageLayout
from kvfold_service import arrivals
from kvfold_service.errors import ServiceError
from kvfold_service.movers import Move, Span
from kvfold_service.movers.agent import Agent, AgentError
from kvfold_service.movers.descriptors import U64, Side, batches, runs
from kvfold_service.movers.peer import PeerLine, peer_failed

if TYPE_CHECKING:
    from kvfold_service.service import Service

log = logging.getLogger("kvfold")
_HANDLES_AT_A_TIME: Final = 16384
_POLL_S: Final = 0.0002
_SETTLE_S: Final = 0.1


class NixlMover:
    """Reads entries out of the peer's registered pages."""

    name = "nixl"

    def __init__(self, service: Service, agent: Agent, authorization: str | None) -> None:
        """`authorization`: what peers are asked with for their metadata; None: our caller's."""
        self._service, self._agent, self._authorization = service, agent, authorization
        self._settling: set[asyncio.Task[None]] = set()
        self._met: dict[str, tuple[str, str]] = {}
        """Peer's name → its epoch, and its agent's name."""

    async def meet(self, line: PeerLine, peer_epoch: str) -> None:
        """Raises peer_failed, also when it does not give its metadata to our token."""
        await self._meet(line, peer_epoch)

    async def move(self, move: Move) -> None:
        agent = await self._meet(move.line, move.peer_epoch)
        for span in move.spans:
            if span.first < span.end:
                theirs, memory = await _locate(move.line, span)
                for remote, local in batches(*runs(span.first, span.end, theirs, self._ours(move, span))):
                    await self._read(move, _Read(self._agent, agent, local, remote, memory))

    async def _meet(self, line: PeerLine, epoch: str) -> str:
        """The name of the peer's agent, which ours knows from now on."""
        known = self._met.get(line.peer.name)
        if known is not None and known[0] == epoch:
            return known[1]
        try:
            reply = await line.ask("GET", "/v1/nixl", authorization=self._authorization)
        except ServiceError as error:
            if error.details.get("refusal") not in ("unauthorized", "forbidden"):
                raise
            sentence = f"its NIXL metadata is for the role admin; --peer-token-file must hold such a token ({error})"
            raise peer_failed(line.peer, "refused", sentence, refusal=error.details["refusal"]) from None
        with line.reading("its NIXL metadata"):
            metadata = bytes(wire.tensor_of(reply.get("metadata"), "metadata").data)
        try:
            name = await line.while_alive(lambda: self._agent.meet(metadata))
        except (AgentError, UnicodeDecodeError) as error:
            raise peer_failed(line.peer, "refused", f"its NIXL metadata is no use: {error}") from None
        self._met[line.peer.name] = epoch, name
        return name

    async def _read(self, move: Move, read: _Read) -> None:
        line = move.line
        try:
            await line.while_alive(lambda: read.run(line))
        except AgentError as error:  # the connection is gone, and what was on it
            read.has_ended = True
            self._met.pop(line.peer.name, None)
            self._agent.forget(read.remote_agent)
            raise peer_failed(line.peer, "died", f"NIXL cannot read from it ({error})") from None
        finally:
            if read.has_ended:
                read.release()
            else:
                await self._service.engine.call(arrivals.set_aside, self._service.worker, move.incoming)
                self._settling.add(task := asyncio.create_task(self._settle(move, read)))
                task.add_done_callback(self._settling.discard)
        if read.state != "DONE":
            self._met.pop(line.peer.name, None)
            self._agent.forget(read.remote_agent)
            raise peer_failed(line.peer, "died", "a NIXL transfer from it failed")

    async def _settle(self, move: Move, read: _Read) -> None:
        """Give the pages back when nothing can write to them any more."""
        log.warning("a NIXL transfer from peer %s has not ended; its pages wait", move.line.peer.name)
        while read.state == "PROC":
            await asyncio.sleep(_SETTLE_S)
            try:
                read.look()
            except AgentError:
                break
        read.release()
        await self._service.engine.call(arrivals.give_back, self._service.worker, move.incoming)
        log.info("the pages of a transfer from peer %s are free", move.line.peer.name)

    def _ours(self, move: Move, span: Span) -> Side:
        cache, slot = span.cache, move.incoming.request.slot
        pages = cache.page_table[slot, int(cache.first_page[slot]) : int(cache.num_pages[slot])].astype(np.int64)
        group = cache.group
        return Side(group.layout, group.pages.data_ptr() + pages * group.layout.page_bytes, self._agent.device)


class _Read:
    """One transfer. `has_ended`: nothing of it is on its way any more."""

    def __init__(self, agent: Agent, remote_agent: str, local: U64, remote: U64, memory: str) -> None:
        self._agent, self.remote_agent, self._arguments = agent, remote_agent, (local, remote, memory)
        self._handle: Any = None
        self.state, self.has_ended = "NONE", True

    def run(self, line: PeerLine) -> None:
        """On a thread, until it has ended or the line is cut."""
        self._handle = self._agent.prepare(self.remote_agent, *self._arguments)
        self.has_ended = False
        self.state = self._agent.post(self._handle)
        while self.state == "PROC" and not line.is_cut:
            time.sleep(_POLL_S)
            self.look()
        self.has_ended = self.state != "PROC"

    def look(self) -> None:
        self.state = self._agent.state(self._handle)

    def release(self) -> None:
        if self._handle is not None:
            with contextlib.suppress(AgentError):  # of a connection that is gone
                self._agent.release(self._handle)


async def _locate(line: PeerLine, span: Span) -> tuple[Side, str]:
    """The peer's pages of a span, and the kind of their memory."""
    addresses: list[int] = []
    where: set[tuple[Any, ...]] = set()
    for i in range(0, len(span.handles), _HANDLES_AT_A_TIME):
        handles = list(span.handles[i : i + _HANDLES_AT_A_TIME])
        reply = await line.ask("POST", "/v1/pages/locate", {"version": wire.PROTOCOL_VERSION, "handles": handles})
        with line.reading("where its pages lie"):
            addresses += [_address(page, span) for page in reply["pages"]]
            told = reply["layouts"][span.cache.name]
            where.add(tuple(told[name] for name in ("page_entries", "page_bytes", "device", "memory")))
    with line.reading("where its pages lie"):
        ((page_entries, page_bytes, device, memory),) = where
        if not type(page_entries) is type(page_bytes) is type(device) is int or not 0 <= device < 1 << 16:
            raise ValueError(page_entries, page_bytes, device)
        if memory not in ("DRAM", "VRAM"):
            raise ValueError(memory)
        layout = PageLayout.of(span.cache.group.layout.format, page_entries, page_bytes)
    needed = -(-span.end // layout.entries) - span.first // layout.entries
    if len(addresses) != needed:
        raise peer_failed(line.peer, "changed", f"its pages of {span.cache.name} are not those of the request any more")
    return Side(layout, np.array(addresses, np.int64), device), memory


def _address(page: Mapping[str, Any], span: Span) -> int:
    address = page["address"]
    if type(address) is not int or not 0 < address < 1 << 62 or page["compressor"] != span.cache.name:
        raise ValueError(address)
    return address
