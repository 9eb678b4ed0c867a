"""movers by NIXL: out of a peer's registered pages into ours, between two processes; what a dying peer leaves behind.

The wheels' UCX runs on any CPU: shared memory where the kernel lets it, TCP over loopback else.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from kvfold_client import Client, wire
from kvfold_client.errors import Malformed, PeerFailed
from kvfold_kernels import backends
from kvfold_kernels.geometry import Geometry, PageLayout, entry_format
from kvfold_kernels.pages import read_entries, write_rows
from kvfold_service import settings as options
from kvfold_service.movers.agent import Agent
from kvfold_service.movers.descriptors import MOST_BYTES, MOST_RUNS, Side, batches, runs
from kvfold_service.movers.peer import PeerLine
from kvfold_service.worker import Worker
from tests.fleet_cases import Town, feed, other_pages, several_servers, towns
from tests.service_cases import CSA, NAMES, RATIO, Process, alone, no_start, stream

pytestmark = several_servers
town = pytest.fixture(towns)


# -- descriptors ---------------------------------------------------------------------------------------------------


def layouts(name: str, kind: str) -> list[PageLayout]:
    fmt = entry_format(name, Geometry(kind, 4, 128, 1))
    return [
        PageLayout.of(fmt, entries, None if pad is None else (entries * fmt.entry_bytes // 16 + pad) * 16)
        for entries, pad in ((1, None), (2, 3), (3, 1), (5, None), (8, 2), (64, None))
    ]


@pytest.mark.parametrize(("name", "kind"), [("fp8_ds_mla", "csa"), ("bf16", "csa"), ("indexer_mxfp4", "indexer")])
def test_the_same_entries_in_any_two_layouts(name, kind):
    """What the runs copy is what page-free rows would: between every two layouts, from any first entry on."""
    dice = np.random.default_rng(5)
    for theirs in layouts(name, kind):
        for ours in layouts(name, kind):
            first, end = sorted(dice.integers(0, 70, 2))
            first, end = int(first), int(end) + 1
            rows = torch.from_numpy(dice.integers(1, 256, (end - first, theirs.format.entry_bytes), np.uint8))
            sides, memories, slots = [], [], []
            for layout in (theirs, ours):
                num_pages = (end - 1) // layout.entries - first // layout.entries + 1
                memory = torch.zeros((num_pages + 3, layout.page_bytes), dtype=torch.uint8)
                page = dice.permutation(num_pages + 3)[:num_pages]
                entry = np.arange(first, end)
                at = page[entry // layout.entries - first // layout.entries] * layout.entries + entry % layout.entries
                sides.append(Side(layout, memory.data_ptr() + page * layout.page_bytes, 0))
                memories.append(memory)
                slots.append(torch.from_numpy(at))
            write_rows(memories[0], slots[0], theirs, rows)
            remote, local = runs(first, end, *sides)
            assert (remote[:, 1] == local[:, 1]).all()
            assert remote[:, 1].sum() == rows.numel()
            _copy(memories, remote, local)
            assert torch.equal(read_entries(memories[1], slots[1], ours), rows)
            assert int((memories[1] != 0).sum()) == int((rows != 0).sum())  # and nothing else was written


def _copy(memories: list[torch.Tensor], remote: np.ndarray, local: np.ndarray) -> None:
    flat = [memory.view(-1) for memory in memories]
    for (source, size, _), (target, _, _) in zip(remote.tolist(), local.tolist(), strict=True):
        source, target = source - memories[0].data_ptr(), target - memories[1].data_ptr()
        flat[1][target : target + size] = flat[0][source : source + size]


def test_whole_pages_of_equal_layouts_are_one_run_each():
    layout = layouts("fp8_ds_mla", "csa")[3]
    sides = [Side(layout, base + np.arange(13) * layout.page_bytes, 0) for base in (1 << 20, 1 << 30)]
    remote, _ = runs(0, 60, *sides)
    assert remote[:, 1].tolist() == [5 * layout.format.entry_bytes] * 12
    remote, _ = runs(2, 61, *sides)
    assert len(remote) == 11 + 2 * 2


def test_transfers_are_bounded():
    size = (1 << 20) + 1
    remote = np.full((100, 3), size, np.uint64)
    assert {len(part) for part, _ in batches(remote, remote)} == {MOST_BYTES // size, 100 % (MOST_BYTES // size)}
    many = np.ones((3 * MOST_RUNS + 1, 3), np.uint64)
    assert [len(part) for part, _ in batches(many, many)] == [MOST_RUNS] * 3 + [1]
    assert batches(many[:0], many[:0]) == []
    huge = np.full((2, 3), 2 * MOST_BYTES, np.uint64)
    assert [len(part) for part, _ in batches(huge, huge)] == [1, 1]


# -- two processes -------------------------------------------------------------------------------------------------


class Two:
    """The giver `p` is a process; the takers `d`, with its pages, and `e`, with others, run here. UCX over TCP."""

    def __init__(self, folder: Path) -> None:
        self.town = Town(folder)
        self.process = Process(folder, "--nixl", "--peers-file", str(self.town.file))
        self.town.add("d", nixl=True)
        self.town.add("e", nixl=True, manifest=other_pages())
        self.town.file.write_text(self.town.file.read_text() + f"p {self.process.url}\n")
        urls = {"p": self.process.url, "d": self.town.workers["d"].url, "e": self.town.workers["e"].url}
        self.clients = {name: Client(url) for name, url in urls.items()}
        self.worker = self.town.workers["d"].worker

    def release(self, *ids: str) -> None:
        for client in self.clients.values():
            for id in ids:
                client.release(id)

    def end(self) -> None:
        self.process.process.kill()
        self.process.wait()
        for client in self.clients.values():
            client.close()
        self.town.end()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        made = Two(tmp_path_factory.mktemp("nixl"))
        yield made
        made.end()


@pytest.fixture
def two(shared: Two) -> Iterator[Two]:
    yield shared
    if shared.process.process.poll() is None:
        shared.release("r", "s")


def assert_equal(giver: Client, taker: Client) -> None:
    theirs, ours = giver.export("r"), taker.export("r")
    for name in NAMES:
        np.testing.assert_array_equal(ours.compressors[name].entries, theirs.compressors[name].entries, strict=True)
        np.testing.assert_array_equal(ours.compressors[name].open_rows, theirs.compressors[name].open_rows)


def test_entries_come_by_nixl(two: Two):
    """To pages of the same layout and of another, at many lengths; each goes on."""
    p, d, e = two.clients.values()
    for num_tokens in (1, 3, 4, 7, 8, 9, 31, 45, 64, 90):
        feed(p, "r", 0, num_tokens)
        for taker in (d, e):
            assert taker.pull("r", "p").mover == "nixl"
            assert_equal(p, taker)
            feed(taker, "r", num_tokens, 96)
        assert_equal(d, e)
        two.release("r")


def test_either_mover_by_name(two: Two):
    p, d, e = two.clients.values()
    feed(p, "r", 0, 45)
    assert d.pull("r", "p", mover="http").mover == "http"
    assert e.pull("r", "d", mover="nixl").mover == "nixl"
    assert_equal(p, e)


def test_what_a_peer_is_told(two: Two):
    """Addresses are plain integers, for handles only; the metadata is NIXL's own format, no pickle."""
    p = two.clients["p"]
    feed(p, "r", 0, 45)
    handles = p.request("r")[CSA].pages
    with httpx.Client(base_url=two.process.url, headers={"Content-Type": wire.MSGPACK}) as ask:
        body = wire.encode(wire.MSGPACK, {"version": 1, "handles": list(handles)})
        told = wire.decode(wire.MSGPACK, ask.post("/v1/pages/locate", content=body).content)
        assert [page["handle"] for page in told["pages"]] == list(handles)
        assert {type(page["address"]) for page in told["pages"]} == {int}
        assert told["layouts"][CSA].keys() == {"page_entries", "page_bytes", "memory", "device"}
        metadata = wire.decode(wire.MSGPACK, ask.get("/v1/nixl").content)["metadata"]["data"]
        assert bytes(metadata[:10]) == b"nixlSerDes"
        p.release("r")
        assert ask.post("/v1/pages/locate", content=body).status_code == 410


