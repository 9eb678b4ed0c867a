"""Bytes a second between two processes of this machine: pulls by http and by NIXL, beside a socket and NIXL alone.

    python -m tests.bench.movers --out movers.json

A pull takes over a request of 64 MiB of packed entries (csa, 584 bytes each), which was imported, and verifies it.
`move`
is the entries alone, `whole` everything from the first question to the known request. The socket copy sends the same
bytes by `sendall` into a buffer that is there; raw NIXL reads them out of one registered block into another, in one
piece and in pieces of a page. Median of the rounds; rounds take turns, so that all see the same machine.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np

from kvfold_client import Client, Exported, ExportedCompressor
from tests.bench.measure import process, save

MIB = 1 << 20
ENTRY_BYTES, PAGE_ENTRIES = 584, 64
NUM_ENTRIES = 64 * MIB // ENTRY_BYTES // PAGE_ENTRIES * PAGE_ENTRIES
NUM_BYTES = NUM_ENTRIES * ENTRY_BYTES
MANIFEST = """{"max_position": 524288, "compressors": [
 {"name": "csa", "kind": "csa", "ratio": 4, "head_dim": 512, "cache_format": "fp8_ds_mla", "page_entries": %d}]}"""


def request() -> Exported:
    """A request whose bytes are any: 4 open rows behind its entries."""
    dice = np.random.default_rng(1)
    committed = 4 * NUM_ENTRIES
    return Exported(
        "",
        {
            "csa": ExportedCompressor(
                committed=committed,
                entries=dice.integers(0, 256, (NUM_ENTRIES, ENTRY_BYTES), np.uint8),
                open_rows=dice.standard_normal((4, 2048), np.float32),
                open_positions=np.arange(committed - 4, committed),
            )
        },
    )


class Pair(NamedTuple):
    giver: Client
    taker: Client
    giver_pid: int


@contextmanager
def pair(
    folder: Path,
    taker_page_entries: int,
    backend: str = "cpu",
    environments: tuple[dict[str, str], dict[str, str]] = ({}, {}),
) -> Iterator[Pair]:
    """Giver and taker, which both have NIXL, each in an environment; the taker's pages may be of another size."""
    peers = folder / f"peers{taker_page_entries}"
    peers.write_text("")
    with ExitStack() as stack:
        started = []
        for page_entries, environment in zip((PAGE_ENTRIES, taker_page_entries), environments, strict=True):
            manifest = folder / f"{page_entries}.json"
            manifest.write_text(MANIFEST % page_entries)
            flags = [
                f"--manifest={manifest}",
                "--weights=random:1",
                f"--backend={backend}",
                "--port=0",
                "--log-level=error",
            ]
            flags += [f"--pages={2 * NUM_ENTRIES // page_entries}", "--max-requests=2", "--drain-seconds=0"]
            flags += ["--lease-seconds=86400"]
            flags += [f"--max-body-bytes={128 * MIB}", f"--peers-file={peers}", "--nixl"]
            with mock.patch.dict(os.environ, environment):
                started.append(stack.enter_context(process("-m", "kvfold_service", *flags)))
        peers.write_text(f"giver {started[0][0]}\n")
        giver, taker = (stack.enter_context(Client(url, timeout=120)) for url, _ in started)
        give(giver)
        yield Pair(giver, taker, started[0][1])


def give(giver: Client) -> None:
    """Make the request known there, instead of what was there under its id."""
    giver.release("r")
    giver.import_("r", Exported(giver.worker().compat, request().compressors))


def pull(taker: Client, mover: str) -> dict[str, float]:
    """Seconds of one pull."""
    began = time.perf_counter()
    moved = taker.pull("r", "giver", mover)
    whole = time.perf_counter() - began
    assert (moved.mover, moved.entry_bytes) == (mover, NUM_BYTES)
    taker.release("r")
    return {"move": moved.timings_us["move"] / 1e6, "whole": whole}


# -- beside --------------------------------------------------------------------------------------------------------


