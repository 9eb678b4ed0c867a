"""Three workers that are processes, found by a peers file: hand-over, kill −9 under load, and what a move costs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from kvfold_client import Client
from kvfold_client.fleet import Fleet, StaticPlane
from tests import fleet_story
from tests.fleet_cases import other_pages
from tests.service_cases import SMALL, Process
from tests.test_transfer import ENTRIES_BYTES, LONG, LONG_TOKENS, Memory


def start(folder: Path, names: tuple[str, ...], **options: dict) -> dict[str, Process]:
    """Workers that start side by side, and the peers file that names them."""
    peers = folder / "peers"
    peers.write_text("")

    def one(name: str) -> Process:
        (folder / name).mkdir(exist_ok=True)
        flags, manifest = options.get(name, {}).get("flags", ()), options.get(name, {}).get("manifest", SMALL)
        return Process(folder / name, "--peers-file", str(peers), *flags, manifest=manifest)

    with ThreadPoolExecutor(len(names)) as threads:
        workers = dict(zip(names, threads.map(one, names), strict=True))
    roles = {name: "prefill" if name[0] == "p" else "decode" for name in names}
    aside = folder / "peers.new"
    aside.write_text("".join(f"{name} {worker.url} {roles[name]}\n" for name, worker in workers.items()))
    os.replace(aside, peers)
    return workers


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Process], Path]]:
    folder = tmp_path_factory.mktemp("fleet")
    made = start(folder, ("p", "d", "e"), d={"manifest": other_pages()})
    yield made, folder / "peers"
    for worker in made.values():
        worker.process.kill()
        worker.wait()


def test_three_processes(workers):
    made, peers = workers
    with Fleet(StaticPlane.from_file(peers)) as fleet:
        fleet_story.hand_over(fleet)
        victim = fleet_story.death_under_load(fleet, lambda name: made[name].process.kill())
        assert not next(worker for worker in fleet.workers() if worker.name == victim).alive
        fleet_story.death_of_a_giver(fleet, lambda name: made[name].stop(), lambda name: made[name].kill())
        (survivor,) = [name for name in made if made[name].process.poll() is None]
        with Client(made[survivor].url) as client:
            assert client.live()


def test_a_long_request_needs_two_ranges_of_memory(tmp_path):
    """65,536 tokens, 9.6 MB of entries, between workers of which one takes bodies of 2 MB only: ranges of 1 MB.

    A first time round touches the memory that is there for any call: staging and pages.
    """
    giving = ("--pages=300", "--max-requests=2", "--max-step-tokens=8192", "--max-body-bytes=40000000")
    taking = ("--pages=300", "--max-requests=2", "--max-step-tokens=8192", "--max-body-bytes=2000000")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
        made = start(
            tmp_path,
            ("p", "d"),
            p={"manifest": LONG, "flags": giving},
            d={"manifest": LONG, "flags": (*taking, "--staging-bytes=4000000")},
        )
    rows = np.random.default_rng(1).integers(0x3E00, 0x4000, (8192, 2048), np.uint16)
    try:
        with Client(made["p"].url, timeout=120) as here, Client(made["d"].url, timeout=120) as there:
            for at in range(0, LONG_TOKENS, 8192):
                here.step([("r", at, 8192)], {"csa": rows})
            peaks = []
            memories = [Memory(made[name].process.pid) for name in ("p", "d")]
            for _ in range(2):
                there.release("r")
                before = [memory.reset() for memory in memories]
                moved = there.pull("r", "p")
                peaks = [(memory.peak() - was) / ENTRIES_BYTES for memory, was in zip(memories, before, strict=True)]
            assert moved.entry_bytes == ENTRIES_BYTES
            digests = [{page.xxh3_64 for page in c.verify(c.request("r")["csa"].pages)} for c in (here, there)]
            assert digests[0] == digests[1]
    finally:
        for worker in made.values():
            worker.process.kill()
            worker.wait()
    took_ms = sum(moved.timings_us.values()) / 1e3
    print(f"peak of resident memory: giver {peaks[0]:.2f}, taker {peaks[1]:.2f} times the entries; {took_ms:.0f} ms")
    assert max(peaks) < 0.4
