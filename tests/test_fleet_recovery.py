"""After a death: the request goes on from the last position that anybody still has, and ends as if nothing had been."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvfold_client import exchange
from kvfold_client.errors import CompatMismatch, TransportError
from kvfold_client.fleet import Fleet, NoWorker, Role, StaticPlane, WorkerLost
from kvfold_client.fleet.connect import Line, connect
from kvfold_client.replies import Exported
from tests.fleet_cases import LOST, Local, Sequence, Town, feed, other_pages, several_servers, towns
from tests.service_cases import CSA, NAMES, SMALL, STREAM_TOKENS
from tests.test_fleet_processes import start

pytestmark = several_servers
town = pytest.fixture(towns)


def three(town: Town, **options: Any) -> Fleet:
    """One for prefill, two of other pages for decode."""
    town.add("p", "prefill", **options)
    for name in ("d", "e"):
        town.add(name, "decode", manifest=other_pages(), **options)
    return town.fleet()


def at_decode(fleet: Fleet, tokens: int = 70, release: bool = True) -> Sequence:
    """Prefilled to 45, handed over, decoded to `tokens`."""
    sequence = Sequence(fleet, "r")
    sequence.advance(45, 20)
    sequence.hand_over("decode", release=release)
    sequence.advance(tokens, 5)
    return sequence


def finish(sequence: Sequence) -> None:
    sequence.advance(STREAM_TOKENS, 7)
    sequence.check()


# -- from whom -----------------------------------------------------------------------------------------------------


def test_from_the_copy_that_prefill_kept(town: Town):
    with three(town) as fleet:
        sequence = at_decode(fleet, release=False)
        first = fleet.worker_for("r", "decode")
        town.workers[first.name].kill()
        with pytest.raises((TransportError, WorkerLost)):
            feed(fleet.client_for("r", "decode"), "r", 70, 71)
        found = fleet.recover("r", "decode")
        assert (found.start, found.source) == (45, "p")
        assert found.worker == ({"d", "e"} - {first.name}).pop() == fleet.worker_for("r", "decode").name
        assert found.moved is not None
        assert found.moved.num_entries == 45 // 8 + 2 * (45 // 4)
        sequence.at = found.start
        finish(sequence)


def test_from_an_export_that_the_caller_kept(town: Town):
    with three(town) as fleet:
        sequence = at_decode(fleet, 60)
        kept = fleet.keep("r", "decode")
        sequence.advance(70, 5)
        town.workers[fleet.worker_for("r", "decode").name].kill()
        found = fleet.recover("r", "decode", kept=kept)
        assert (found.start, found.source, found.moved) == (60, "kept", None)
        sequence.at = found.start
        finish(sequence)


def test_from_the_beginning_if_nobody_has_any(town: Town):
    with three(town) as fleet:
        sequence = at_decode(fleet)
        town.workers[fleet.worker_for("r", "decode").name].kill()
        found = fleet.recover("r", "decode")
        assert (found.start, found.source, found.committed) == (0, None, {})
        sequence.at = found.start
        finish(sequence)


def test_where_it_is_if_nothing_was_lost(town: Town):
    """A reply that did not come: the step ran."""
    with three(town) as fleet:
        sequence = at_decode(fleet)
        worker = fleet.worker_for("r", "decode")
        feed(fleet.client(worker.name), "r", 70, 73)
        found = fleet.recover("r", "decode")
        assert (found.start, found.worker, found.source, found.moved) == (73, worker.name, worker.name, None)
        sequence.at = 73
        finish(sequence)


def test_a_new_life_has_nothing(town: Town):
    """The same name and address, another epoch: told before a step is sent, and by the worker if it was not seen."""
    with three(town) as fleet:
        sequence = at_decode(fleet, release=False)
        worker = town.workers[fleet.worker_for("r", "decode").name]
        worker.kill()
        worker.start()
        with pytest.raises(LOST):
            feed(fleet.client_for("r", "decode"), "r", 70, 71)
        fleet.look()
        with pytest.raises(WorkerLost):
            fleet.client_for("r", "decode")
        assert fleet.recover("r", "decode").start == 45
        sequence.at = 45
        finish(sequence)


def test_a_lease_that_ended_is_a_loss_too(town: Town):
    with three(town) as fleet:
        sequence = at_decode(fleet)
        fleet.client_for("r", "decode").release("r")
        sequence.advance(80, 5)  # position_gap, expected 0
        assert sequence.recovered == 1
        finish(sequence)


def test_the_copy_with_the_most_tokens(town: Town):
    """Of p at 45, e at 60 and an export at 50; a copy without its first entries is none."""
    with three(town) as fleet:
        sequence = at_decode(fleet, 50, release=False)
        first, other = fleet.worker_for("r", "decode").name, "e"
        if first == "e":
            other = "d"
        kept = fleet.keep("r", "decode")
        sequence.advance(60, 5)
        fleet.client(other).pull("r", first)
        sequence.advance(70, 5)
        tail = fleet.client(first).export("r", entries=False)
        town.add("tail", "decode")
        fleet.look()
        fleet.client("tail").import_("r", tail)
        town.workers[first].kill()
        found = fleet.recover("r", "decode", kept=kept)
        assert (found.start, found.source, found.worker, found.moved) == (60, other, other, None)
        town.workers[other].kill()
        found = fleet.recover("r", "decode", kept=kept)
        assert (found.start, found.source, found.worker) == (50, "kept", "tail")
        sequence.at = found.start
        finish(sequence)


def test_a_holder_that_dies_as_it_is_asked(town: Town, monkeypatch):
    """Then the next best; and if the new owner dies, whoever comes after it."""
    with three(town) as fleet:
        sequence = at_decode(fleet, release=False)
        first = fleet.worker_for("r", "decode").name
        other = ({"d", "e"} - {first}).pop()
        town.add("q", "prefill")
        fleet.look()
        fleet.client("q").pull("r", "p")
        feed(fleet.client("q"), "r", 45, 50)
        town.workers[first].kill()
        real, killed = type(fleet._reach).pull, []

        def pull(reach, id, source, target, mover):
            if not killed:
                killed.append(source.name)
                town.workers[source.name].kill()
            return real(reach, id, source, target, mover)

        monkeypatch.setattr(type(fleet._reach), "pull", pull)
        found = fleet.recover("r", "decode")
        assert killed == ["q"]
        assert (found.start, found.source, found.worker) == (45, "p", other)
        sequence.at = found.start
        finish(sequence)


def test_a_worker_that_does_not_trust_itself(town: Town):
    """It lives, and what it holds is lost all the same."""
    with three(town) as fleet:
        sequence = at_decode(fleet, release=False)
        first = fleet.worker_for("r", "decode").name
        town.workers[first].service.distrust("a test")
        fleet.look()
        with pytest.raises(WorkerLost):
            fleet.hand_over("r", to="decode")
        found = fleet.recover("r", "decode")
        assert (found.start, found.source, found.worker) == (45, "p", ({"d", "e"} - {first}).pop())
        sequence.at = 45
        finish(sequence)
        town.workers[first].kill()  # it would not tell whether it is whole


def test_nobody_is_left(town: Town):
    with three(town) as fleet:
        at_decode(fleet)
        for name in ("d", "e"):
            town.workers[name].kill()
        with pytest.raises(NoWorker):
            fleet.recover("r", "decode")
        town.workers["d"].start()
        fleet.look()
        assert fleet.recover("r", "decode").worker == "d"


def test_a_copy_of_another_compat_is_of_no_use(town: Town):
    """Owners of its compat are asked; there are none, so it begins anew."""
    town.add("p", "prefill", manifest=SMALL | {"rms_eps": 1e-5})
    town.add("d", "decode")
    with town.fleet() as fleet:
        feed(fleet.client_for("r", "prefill"), "r", 0, 20)
        with pytest.raises(CompatMismatch):
            fleet.client("d").pull("r", "p")
        found = fleet.recover("r", "decode")
        assert (found.start, found.worker) == (0, "d")


def test_compressors_that_stand_apart(town: Town):
    """Then there is no one position, and each says its own."""
    with three(town) as fleet:
        client = fleet.client_for("r", "prefill")
        feed(client, "r", 0, 20)
        feed(client, "r", 20, 30, [CSA])
        found = fleet.recover("r", "prefill")
        assert found.committed == dict.fromkeys(NAMES, 20) | {CSA: 30}
        with pytest.raises(ValueError, match="different positions"):
            _ = found.start


# -- a worker that hangs -------------------------------------------------------------------------------------------


def test_a_worker_that_hangs(tmp_path: Path):
    """SIGSTOP amid steps, with a fleet's defaults: told long before a lease ends; it may go on, and is used again."""
    workers = start(tmp_path, ("p", "d", "e"))
    try:
        with Fleet(StaticPlane.from_file(tmp_path / "peers")) as fleet:
            sequence = at_decode(fleet, release=False)
            first = fleet.worker_for("r", "decode")
            client, began = fleet.client(first.name), time.monotonic()
            workers[first.name].stop()
            with pytest.raises(TransportError, match="found dead"):
                feed(client, "r", 70, 71)
            assert time.monotonic() - began < 6
            assert not client.live()  # at once
            found = fleet.recover("r", "decode")
            assert (found.start, found.source) == (45, "p")
            assert time.monotonic() - began < 12
            sequence.at = found.start
            finish(sequence)
            workers[first.name].signal(signal.SIGCONT)
            while not fleet.client(first.name).live():
                assert time.monotonic() - began < 60
                time.sleep(0.05)
            assert client.request("r")[CSA].committed >= 70
    finally:
        for worker in workers.values():
            worker.kill()
            worker.wait()


