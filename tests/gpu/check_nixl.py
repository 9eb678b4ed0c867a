"""NIXL between the memories of two GPUs: bytes, rates beside a peer copy and HTTP, and a giver that is killed.

python tests/gpu/check_nixl.py [--visible own|all] [--rounds N] [--out FILE]
(PYTHONPATH: clients, service, kernels and the root; NIXL's wheel of this CUDA)

The giver is on the first GPU, the taker on the second. `--visible own`: each sees its own only, as workers do that
something places; `all`: each sees both, its own first.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvfold_client import Client
from kvfold_client.errors import PeerFailed
from tests.bench.measure import save
from tests.bench.movers import ENTRY_BYTES, NUM_BYTES, NUM_ENTRIES, PAGE_ENTRIES, pair, pull

VISIBLE = {
    "own": ({"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}),
    "all": ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "1,0"}),
}


def check_bytes(giver: Client, taker: Client, mover: str) -> None:
    """Entries, open rows and what follows are the giver's."""
    moved = taker.pull("r", "giver", mover)
    assert moved.mover == mover
    theirs, ours = (client.export("r").compressors["csa"] for client in (giver, taker))
    np.testing.assert_array_equal(ours.entries, theirs.entries, strict=True)
    np.testing.assert_array_equal(ours.open_rows, theirs.open_rows, strict=True)
    rows = np.random.default_rng(2).standard_normal((64, 2048), np.float32)
    start = theirs.committed
    for client in (giver, taker):
        client.step([("r", start, 64)], {"csa": rows})
    theirs, ours = (client.entries("r", "csa", NUM_ENTRIES, NUM_ENTRIES + 16).entries for client in (giver, taker))
    np.testing.assert_array_equal(ours, theirs, strict=True)
    taker.release("r")


def rates(rounds: int, case: Callable[[], float], num_bytes: int) -> dict[str, float]:
    """GB/s (10⁹ bytes): median, least and most; the first round connects and touches memory."""
    values = [num_bytes / 1e9 / case() for _ in range(rounds + 1)][1:]
    return {"gbs": round(statistics.median(values), 2), "least": round(min(values), 2), "most": round(max(values), 2)}


def peer_copy(rounds: int) -> dict[str, float]:
    """torch's copy from one GPU to the other, in one process."""
    source = torch.randint(0, 256, (NUM_BYTES,), dtype=torch.uint8, device="cuda:0")
    target = torch.empty_like(source, device="cuda:1")

    def copy() -> float:
        torch.cuda.synchronize(1)
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        return time.perf_counter() - began

    return rates(rounds, copy, NUM_BYTES)


def check_pulls(visible: str, rounds: int) -> dict[str, Any]:
    """Of equal and of other pages, by both movers; `move` is the entries alone, `whole` the pull."""
    results: dict[str, Any] = {}
    for taker_page_entries in (PAGE_ENTRIES, 48):
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            clients = stack.enter_context(pair(folder, taker_page_entries, "auto", VISIBLE[visible]))
            for mover in ("nixl", "http"):
                taken = [pull(clients, mover) for _ in range(rounds + 1)][1:]
                label = f"pull by {mover}" + ", other pages" * (taker_page_entries != PAGE_ENTRIES)
                for phase in ("move", "whole"):
                    times = iter([0.0, *(times[phase] for times in taken)])
                    results[f"{label}: {phase}"] = rates(rounds, lambda times=times: next(times) or 1.0, NUM_BYTES)
                check_bytes(*clients, mover)
                print(f"{label}: bytes agree", {k: v for k, v in results.items() if k.startswith(label)}, flush=True)
                if mover == "nixl":
                    clients[0].release("r")
                    _give_again(clients[0])
    return results


def _give_again(giver: Client) -> None:
    from kvfold_client import Exported
    from tests.bench.movers import request

    giver.import_("r", Exported(giver.worker().compat, request().compressors))


def check_death(visible: str) -> float:
    """Seconds until a pull from a giver that is killed meanwhile is a typed error."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        giver, taker = stack.enter_context(pair(folder, PAGE_ENTRIES, "auto", VISIBLE[visible]))
        taker.pull("r", "giver", "nixl")
        taker.release("r")
        port = str(giver._http.base_url.port)
        killer = subprocess.Popen([sys.executable, "-c", _KILL, port], stdout=subprocess.PIPE, text=True)
        assert killer.stdout is not None
        killer.stdout.readline()
        for _ in range(200):
            began = time.perf_counter()
            try:
                taker.pull("r", "giver", "nixl")
            except PeerFailed as error:
                took = time.perf_counter() - began
                print(f"killed: {error} after {took * 1e3:.0f} ms", flush=True)
                killer.wait()
                return took
            taker.release("r")
    raise AssertionError("the giver outlived 200 pulls")


_KILL = """
import os, pathlib, signal, sys, time
inode = next(l.split()[9] for l in open("/proc/net/tcp").read().splitlines()[1:]
             if int(l.split()[1].split(":")[1], 16) == int(sys.argv[1]) and l.split()[3] == "0A")
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        if any(os.readlink(fd) == f"socket:[{inode}]" for fd in (process / "fd").iterdir()):
            break
    except OSError:
        continue
print("found", flush=True)
time.sleep(0.5)
os.kill(int(process.name), signal.SIGKILL)
"""
"""Kills the process that listens on a port, half a second later."""


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
        "bytes": NUM_ENTRIES * ENTRY_BYTES,
        "torch copy, GPU to GPU": peer_copy(arguments.rounds),
    }
    print(results, flush=True)
    results |= check_pulls(arguments.visible, arguments.rounds)
    results["seconds until a death is told"] = round(check_death(arguments.visible), 3)
    if arguments.out:
        save(arguments.out, results)


if __name__ == "__main__":
    main()