@contextmanager
def before_the_read(two: Two, event: Callable[[], None]) -> Iterator[None]:
    """The event happens when all questions are answered, just before bytes are asked for."""
    real = Agent.post

    def post(agent: Agent, handle: Any) -> str:
        event()
        return real(agent, handle)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agent, "post", post)
        yield


def test_a_peer_that_hangs_and_comes_back(two: Two):
    """An error within a second. Its bytes still come, late: until then the pages are nobody's."""
    p, d, _ = two.clients.values()
    feed(p, "r", 0, 90)
    d.pull("r", "p")  # they know each other
    d.release("r")
    pools = [group.pool for group in two.worker.caches.groups]
    free = [pool.num_free for pool in pools]
    try:
        with before_the_read(two, two.process.stop):
            began = time.monotonic()
            with pytest.raises(PeerFailed) as caught:
                d.pull("r", "p")
            assert time.monotonic() - began < 1.5
        assert caught.value.details == {"peer": "p", "reason": "died"}
        two.worker.check_integrity()
        assert [pool.num_free for pool in pools] < free
        (aside,) = two.worker.aside
        waiting = _pages(two.worker, aside.request.slot)
        for pages, held in waiting:
            pages[held] = 0xAA
        feed(d, "r", 0, 90)  # the id is free, and gets pages of its own
        before = d.export("r")
    finally:
        two.process.signal(signal.SIGCONT)
    until(lambda: not two.worker.aside)
    assert any(bool((pages[held] != 0xAA).any()) for pages, held in waiting)  # so late
    after = d.export("r")
    for name in NAMES:
        np.testing.assert_array_equal(after.compressors[name].entries, before.compressors[name].entries)
    d.release("r")
    assert [pool.num_free for pool in pools] == free
    assert d.pull("r", "p").mover == "nixl"
    assert_equal(p, d)