def test_what_waits_on_a_line_ends_when_it_is_cut():
    """Calls that may be sent twice, one that may not, one amid its body; what comes later is refused."""
    line = Line()
    with socket.create_server(("127.0.0.1", 0), backlog=8) as silent, ThreadPoolExecutor(4) as threads:
        client = connect(f"http://127.0.0.1:{silent.getsockname()[1]}", None, timeout=20, retries=1, line=line)
        rows = {CSA: np.zeros((20_000, 512), np.float32)}  # more than a socket takes
        calls = (client.worker, lambda: client.truncate("r", 1), lambda: client.step([("r", 0, 20_000)], rows))
        waiting = [threads.submit(call) for call in calls]
        accepted = [silent.accept()[0] for _ in calls]
        time.sleep(0.2)
        assert not any(call.done() for call in waiting)
        began = time.monotonic()
        line.cut()
        for call in waiting:
            assert isinstance(call.exception(5), TransportError)
        assert client.live() is False
        with pytest.raises(TransportError, match="found dead"):
            client.release("r")
        assert time.monotonic() - began < 1
        line.mend()
        waiting = [threads.submit(client.live)]
        accepted.append(silent.accept()[0])
        accepted[-1].sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
        assert waiting[0].result(5) is True
        for connection in accepted:
            connection.close()
        client.close()