def serve_socket() -> None:
    """Child: sends NUM_BYTES for each byte that it gets."""
    data = np.random.default_rng(1).integers(0, 256, NUM_BYTES, np.uint8).data
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print("ready", listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        with connection:
            while connection.recv(1):
                connection.sendall(data)


@contextmanager
def socket_copy() -> Iterator[Callable[[], dict[str, float]]]:
    with _child("socket") as words, socket.create_connection(("127.0.0.1", int(words[1]))) as connection:
        buffer = memoryview(bytearray(NUM_BYTES))

        def copy() -> dict[str, float]:
            began, at = time.perf_counter(), 0
            connection.sendall(b"x")
            while at < NUM_BYTES:
                at += connection.recv_into(buffer[at:])
            return {"move": time.perf_counter() - began}

        yield copy


def serve_nixl() -> None:
    """Child: a registered block, until it is killed."""
    block = np.random.default_rng(1).integers(0, 256, NUM_BYTES, np.uint8)
    agent = _agent("giver", block)
    print("ready", block.ctypes.data, agent.get_agent_metadata().hex(), flush=True)
    while True:
        agent.get_new_notifs()
        time.sleep(0.001)


@contextmanager
def raw_nixl() -> Iterator[Callable[[int], dict[str, float]]]:
    with _child("nixl") as words:
        block = np.zeros(NUM_BYTES, np.uint8)
        agent = _agent("taker", block)
        peer = agent.add_remote_agent(bytes.fromhex(words[2]))

        def read(piece: int) -> dict[str, float]:
            starts = np.arange(0, NUM_BYTES, piece)
            sizes = np.minimum(piece, NUM_BYTES - starts)
            began = time.perf_counter()
            local, remote = (
                agent.get_xfer_descs(np.stack([base + starts, sizes, 0 * starts], 1).astype(np.uint64), "DRAM")
                for base in (block.ctypes.data, int(words[1]))
            )
            handle = agent.initialize_xfer("READ", local, remote, peer)
            state = agent.transfer(handle)
            while state == "PROC":
                time.sleep(0.0002)
                state = agent.check_xfer_state(handle)
            took = time.perf_counter() - began
            assert state == "DONE"
            agent.release_xfer_handle(handle)
            return {"move": took}

        yield read


def _agent(name: str, block: np.ndarray) -> Any:
    import nixl

    from kvfold_service.movers.agent import quiet

    quiet()
    config = nixl.nixl_agent_config(backends=["UCX"], enable_prog_thread=False)
    agent = nixl.nixl_agent(f"{name}-{time.time_ns()}", config)
    agent.register_memory([(block.ctypes.data, block.nbytes, 0, "")], "DRAM")
    return agent


@contextmanager
def _child(kind: str) -> Iterator[list[str]]:
    command = [sys.executable, "-m", "tests.bench.movers", "--child", kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        words = child.stdout.readline().split()
        assert words[:1] == ["ready"], words
        try:
            yield words
        finally:
            child.kill()


# -- all of it -----------------------------------------------------------------------------------------------------


def run(rounds: int) -> dict[str, dict[str, float]]:
    """GB/s (10⁹ bytes) by case: medians, and the slowest and fastest round."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        same = stack.enter_context(pair(folder, PAGE_ENTRIES)).taker
        other = stack.enter_context(pair(folder, 48)).taker
        copy, read = stack.enter_context(socket_copy()), stack.enter_context(raw_nixl())
        cases: dict[str, Callable[[], dict[str, float]]] = {
            "socket copy": copy,
            "raw NIXL, one piece": lambda: read(NUM_BYTES),
            "raw NIXL, pieces of a page": lambda: read(PAGE_ENTRIES * ENTRY_BYTES),
            "pull by http": lambda: pull(same, "http"),
            "pull by nixl": lambda: pull(same, "nixl"),
            "pull by http, other pages": lambda: pull(other, "http"),
            "pull by nixl, other pages": lambda: pull(other, "nixl"),
        }
        seconds: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
        for _ in range(rounds + 1):
            for name, case in cases.items():
                seconds[name].append(case())
    return {name: _rates(taken[1:]) for name, taken in seconds.items()}  # the first connects and touches the memory


def _rates(taken: list[dict[str, float]]) -> dict[str, float]:
    rates = {}
    for phase in taken[0]:
        values = [NUM_BYTES / 1e9 / times[phase] for times in taken]
        rates[f"{phase}_gbs"] = round(statistics.median(values), 3)
        rates[f"{phase}_gbs_least"], rates[f"{phase}_gbs_most"] = round(min(values), 3), round(max(values), 3)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=("socket", "nixl"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        (serve_socket if arguments.child == "socket" else serve_nixl)()
        return
    results = run(arguments.rounds)
    for name, rates in results.items():
        print(f"{name:28}", "  ".join(f"{phase} {rate:.2f}" for phase, rate in rates.items()))
    if arguments.out:
        about = {"nixl": importlib.metadata.version("nixl"), "UCX_TLS": os.environ.get("UCX_TLS", "")}
        save(arguments.out, about | {"bytes": NUM_BYTES, "rounds": arguments.rounds, "cases": results})


if __name__ == "__main__":
    main()
