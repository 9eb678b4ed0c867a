"""What the page on scale needs, and the scheduler in real time: python -m tests.bench.scheduler [--out FILE]

scale      one core: an owner among n members, a decode step over HTTP, a look at a worker's health
real       a trace over worker processes of backend `cpu`, in real time: prompts in chunks or whole, one worker, two, or
           one for prefill and one for decode (two workers share this machine's cores)
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvfold_client import Client
from kvfold_client.fleet import WorkerInfo
from kvfold_client.fleet.members import Members
from kvfold_client.peers import Peer
from kvfold_client.scheduler import RowSource, command, shapes_of
from kvfold_client.scheduler.accounting import WORKERS
from tests.bench.measure import median_us, save, worker

TRACE = ["--requests", "40", "--rate", "4", "--input", "700", "--output", "24", "--longest", "4000", "--seed", "3"]
ROUNDS = 40
REAL_ROUNDS = 5
POLICY = ["--budget", "512", "--drafts", "2"]


class Given(Members):
    """Members that are what they are said to be; nobody is asked."""

    def __init__(self, count: int) -> None:
        super().__init__(1.0)
        names = [f"worker-{i}" for i in range(count)]
        self._seen = {name: WorkerInfo(name, f"http://{name}:1", "any", True, True, "e", "c") for name in names}

    def find(self) -> Mapping[str, Peer]:
        return {}


def best_us(call: Callable[[], Any], repeats: int) -> float:
    """The least median of some rounds: others work on this machine too."""
    return min(median_us(call, repeats) for _ in range(ROUNDS))


def scale() -> dict[str, Any]:
    """µs."""
    results: dict[str, Any] = {"lookup_us": {}}
    for count in WORKERS:
        plane, ids = Given(count), itertools.count()
        results["lookup_us"][str(count)] = best_us(lambda plane=plane, ids=ids: plane.owner(f"r{next(ids)}"), 50)
    with worker() as (url, _), Client(url, retries=0) as client:
        source = RowSource(0, shapes_of(client.manifest()))
        positions = itertools.count()
        rows = {name: source.rows(0, name, 0, 1) for name in source.shapes}
        results["step_us"] = best_us(lambda: client.step([("r", next(positions), 1)], rows), 50)
        results["health_us"] = best_us(client.worker, 50)
    return results


@contextlib.contextmanager
def fleet(folder: Path, *roles: str) -> Iterator[Path]:
    """A peers file, and a worker process for each role."""
    peers = folder / ("-".join(roles) + ".txt")
    peers.write_text("")
    with contextlib.ExitStack() as stack:
        urls = [
            stack.enter_context(worker(peers_file=peers, backend="cpu", worker_id=f"{role}-{i}"))[0]
            for i, role in enumerate(roles)
        ]
        lines = [f"{role}-{i} {url} {role}" for i, (role, url) in enumerate(zip(roles, urls, strict=True))]
        peers.write_text("\n".join(lines) + "\n")
        yield peers


def real(folder: Path) -> dict[str, Any]:
    """Summaries by workers, then by variant, with the options that gave them; of each the round of least mean ttft."""
    results: dict[str, Any] = {"options": [*TRACE, *POLICY]}
    for roles in (("any",), ("any", "any"), ("prefill", "decode")):
        out = folder / "out.json"
        with fleet(folder, *roles) as peers:
            argv = ["--peers", str(peers), "--clock", "real", "--compare", "--json", str(out), *TRACE, *POLICY]
            runs = []
            for _ in range(REAL_ROUNDS):
                assert command.run(argv) == 0, roles
                runs.append(json.loads(out.read_text())["runs"])
        results[" + ".join(roles)] = {
            variant: min((run[variant] for run in runs), key=lambda summary: summary["ttft_ms"]["mean"])
            for variant in runs[0]
        }
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {"scale": scale()}
    print(json.dumps(results["scale"], indent=1), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        results["real"] = real(Path(folder))
    if arguments.out:
        save(arguments.out, results)


if __name__ == "__main__":
    main()