def busy(worker: Local, seconds: float) -> threading.Thread:
    """Its engine is; it says all the time that it is there."""
    engine = worker.service.engine
    thread = threading.Thread(target=lambda: asyncio.run(engine.call(lambda: time.sleep(seconds))))
    thread.start()
    return thread


def test_a_worker_that_is_only_slow_is_not_cut_off(town: Town):
    """For longer than a dead one is waited for."""
    town.add("p", "prefill")
    with Fleet(StaticPlane.from_file(town.file, health_seconds=0.1)) as fleet:
        client = fleet.client_for("r", "prefill")
        thread, began = busy(town.workers["p"], 3), time.monotonic()
        feed(client, "r", 0, 20)
        assert time.monotonic() - began > 2.5
        thread.join()


def test_a_worker_that_leaves_ends_what_it_has(town: Town):
    town.add("p", "prefill")
    with town.fleet() as fleet, ThreadPoolExecutor(1) as threads:
        client = fleet.client_for("r", "prefill")
        thread = busy(town.workers["p"], 1)
        step = threads.submit(feed, client, "r", 0, 20)
        text = town.file.read_text()
        town.file.write_text("")
        fleet.look()
        with pytest.raises(WorkerLost):
            fleet.client_for("r", "prefill")
        assert not step.done()
        assert step.result(20)[CSA].committed == 20
        thread.join()
        town.file.write_text(text)
        fleet.look()
        assert fleet.client("p").live()


# -- under load ----------------------------------------------------------------------------------------------------


def test_a_death_under_load(town: Town):
    """Four clients' requests run while the worker of some of them dies, in the middle of whatever it does."""
    with three(town) as fleet:
        sequences = [Sequence(fleet, f"r{i}") for i in range(4)]
        begun = threading.Barrier(5)

        def go(sequence: Sequence) -> None:
            sequence.advance(45, 20)
            sequence.hand_over("decode", release=False)
            begun.wait(60)
            sequence.advance(STREAM_TOKENS, 1)

        threads = [threading.Thread(target=go, args=(sequence,)) for sequence in sequences]
        for thread in threads:
            thread.start()
        begun.wait(60)
        victim = fleet.worker_for("r0", "decode").name
        placed = [fleet.worker_for(sequence.id, "decode").name for sequence in sequences]
        town.workers[victim].kill()
        for thread in threads:
            thread.join()
        for sequence, worker in zip(sequences, placed, strict=True):
            sequence.check()
            assert sequence.recovered <= (worker == victim)
        assert sequences[0].recovered or sequences[0].sent == STREAM_TOKENS  # it was done before


# -- anything ------------------------------------------------------------------------------------------------------