def asked(patch: pytest.MonkeyPatch, change: Callable[[str, dict[str, Any]], Any]) -> None:
    """What comes back to a taker's calls goes through `change(path, message)`; None: it stays."""
    real = PeerLine.ask

    async def ask(line: PeerLine, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        message = await real(line, method, path, *args, **kwargs)
        changed = change(path, message)
        return message if changed is None else changed

    patch.setattr(PeerLine, "ask", ask)


def test_a_giver_that_decodes_meanwhile(two: Two, monkeypatch):
    """Steps close entries in the last page, and in new ones, at any moment behind the export: its state comes."""
    p, d, e = two.clients.values()
    at, moments = [0], [""]

    def go_on(path: str, message: Any = None) -> None:
        if path.endswith(moments[0]) and at[0] < 92:
            feed(p, "r", at[0], at[0] + 4)
            at[0] += 4

    asked(monkeypatch, go_on)
    with before_the_read(two, lambda: go_on("post")):
        for num_tokens in (3, 11, 12, 44, 45, 47):
            for moments[0] in ("/export", "/v1/pages/locate", "post", "/v1/verify"):
                for taker in (d, e):
                    feed(p, "r", 0, num_tokens)
                    at[0] = num_tokens
                    assert taker.pull("r", "p").mover == "nixl"
                    assert at[0] > num_tokens or num_tokens < 4
                    for name, part in taker.export("r").compressors.items():
                        expected = alone(backends.load("cpu"), "r", name)[: num_tokens // RATIO[name]]
                        np.testing.assert_array_equal(part.entries, expected, strict=True)
                        np.testing.assert_array_equal(part.open_rows, stream(name, "r")[part.open_positions])
                    two.release("r")


LOCATE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda m: [],
    "no layout": lambda m: m["layouts"].clear(),
    "a number for the layouts": lambda m: m.update(layouts=5),
    "a number for the pages": lambda m: m.update(pages=5),
    "an address of text": lambda m: m["pages"][0].update(address="1"),
    "pages of text": lambda m: m["layouts"][NAMES[0]].update(page_entries="2"),
    "pages of half an entry": lambda m: m["layouts"][NAMES[0]].update(page_entries=1.5),
    "pages of no entry": lambda m: m["layouts"][NAMES[0]].update(page_entries=0),
    "another memory": lambda m: m["layouts"][NAMES[0]].update(memory=["DRAM"]),
    "another device": lambda m: m["layouts"][NAMES[0]].update(device=1 << 70),
}


def test_a_peer_that_tells_nonsense(two: Two, monkeypatch):
    """Whatever it says of its pages, it is the peer that failed, and nothing is kept."""
    p, d, _ = two.clients.values()
    feed(p, "r", 0, 45)
    nonsense: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [("/v1/pages/locate", f) for f in LOCATE.values()]
    nonsense.append(("/v1/requests/r", lambda m: m["compressors"][CSA].update(pages=[])))
    for call, change in nonsense:
        with monkeypatch.context() as patch:
            asked(patch, lambda path, message, call=call, change=change: change(message) if path == call else None)
            with pytest.raises(PeerFailed) as caught:
                d.pull("r", "p", mover="nixl")
        assert caught.value.details == {"peer": "p", "reason": "refused"}, caught.value
        assert not two.worker.requests
    d.pull("r", "p", mover="nixl")


def _pages(worker: Worker, slot: int) -> list[tuple[torch.Tensor, np.ndarray]]:
    """The pools of a slot's pages, and which pages those are."""
    caches = worker.caches.compressors
    return [(cache.group.pages, cache.page_table[slot, : cache.num_pages[slot]].copy()) for cache in caches]


def test_a_request_that_is_another_by_now(two: Two):
    """Its pages are another's when they are read: what came is not kept."""
    p, d, _ = two.clients.values()
    feed(p, "r", 0, 90)

    def another() -> None:
        p.release("r")
        feed(p, "s", 0, 90)

    with before_the_read(two, another), pytest.raises(PeerFailed) as caught:
        d.pull("r", "p")
    assert caught.value.details["reason"] == "changed"
    assert not two.worker.requests
    assert not two.worker.aside
    p.release("s")


def test_a_peer_that_is_killed(two: Two):
    """The last of this process: its connection breaks, and what was on it with it."""
    p, d, _ = two.clients.values()
    feed(p, "r", 0, 90)
    d.pull("r", "p")
    d.release("r")
    with before_the_read(two, two.process.process.kill):
        began = time.monotonic()
        with pytest.raises(PeerFailed) as caught:
            d.pull("r", "p")
        assert time.monotonic() - began < 1.2
    assert caught.value.details == {"peer": "p", "reason": "died"}
    until(lambda: not two.worker.aside)
    two.worker.check_integrity()
    assert not two.worker.requests
    assert two.process.process.stdout.read() == ""  # but for the ready line; NIXL would log there


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# -- who may -------------------------------------------------------------------------------------------------------


def test_without_nixl(town: Town):
    for name in ("a", "b"):
        town.add(name)
    with Client(town.workers["a"].url) as a, Client(town.workers["b"].url) as b:
        feed(a, "r", 0, 20)
        with pytest.raises(PeerFailed, match="mover nixl is not there on both sides"):
            b.pull("r", "a", mover="nixl")
        assert b.pull("r", "a", mover="auto").mover == "http"
        with pytest.raises(Malformed, match="mover must be one of"):
            b.pull("r", "a", mover="pigeon")
    reply = httpx.get(town.workers["a"].url + "/v1/nixl")
    assert wire.decode(wire.MSGPACK, reply.content)["metadata"]["shape"] == [0]
    body, headers = wire.encode(wire.MSGPACK, {"version": 1, "handles": []}), {"Content-Type": wire.MSGPACK}
    reply = httpx.post(town.workers["a"].url + "/v1/pages/locate", content=body, headers=headers)
    assert wire.decode(wire.MSGPACK, reply.content)["code"] == "malformed"


def test_a_read_that_takes_longer_than_the_lease(town: Town):
    """The giver's lease of a second is renewed beside it."""
    for name in ("a", "b"):
        town.add(name, nixl=True).worker.lease_seconds = 1.0
    real, slow = Agent.post, [2.0]

    def post(agent: Agent, handle: Any) -> str:
        time.sleep(slow.pop() if slow else 0)
        return real(agent, handle)

    with Client(town.workers["a"].url) as a, Client(town.workers["b"].url) as b, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agent, "post", post)
        feed(a, "r", 0, 45)
        assert b.pull("r", "a").mover == "nixl"
        assert not slow
        assert_equal(a, b)


