"""Members and placement: whose a request is, who is alive, and how little moves when that changes."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from kvfold_client.fleet import NoWorker, StaticPlane, WorkerInfo
from kvfold_client.fleet.members import Members, rendezvous
from kvfold_client.peers import Peer, PeersError, parse_peers
from kvfold_service import manifest as manifests
from tests.fleet_cases import Town, several_servers, towns

pytestmark = several_servers
town = pytest.fixture(towns)
IDS = [f"request-{i}" for i in range(2000)]


# -- placement -----------------------------------------------------------------------------------------------------


def test_the_hash_is_the_documented_one():
    """BLAKE2b of 8 bytes over name, 0, request id; the greatest wins. Any client finds the same owners."""
    assert [rendezvous(["a", "b", "c"], id) for id in ("r1", "r2", "r3", "r4", "r5")] == ["a", "b", "c", "c", "c"]


@pytest.mark.parametrize("num_workers", [2, 3, 8, 33])
def test_who_joins_takes_for_itself_only_and_who_leaves_gives_its_own_only(num_workers):
    names = [f"w{i}" for i in range(num_workers)]
    before = {id: rendezvous(names, id) for id in IDS}
    joined = {id: rendezvous([*names, "new"], id) for id in IDS}
    left = {id: rendezvous(names[1:], id) for id in IDS}
    assert {joined[id] for id in IDS if joined[id] != before[id]} == {"new"}
    assert {before[id] for id in IDS if left[id] != before[id]} == {"w0"}
    moved = sum(joined[id] != before[id] for id in IDS)
    assert abs(moved - len(IDS) / (num_workers + 1)) < 5 * (len(IDS) / (num_workers + 1)) ** 0.5
    share = len(IDS) / num_workers
    assert all(abs(count - share) < 5 * share**0.5 for count in Counter(before.values()).values())


class Given(Members):
    """Members without a network: as they are said to be."""

    def __init__(self, *workers: WorkerInfo) -> None:
        super().__init__(1.0)
        self._seen = {worker.name: worker for worker in workers}

    def find(self) -> Mapping[str, Peer]:
        return {}


def info(name: str, role="any", accepting: bool = True, compat: str = "c") -> WorkerInfo:
    return WorkerInfo(name, f"http://{name}:1", role, True, accepting, "e", compat)


def test_only_workers_that_may_own_a_request_are_asked():
    plane = Given(info("p", "prefill"), info("d", "decode"), info("x", compat="other"), info("s", accepting=False))
    owners = {role: {plane.owner(id, role).name for id in IDS} for role in ("prefill", "decode", "any")}
    assert owners == {"prefill": {"p", "x"}, "decode": {"d", "x"}, "any": {"p", "d", "x"}}
    assert {plane.owner(id, compat="c").name for id in IDS} == {"p", "d"}
    assert {plane.owner(id, besides={"p", "x"}).name for id in IDS} == {"d"}
    with pytest.raises(NoWorker, match="prefill of compat z"):
        plane.owner("r", "prefill", compat="z")


def test_what_of_an_id_is_hashed_is_the_callers_to_say(town: Town):
    for name in ("a", "b", "c"):
        town.add(name)
    with town.fleet(placed_by=lambda id: id.partition(".")[0]) as fleet:
        owners = {user: {fleet.worker_for(f"{user}.{i}").name for i in range(8)} for user in "stuvwxyz"}
    assert owners == {user: {rendezvous(["a", "b", "c"], user)} for user in "stuvwxyz"}


# -- the file ------------------------------------------------------------------------------------------------------


def test_a_peers_file():
    text = "# fleet\np0 http://10.0.0.1:8787 prefill\n\nd-0 https://[::1]:8788/ decode # ours\n  x http://host:1\n"
    assert parse_peers(text) == {
        "p0": Peer("p0", "http://10.0.0.1:8787", "prefill"),
        "d-0": Peer("d-0", "https://[::1]:8788", "decode"),
        "x": Peer("x", "http://host:1", "any"),
    }


BAD_LINES = (
    "p0",
    "p0 http://h:1 prefil",
    "p0 http://h:1 any more",
    "p/0 http://h:1",
    "p0 h:1",
    "p0 ftp://h:1",
    "p0 http://h",
    "p0 http://h:0x1",
    "p0 http://h:99999",
    "p0 http://user:secret@h:1",
    "p0 http://h:1/path",
    "p0 http://h:1?q=1",
    "p0 file:///etc/passwd",
    "a http://h:1\na http://h:2",
    "a http://h:1\nb http://h:1",
)


@pytest.mark.parametrize("text", BAD_LINES)
def test_a_line_that_is_none(text):
    with pytest.raises(PeersError, match=rf"^line {text.count(chr(10)) + 1}\b"):
        parse_peers(text)


def test_a_bad_file_stops_the_start(tmp_path):
    (tmp_path / "peers").write_text("a nonsense")
    with pytest.raises(PeersError):
        StaticPlane.from_file(tmp_path / "peers")
    with pytest.raises(FileNotFoundError):
        StaticPlane.from_file(tmp_path / "absent")


# -- health --------------------------------------------------------------------------------------------------------


def test_members_come_and_go_with_the_file(town: Town):
    """Who leaves is told once more, as dead; an unreadable file changes nothing."""
    town.add("a", "prefill")
    seen: list[tuple[str, bool]] = []
    plane = StaticPlane.from_file(town.file, health_seconds=600)
    plane.watch(lambda worker: seen.append((worker.name, worker.alive)))
    with plane:
        town.add("b", "decode")
        plane.look()
        assert [(w.name, w.role, w.alive, w.accepting) for w in plane.workers()] == [
            ("a", "prefill", True, True),
            ("b", "decode", True, True),
        ]
        assert len({w.epoch for w in plane.workers()}) == 2
        assert len({w.compat for w in plane.workers()}) == 1
        text = town.file.read_text()
        town.file.write_text("nonsense")
        plane.look()
        assert len(plane.workers()) == 2
        town.file.write_text(text)
        town.leave("a")
        plane.look()
        assert [w.name for w in plane.workers()] == ["b"]
        with pytest.raises(NoWorker):
            plane.check("a")
    assert seen == [("a", True), ("b", True), ("a", False)]


def test_a_death_is_seen_by_the_poll_and_a_new_life_has_a_new_epoch(town: Town):
    worker = town.add("a")
    seen: list[WorkerInfo] = []
    plane = StaticPlane.from_file(town.file, health_seconds=0.05)
    with plane:
        plane.watch(seen.append)
        first = plane.workers()[0]
        worker.kill()
        _until(lambda: seen and not seen[-1].alive)
        with pytest.raises(NoWorker):
            plane.owner("r")
        worker.start()
        _until(lambda: seen[-1].alive)
        assert plane.owner("r").epoch == worker.worker.epoch.hex() != first.epoch
        assert plane.check("a") == seen[-1]


def test_a_draining_worker_lives_and_takes_nothing_new(town: Town):
    worker = town.add("a")
    with StaticPlane.from_file(town.file) as plane:
        worker.service.draining = True
        assert (plane.check("a").alive, plane.check("a").accepting) == (True, False)
        with pytest.raises(NoWorker):
            plane.owner("r")
        worker.service.draining = False
        assert plane.check("a").accepting


def test_a_slow_worker_is_asked_twice(town: Town, monkeypatch):
    """One late answer is none; two in a row are a death, until it answers again."""
    town.add("a")
    with StaticPlane.from_file(town.file, health_seconds=600) as plane:
        real, late = httpx.Client.send, [1]

        def send(self, request, **options):
            if late[0]:
                late[0] -= 1
                raise httpx.ReadTimeout("too late", request=request)
            return real(self, request, **options)

        monkeypatch.setattr(httpx.Client, "send", send)
        assert plane.check("a").alive
        late[0] = 2
        assert not plane.check("a").alive
        assert plane.check("a").accepting


def test_the_newest_is_told_last():
    """Two looks at once, and whoever is told of the first takes long."""
    plane, told, first = Given(info("a")), [], threading.Event()
    answers = [replace(info("a"), alive=False), info("a")]
    plane._ask = lambda peer, before: answers.pop(0)  # type: ignore[method-assign]

    def changed(worker: WorkerInfo) -> None:
        if not worker.alive:
            first.set()
            time.sleep(0.3)
        told.append(worker.alive)

    plane.watch(changed)
    thread = threading.Thread(target=plane.check, args=("a",))
    thread.start()
    assert first.wait(10)
    plane.check("a")
    thread.join()
    assert told == [False, True]


def test_a_worker_that_does_not_know_our_token(town: Town, tmp_path):
    (tmp_path / "tokens").write_text("a-token-of-16-characters team step,pull\n")
    town.add("a", token_file=tmp_path / "tokens")
    plane = StaticPlane.from_file(town.file)
    plane.open("another-token-of-16-chars")
    assert [(w.alive, w.accepting) for w in plane.workers()] == [(True, False)]
    plane.close()
    plane = StaticPlane.from_file(town.file)
    plane.open("a-token-of-16-characters")
    assert plane.owner("r").name == "a"
    plane.close()


def _until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# -- the page about it ---------------------------------------------------------------------------------------------

PAGE = (Path(__file__).parents[1] / "docs/fleet.md").read_text(encoding="utf-8")


def test_the_example_of_the_page(town: Town, monkeypatch, capsys):
    """The peers file and the lines of docs/fleet.md, on two workers of preset tiny."""
    tiny = manifests.load("tiny").to_json() | {"max_position": 512}
    for name, role in (("prefill-0", "prefill"), ("decode-0", "decode")):
        town.add(name, role, manifest=tiny)
    text = re.search(r"```text\n# peers.txt\n(.*?)```", PAGE, re.DOTALL)[1]
    ports = {"8787": town.workers["prefill-0"].port, "8788": town.workers["decode-0"].port}
    for told, port in ports.items():
        text = text.replace(f":{told}", f":{port}")
    town.file.write_text(text)
    town.file.rename(town.file.parent / "peers.txt")
    monkeypatch.chdir(town.file.parent)
    shutil.copy("peers.txt", town.file)
    exec(re.search(r"```python\n(import numpy.*?)```", PAGE, re.DOTALL)[1], {})
    assert capsys.readouterr().out == "1 entry, 584 bytes; 2 open rows\n"
    assert town.workers["decode-0"].worker.request("r1")["compressors"]["layers.0.hca"]["committed"] == 131


def test_what_the_page_says_of_sizes():
    """Entries and open rows of the presets, by the geometry."""
    for preset, name in (("deepseek-v4-flash", "Flash"), ("deepseek-v4-pro", "Pro")):
        manifest = manifests.load(preset)
        rows = re.search(rf"^\| DeepSeek-V4-{name}: entries (.*)\n\| and open rows (.*)$", PAGE, re.MULTILINE)
        told = [[float(number) for number in re.findall(r"([\d.]+) [MG]B", row)] for row in rows.groups()]
        for i, num_tokens in enumerate((8191, 131071, 1048575)):
            entries = open_rows = all_rows = 0
            for part in manifest.compressors:
                geometry = part.geometry(manifest.draft_slack)
                entries += geometry.num_entries(num_tokens) * part.layout().format.entry_bytes
                open_rows += (num_tokens - geometry.live_start(num_tokens)) * geometry.row_width * 4
                all_rows += num_tokens * geometry.row_width * 2
            assert (told[0][i], told[1][i]) == (pytest.approx(entries / 1e6, rel=1e-3), round(open_rows / 1e6, 1))
            if i == 1:
                assert told[0][3] == round(all_rows / 1e9, 1)


PHASES = {"entries alone": "move", "whole, verified": "whole", "": "move"}


def told_rates(heading: str) -> dict[str, str]:
    table = PAGE.split(heading)[1].split("\n#")[0]
    return dict(re.findall(r"^\| (\w[^|]*?) \| ([\d.]+ \| [\d.]+) \|$", table, re.MULTILINE))


def kept_results(*names: str) -> list[dict]:
    return [json.loads((Path(__file__).parent / name).read_text())["results"] for name in names]


def test_the_rates_of_the_page_are_the_kept_ones():
    kept = kept_results("bench/results/movers.json", "bench/results/movers_tcp.json")
    told = told_rates("## Measured")
    for label, rates in told.items():
        name, _, what = label.partition(": ")
        assert rates == " | ".join(f"{part['cases'][name][f'{PHASES[what]}_gbs']:.2f}" for part in kept), label
    assert len(told) == 3 + 2 * 4


def test_so_are_those_between_two_gpus():
    kept = kept_results("gpu/results/nixl_own.json", "gpu/results/nixl_all.json")
    told = told_rates("### Between two GPUs")
    assert told.pop("torch copy, GPU to GPU") == " | ".join(
        f"{part['torch copy, GPU to GPU']['gbs']:.0f}" for part in kept
    )
    for label, rates in told.items():
        name, _, what = label.partition(": ")
        assert rates == " | ".join(f"{part[name][PHASES[what]]['gbs']:.2f}" for part in kept), label
    assert len(told) == 6