class Weather:
    """Random joins, departures, deaths, moves and imports; every recovery must find the most that anybody has."""

    def __init__(self, town: Town, fleet: Fleet, seed: int) -> None:
        self.town, self.fleet, self.seed, self.dice = town, fleet, seed, random.Random(seed)
        self.sequences = [Sequence(fleet, f"s{i}") for i in range(2)]
        for sequence in self.sequences:
            sequence.most = self.most  # type: ignore[method-assign]

    def most(self, sequence: Sequence) -> int:
        """Tokens of the longest copy on a living worker or in hand, straight from the workers' memory."""
        found = [0] if sequence.kept is None else [sequence.kept.compressors[CSA].committed]
        for worker in self.town.workers.values():
            request = worker.worker.requests.get(("", sequence.id)) if worker.lives else None
            if request is not None:
                found.append(worker.worker.caches.by_name[CSA].committed(request.slot))
        return max(found)

    def run(self, num_events: int) -> None:
        events = (self.step, self.step, self.move, self.kill, self.kill, self.keep, self.import_, self.join, self.leave)
        for _ in range(num_events):
            self.dice.choice(events)()
        for sequence in self.sequences:
            self._finish(sequence)
            self.fleet.release(sequence.id)
        for name, worker in self.town.workers.items():
            if worker.lives:
                worker.check()
                for sequence in self.sequences:  # copies that nobody placed: their leases would end
                    self.fleet.client(name).release(sequence.id)

    def _finish(self, sequence: Sequence) -> None:
        """Its worker may have died since its last token."""
        while True:
            sequence.advance(STREAM_TOKENS, 50)
            try:
                return sequence.check()
            except LOST:
                sequence.recover()

    def step(self) -> None:
        sequence = self.dice.choice(self.sequences)
        sequence.advance(min(STREAM_TOKENS, sequence.at + self.dice.randrange(1, 30)), self.dice.randrange(4, 30))

    def move(self) -> None:
        sequence = self.dice.choice(self.sequences)
        roles: tuple[Role, ...] = ("prefill", "decode")
        if sequence.at:
            sequence.hand_over(self.dice.choice(roles), release=self.dice.random() < 0.5)

    def keep(self) -> None:
        sequence = self.dice.choice(self.sequences)
        if sequence.at:
            sequence.kept = self._kept(sequence)

    def import_(self) -> None:
        """Out of every worker, and in again from what was kept."""
        sequence = self.dice.choice(self.sequences)
        if sequence.at and (kept := self._kept(sequence)):
            sequence.kept = kept
            self.fleet.release(sequence.id)
            sequence.recover()

    def _kept(self, sequence: Sequence) -> Exported | None:
        try:
            return self.fleet.keep(sequence.id, sequence.role)
        except LOST:
            sequence.recover()
            return sequence.kept

    def kill(self) -> None:
        """Some come back soon, as nobody; somebody must be left in each role."""
        name = self.dice.choice(sorted(self.town.workers))
        worker = self.town.workers[name]
        if worker.lives and self._is_spare(name):
            worker.kill()
            if self.dice.random() < 0.5:
                worker.start()
            if self.dice.random() < 0.5:
                self.fleet.look()

    def join(self) -> None:
        dead = [worker for worker in self.town.workers.values() if not worker.lives]
        if dead:
            self.dice.choice(dead).start()
        elif len(self.town.workers) < 4:
            role: Role = self.dice.choice(("prefill", "decode", "any"))
            manifest = self.dice.choice((SMALL, other_pages()))
            self.town.add(f"w{self.seed}.{self.dice.randrange(10**6)}", role, manifest=manifest)
        self.fleet.look()

    def leave(self) -> None:
        name = self.dice.choice(sorted(self.town.workers))
        if self._is_spare(name) and len(self.town.workers) > 2:
            self.town.leave(name)
            self.fleet.look()

    def _is_spare(self, name: str) -> bool:
        others = [
            self.town.roles[other] for other, worker in self.town.workers.items() if worker.lives and other != name
        ]
        return all(role in others or "any" in others for role in ("prefill", "decode"))


def scenarios(town: Town, seeds: range, num_events: int) -> dict[str, int]:
    """Each with two requests, over one town that goes on living; how much happened."""
    totals = {"scenarios": 0, "tokens": 0, "sent": 0, "recovered": 0}
    with three(town) as fleet:
        for seed in seeds:
            weather = Weather(town, fleet, seed)
            try:
                weather.run(num_events)
            except BaseException:
                print(f"scenario {seed} of {num_events} events")
                raise
            totals["scenarios"] += 1
            for sequence in weather.sequences:
                totals["tokens"] += STREAM_TOKENS
                totals["sent"] += sequence.sent
                totals["recovered"] += sequence.recovered
    return totals


def test_200_random_scenarios(town: Town, monkeypatch: pytest.MonkeyPatch):
    """A third of their time would be the pauses before a dead worker is asked again."""
    monkeypatch.setattr(exchange, "FIRST_WAIT_S", 0.001)
    totals = scenarios(town, range(200), 7)
    print(totals)
    assert totals["recovered"] > 50


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_random_scenarios_at_length(town: Town):
    print(scenarios(town, range(1000, 2000), 30))