def test_the_keys_of_the_memory_are_for_peers_only(town: Town, tmp_path, caplog):
    """A tenant may pull; what would let it read everybody's pages is asked for with the peers' own token.

    Without one that is good, entries come by http, which is said once.
    """
    tokens, ours = "a-token-of-team-a team-a step,pull\nthe-token-of-peers fleet admin\n", tmp_path / "peer"
    (tmp_path / "tokens").write_text(tokens)
    ours.write_text("the-token-of-peers\n")
    town.add("a", token_file=tmp_path / "tokens", nixl=True)
    town.add("b", token_file=tmp_path / "tokens", nixl=True, peer_token_file=ours)
    town.add("c", token_file=tmp_path / "tokens", nixl=True)
    clients = [Client(town.workers[name].url, token="a-token-of-team-a", retries=0) for name in ("a", "b", "c")]
    feed(clients[0], "r", 0, 45)
    feed(clients[0], "s", 0, 48, draft_tokens=[3])
    assert clients[1].pull("r", "a").mover == "nixl"
    for _ in range(2):
        assert clients[2].pull("r", "a").mover == "http"
        clients[2].release("r")
    (warning,) = [record.getMessage() for record in caplog.records if "without nixl" in record.getMessage()]
    assert "from peer a" in warning
    assert "--peer-token-file" in warning
    with pytest.raises(PeerFailed, match="--peer-token-file must hold") as caught:
        clients[2].pull("r", "a", mover="nixl")
    assert (caught.value.details["reason"], caught.value.details["refusal"]) == ("refused", "forbidden")
    with pytest.raises(PeerFailed):
        clients[2].pull("s", "a", mover="nixl")
    assert clients[0].truncate("s", 46)[CSA].committed == 46  # drafts: nothing was asked of it but who gives it
    for client in clients:
        client.close()


@pytest.mark.parametrize("text", ["", "two words", "two\nlines"])
def test_a_peer_token_file_that_is_none(tmp_path, text):
    (tmp_path / "token").write_text(text)
    settings = options.read(["--manifest=tiny", "--weights=random:1", f"--peer-token-file={tmp_path / 'token'}"])
    with no_start("--peer-token-file"):
        options.peer_authorization(settings)
