"""NIXL between the memories of two GPUs: bytes, rates beside a peer copy and HTTP, and a giver that is killed.

python tests/gpu/check_nixl.py [--visible own|all] [--rounds N] [--out FILE]
(PYTHONPATH: clients, service, kernels and the root; NIXL's wheel of this CUDA)

The giver is on the first GPU, the taker on the second. `--visible own`: each sees its own only, as workers do that
something places; `all`: each sees both, its own first.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvfold_client import Client
from kvfold_client.errors import PeerFailed
from tests.bench.measure import save
from tests.bench.movers import NUM_BYTES, NUM_ENTRIES, PAGE_ENTRIES, give, pair, pull

VISIBLE = {
    "own": ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}),
    "all": ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "1,0"}),
}


def check_bytes(giver: Client, taker: Client, mover: str) -> None:
    """Entries, open rows and what follows are the giver's."""
    assert taker.pull("r", "giver", mover).mover == mover
    theirs, ours = (client.export("r").compressors["csa"] for client in (giver, taker))
    np.testing.assert_array_equal(ours.entries, theirs.entries, strict=True)
    np.testing.assert_array_equal(ours.open_rows, theirs.open_rows, strict=True)
    rows = np.random.default_rng(2).standard_normal((64, 2048), np.float32)
    for client in (giver, taker):
        client.step([("r", theirs.committed, 64)], {"csa": rows})
    theirs, ours = (client.entries("r", "csa", NUM_ENTRIES, NUM_ENTRIES + 16).entries for client in (giver, taker))
    np.testing.assert_array_equal(ours, theirs, strict=True)
    taker.release("r")
    give(giver)


def spread(seconds: list[float]) -> dict[str, float]:
    """GB/s (10⁹ bytes): median, least and most, without the first, which connects and touches memory."""
    values = [NUM_BYTES / 1e9 / taken for taken in seconds[1:]]
    return {"gbs": round(statistics.median(values), 2), "least": round(min(values), 2), "most": round(max(values), 2)}


def peer_copy(rounds: int) -> dict[str, float]:
    """torch's copy from one GPU to the other, in one process."""
    source = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda:1")
    seconds = []
    for _ in range(rounds + 1):
        torch.cuda.synchronize(1)
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        seconds.append(time.perf_counter() - began)
    return spread(seconds)


def check_pulls(visible: str, rounds: int) -> dict[str, Any]:
    """Of equal and of other pages, by both movers; `move` is the entries alone, `whole` the pull."""
    results: dict[str, Any] = {}
    for taker_page_entries in (PAGE_ENTRIES, 48):
        with (
            tempfile.TemporaryDirectory() as folder,
            pair(Path(folder), taker_page_entries, "auto", VISIBLE[visible]) as workers,
        ):
            for mover in ("nixl", "http"):
                label = f"pull by {mover}" + ", other pages" * (taker_page_entries != PAGE_ENTRIES)
                taken = [pull(workers.taker, mover) for _ in range(rounds + 1)]
                results[label] = {phase: spread([times[phase] for times in taken]) for phase in taken[0]}
                check_bytes(workers.giver, workers.taker, mover)
                print(f"{label}: bytes agree; {results[label]}", flush=True)
    return results


def check_death(visible: str) -> float:
    """Seconds until a pull from a giver that is killed meanwhile is a typed error."""
    with tempfile.TemporaryDirectory() as folder, pair(Path(folder), PAGE_ENTRIES, "auto", VISIBLE[visible]) as workers:
        pull(workers.taker, "nixl")
        killed = 0.0

        def kill() -> None:
            nonlocal killed
            killed = time.perf_counter()
            os.kill(workers.giver_pid, signal.SIGKILL)

        timer = threading.Timer(0.5, kill)
        timer.start()
        try:
            while time.perf_counter() - (killed or time.perf_counter()) < 5:
                pull(workers.taker, "nixl")
        except PeerFailed as error:
            took = time.perf_counter() - killed
            print(f"{error}: told after {took * 1e3:.0f} ms", flush=True)
            return took
    raise AssertionError("nobody noticed that the giver is dead")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--visible", choices=VISIBLE, default="all")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "peer_access": torch.cuda.can_device_access_peer(0, 1),
        "nixl": importlib.metadata.version("nixl"),
        "visible": arguments.visible,
        "bytes": NUM_BYTES,
        "torch copy, GPU to GPU": peer_copy(arguments.rounds),
    }
    print(results, flush=True)
    results |= check_pulls(arguments.visible, arguments.rounds)
    results["seconds until a death is told"] = round(check_death(arguments.visible), 3)
    if arguments.out:
        save(arguments.out, results)


if __name__ == "__main__":
    main()
