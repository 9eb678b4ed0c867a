"""Hand-over: a request that a second worker takes over goes on bit for bit, and only its tail's state moves."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from kvfold_client import Client
from kvfold_client.errors import CompatMismatch, PeerFailed, RequestExists, TransportError, TruncateTooFar, UnknownPeer
from kvfold_client.fleet import Fleet, NoWorker, WorkerLost
from tests.fleet_cases import Sequence, Town, feed, other_pages, several_servers, towns
from tests.service_cases import (
    CSA,
    HCA,
    INDEXER,
    NAMES,
    REAL,
    REAL_NAMES,
    SMALL,
    STREAM_TOKENS,
    open_positions,
    stream,
)

pytestmark = several_servers
town = pytest.fixture(towns)


def pair(town: Town, manifest: dict[str, Any] = SMALL, **options: Any) -> Fleet:
    """A prefill worker, and a decode worker of other pages and rings."""
    town.add("p", "prefill", manifest=manifest, **options)
    town.add("d", "decode", manifest=other_pages(manifest), **options)
    return town.fleet()


def go_through(fleet: Fleet, id: str, names: tuple[str, ...], before: int, end: int) -> None:
    """Prefill in chunks, hand-over, decode one by one and then in chunks."""
    sequence = Sequence(fleet, id, names=names)
    sequence.advance(before, max(1, before // 3))
    moved = fleet.hand_over(id)
    sequence.role = "decode"
    assert (moved.source, moved.target, moved.mover) == ("p", "d", "http")
    sequence.check()
    sequence.advance(min(before + 3, end), 1)
    sequence.advance(end, 50)
    sequence.check()
    assert sequence.recovered == 0
    fleet.release(id)


# -- bit for bit ---------------------------------------------------------------------------------------------------


def test_every_phase_of_small_windows(town: Town):
    """hca of 8, csa and indexer of 4: lengths around their boundaries, and each phase in between."""
    with pair(town) as fleet:
        for num_tokens in [*range(1, 19), 23, 24, 25, 63, 64, 65]:
            go_through(fleet, f"r{num_tokens}", NAMES, num_tokens, STREAM_TOKENS)


def test_every_phase_of_windows_of_128(town: Town):
    """The ratios of DeepSeek-V4: 127 to 130 and 255 to 257 tokens, which are all phases of csa too."""
    with pair(town, REAL) as fleet:
        for num_tokens in (127, 128, 129, 130, 255, 256, 257):
            go_through(fleet, f"r{num_tokens}", REAL_NAMES, num_tokens, 300)


def test_to_and_fro(town: Town):
    """At every third token to the other worker, each time in the role that it has not."""
    with pair(town) as fleet:
        sequence = Sequence(fleet, "r")
        for end in range(1, STREAM_TOKENS, 3):
            sequence.advance(end, 2)
            sequence.hand_over("decode" if sequence.role == "prefill" else "prefill")
            sequence.check()
        assert sequence.recovered == 0
        assert sum(bool(worker.worker.requests) for worker in town.workers.values()) == 1


# -- what moves ----------------------------------------------------------------------------------------------------


def test_only_the_tail_s_rows_move(town: Town):
    """90 tokens: entries, and the rows of the open windows. The bytes on the wire are these and little else."""
    with pair(town) as fleet:
        feed(fleet.client_for("r", "prefill"), "r", 0, 90)
        sent = town.workers["p"].service.metrics.bytes_out
        before = sent._value.get()
        moved = fleet.hand_over("r")
        on_the_wire = sent._value.get() - before
    entry_bytes = town.workers["p"].worker.entry_bytes
    ratio = {HCA: 8, CSA: 4, INDEXER: 4}
    row_bytes = {name: 4 * stream(name, "r").shape[1] for name in NAMES}
    assert moved.num_entries == sum(90 // ratio[name] for name in NAMES)
    assert moved.entry_bytes == sum(90 // ratio[name] * entry_bytes[name] for name in NAMES)
    assert moved.num_open_rows == sum(len(open_positions(name, 90)) for name in NAMES)
    assert moved.open_row_bytes == sum(len(open_positions(name, 90)) * row_bytes[name] for name in NAMES)
    payload = moved.entry_bytes + moved.open_row_bytes
    assert payload < on_the_wire < payload + 9000  # handles, digests, headers
    all_rows = 90 * sum(row_bytes.values())
    print(f"{moved.entry_bytes} B of entries, {moved.open_row_bytes} B of open rows, {on_the_wire:.0f} B on the wire")
    print(f"of {all_rows} B of rows that were sent to prefill")
    assert moved.open_row_bytes < all_rows / 8


def test_the_giver_goes_on_with_others(town: Town):
    """Steps of other requests run between the questions of a pull, and none of their bytes is another."""
    with pair(town) as fleet, Client(town.workers["p"].url) as client:
        others = [Sequence(fleet, f"other{i}") for i in range(2)]
        done, over = [0], threading.Event()

        def go_on() -> None:
            while not over.is_set():
                for other in others:
                    feed(client, other.id, other.at, other.at + 1)
                    other.at += 1
                    done[0] += 1
                    if other.at == STREAM_TOKENS:
                        other.check()
                        client.release(other.id)
                        other.at = 0

        thread = threading.Thread(target=go_on)
        thread.start()
        try:
            during = 0
            for i in range(10):
                sequence = Sequence(fleet, f"r{i}")
                sequence.advance(45 + i, 20)
                before = done[0]
                sequence.hand_over("decode")
                during += done[0] - before
                sequence.check()
                fleet.release(sequence.id)
        finally:
            over.set()
            thread.join()
        assert during > 0
        for other in others:
            if other.at:
                other.check()


# -- who gives, who takes ------------------------------------------------------------------------------------------


def test_a_copy_that_is_kept(town: Town):
    """`release=False`: the giver's copy stays as it was, and the taker goes its own way."""
    with pair(town) as fleet:
        sequence = Sequence(fleet, "r")
        sequence.advance(45, 45)
        sequence.hand_over("decode", release=False)
        sequence.advance(80, 10)
        sequence.check()
        kept = Sequence(fleet, "r", "prefill")
        kept.at = 45
        kept.check()
        fleet.release("r")
        assert not any(worker.worker.requests for worker in town.workers.values())


