"""Everything that wants a GPU, one process after another: checks first, then times. Ends with a table.

    python -m tests.gpu --out FOLDER [--only WORD …] [--peers FOLDER]
    (PYTHONPATH: clients, service, kernels and the root; `make kernels` before)

FOLDER gets each part's log and raw results. `--peers`: SGLang and vLLM to be timed beside ours. Exit code 1 if a part
failed or took longer than its limit; the others run all the same.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
BACKENDS = ("cute", "triton")
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


class Part(NamedTuple):
    """A command, where {out} is the folder of results, and the seconds it may take."""

    name: str
    command: str
    limit_s: float


def parts(peers: Path | None) -> list[Part]:
    """In the order in which they run: what is wrong is known before anything is timed."""
    checks = [
        Part("test_triton", "-m pytest -q tests/gpu/test_triton.py", 300),
        Part("check_cute", "tests/gpu/check_cute.py", 300),
    ]
    times = [Part("start_cute", "-m tests.gpu.start_cute", 60)]
    for backend in BACKENDS:
        chosen = f"--backend {backend}"
        checks += [Part(f"sanitizer_{backend}_{tool}", f"tests/gpu/sanitize.py {chosen}", 180) for tool in TOOLS]
        checks.append(_kept(f"read_back_{backend}", f"tests/gpu/read_back.py {chosen}", 120))
        checks.append(_kept(f"worker_{backend}", f"tests/gpu/check_worker.py {chosen}", 400))
        times.append(_kept(f"pinned_{backend}", f"-m tests.bench.bench_pinned {chosen}", 120))
    times.append(_kept("bound_cute", "-m tests.gpu.bound", 180))
    times.append(_kept("near_cute", "-m tests.bench.bench_near", 120))
    times.append(_kept("shapes", "-m tests.bench.bench_shapes", 200))
    if peers is not None:
        times.append(_kept("beside", f"-m tests.bench.bench_beside --peers {peers}", 400))
    return checks + times


def _kept(name: str, command: str, limit_s: float) -> Part:
    """With raw results in a file of the part's name."""
    return Part(name, f"{command} --out {{out}}/{name}.json", limit_s)


def run(part: Part, out: Path) -> tuple[str, float]:
    """How the part ended, and after how many seconds; what it printed goes to its log."""
    command = [sys.executable, *part.command.format(out=out).split()]
    environment = dict(os.environ)
    if part.name.startswith("sanitizer_"):
        if not (tool := shutil.which("compute-sanitizer")):
            return "no compute-sanitizer", 0.0
        command = [tool, "--tool", part.name.rpartition("_")[2], "--error-exitcode", "1", *command]
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # else a tensor's neighbours hide what lies beyond its end
    began = time.monotonic()
    with (out / f"{part.name}.log").open("w") as log:
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, timeout=part.limit_s, check=False
            )
            how = "ok" if not done.returncode else f"exit code {done.returncode}"
        except subprocess.TimeoutExpired:
            how = f"not over after {part.limit_s:g} s"
    return how, time.monotonic() - began


def run_all(chosen: Sequence[Part], out: Path) -> int:
    out.mkdir(parents=True, exist_ok=True)
    width = max(len(part.name) for part in chosen)
    bad = 0
    for part in chosen:
        how, seconds = run(part, out)
        bad += how != "ok"
        print(f"{part.name:{width}}  {seconds:6.1f} s  {how}", flush=True)
    return int(bad > 0)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="WORD", help="parts with one of these in their names"
    )
    parser.add_argument("--peers", type=Path)
    given = parser.parse_args(argv)
    chosen = [part for part in parts(given.peers) if any(word in part.name for word in given.only)]
    if not chosen:
        parser.error(f"there is no such part; there are {', '.join(part.name for part in parts(given.peers))}")
    return run_all(chosen, given.out.absolute())


if __name__ == "__main__":
    sys.exit(main())