def test_an_owner_in_both_roles_keeps_it(town: Town):
    town.add("a")
    with town.fleet() as fleet:
        feed(fleet.client_for("r", "prefill"), "r", 0, 20)
        moved = fleet.hand_over("r")
        assert (moved.source, moved.target, moved.mover, moved.entry_bytes) == ("a", "a", "none", 0)
        assert moved.state[CSA].committed == 20
        with pytest.raises(NoWorker):
            fleet.hand_over("r", to="decode")  # away from a, and there is nobody else
        town.add("b")
        fleet.hand_over("r", to="prefill")
        feed(fleet.client_for("r", "prefill"), "r", 20, 21)


def test_away_from_a_worker_that_stops(town: Town):
    """Steps are refused, exports are not: it can be emptied in peace."""
    for name in ("a", "b"):
        town.add(name, "decode")
    with town.fleet() as fleet:
        sequence = Sequence(fleet, "r", "decode")
        sequence.advance(30, 30)
        source = fleet.worker_for("r", "decode").name
        town.workers[source].service.draining = True
        sequence.advance(60, 10)
        assert fleet.worker_for("r", "decode").name != source
        assert not town.workers[source].worker.requests
        sequence.check()


def test_workers_of_another_compat_are_not_asked(town: Town):
    """Nor do they take what is named to them: not a byte has moved, and the giver's drafts are as they were."""
    town.add("p", "prefill")
    town.add("other", "decode", manifest=SMALL | {"rms_eps": 1e-5})
    with town.fleet() as fleet:
        client = fleet.client_for("r", "prefill")
        feed(client, "r", 0, 13, draft_tokens=[2])
        with pytest.raises(NoWorker):
            fleet.hand_over("r")
        sent = town.workers["p"].service.metrics.bytes_out
        before = sent._value.get()
        with pytest.raises(CompatMismatch):
            fleet.client("other").pull("r", "p")
        assert sent._value.get() - before < 300  # a reply without entries, which renews the lease
        assert client.truncate("r", 12)[CSA].committed == 12
        feed(client, "r", 12, 14, draft_tokens=[2])
        town.add("d", "decode")
        fleet.look()
        fleet.hand_over("r")
        with pytest.raises(TruncateTooFar):
            fleet.client_for("r", "decode").truncate("r", 13)


# -- twice, and after a failure ------------------------------------------------------------------------------------


def test_once_more_after_a_lost_reply(town: Town):
    """What arrived the first time gives way; what somebody went on with there does not."""
    with pair(town) as fleet:
        sequence = Sequence(fleet, "r")
        sequence.advance(45, 45)
        taker = fleet.client("d")
        assert taker.pull("r", "p").mover == "http"  # and nobody heard of it
        with pytest.raises(RequestExists):
            taker.pull("r", "p")
        feed(taker, "r", 45, 46)
        with pytest.raises(RequestExists):
            fleet.hand_over("r")
        taker.release("r")
        taker.pull("r", "p")
        sequence.hand_over("decode")
        sequence.advance(60, 5)
        sequence.check()


def test_a_dead_giver_and_a_dead_taker(town: Town):
    """Which of the two died is told; from a dead taker the next owner takes it."""
    with pair(town) as fleet:
        town.add("d2", "decode")
        fleet.look()
        for id in ("r1", "r2", "r3", "r4", "r5"):
            feed(fleet.client_for(id, "prefill"), id, 0, 45)
        (first,) = [id for id in ("r1", "r2", "r3", "r4", "r5") if fleet._plane.owner(id, "decode").name == "d"][:1]
        town.workers["d"].kill()
        with pytest.raises(TransportError):
            fleet.hand_over(first)
        assert fleet.hand_over(first).target == "d2"
        other = next(id for id in ("r1", "r2", "r3", "r4", "r5") if id != first)
        town.workers["p"].kill()
        with pytest.raises(WorkerLost, match="worker p was lost with what it held of request"):
            fleet.hand_over(other)
        with pytest.raises(WorkerLost):
            fleet.client_for(other, "prefill")


def test_only_named_peers_are_asked(town: Town, caplog):
    """A name, never an address: nothing that a caller writes decides whom a worker connects to."""
    with pair(town) as fleet:
        feed(fleet.client_for("r", "prefill"), "r", 0, 20)
        taker = fleet.client("d")
        with pytest.raises(UnknownPeer):
            taker.pull("r", "q")
        with pytest.raises(Exception, match="malformed"):
            taker.pull("r", town.workers["p"].url)
        text = town.file.read_text()
        town.file.write_text("")
        with pytest.raises(UnknownPeer):
            taker.pull("r", "p")
        town.file.write_text(text + "nonsense\n")
        with pytest.raises(UnknownPeer):  # a bad file changes nothing: it is as empty as before
            taker.pull("r", "p")
        town.file.write_text(text)
        assert taker.pull("r", "p").num_entries
        caplog.clear()
        for num_warnings, spoil in enumerate((lambda: town.file.write_text("nonsense\n"), town.file.unlink), 1):
            spoil()
            with pytest.raises(RequestExists):  # the last good file stays in force
                taker.pull("r", "p")
            assert sum("--peers-file is left as it was" in text for text in caplog.messages) == num_warnings


def test_tenants_pull_their_own(town: Town, tmp_path):
    """The peer is asked with the caller's token: another tenant's request is unknown there."""
    (tmp_path / "tokens").write_text("a-token-of-team-a team-a step,pull\na-token-of-team-b team-b step,pull\n")
    for name, role in (("p", "prefill"), ("d", "decode")):
        town.add(name, role, token_file=tmp_path / "tokens")
    with town.fleet(token="a-token-of-team-a") as ours, town.fleet(token="a-token-of-team-b") as theirs:
        feed(ours.client_for("r", "prefill"), "r", 0, 20)
        feed(theirs.client_for("r", "prefill"), "r", 0, 30)
        assert ours.hand_over("r").state[CSA].committed == 20
        assert theirs.hand_over("r").state[CSA].committed == 30
        feed(ours.client_for("s", "prefill"), "s", 0, 20)
        with pytest.raises(Exception, match="unknown_request"):
            theirs.client("d").pull("s", "p")
    (tmp_path / "tokens").write_text("x-token-of-nobody team-a step,pull\n")
    stranger = town.add("x", "decode", token_file=tmp_path / "tokens")
    with Client(stranger.url, token="x-token-of-nobody") as client, pytest.raises(PeerFailed) as caught:
        client.pull("s", "p")
    assert (caught.value.details["reason"], caught.value.details["refusal"]) == ("refused", "unauthorized")


def test_a_range_of_entries(town: Town):
    with pair(town) as fleet:
        client = fleet.client_for("r", "prefill")
        feed(client, "r", 0, 45)
        whole = client.export("r").compressors[CSA].entries
        for first, end in ((0, 11), (3, 7), (10, 99), (11, 12), (5, 5), (40, 50)):
            got = client.entries("r", CSA, first, end)
            np.testing.assert_array_equal(got.entries, whole[first:end], strict=True)
            assert got.first_entry == min(first, 11)
        for arguments, code in (
            (("r", "none", 0, 1), "unknown_compressor"),
            (("s", CSA, 0, 1), "unknown_request"),
            (("r", CSA, 2, 1), "malformed"),
            (("r", CSA, -1, 1), "malformed"),
        ):
            with pytest.raises(Exception, match=code):
                client.entries(*arguments)
