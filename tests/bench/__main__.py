"""Ingest and step latency on this machine: python -m tests.bench [--out FILE] [ingest latency]

Plans and kernels: `kvfold bench`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.bench import ingest, latency
from tests.bench.measure import save

_BENCHES = {"ingest": ingest.run, "latency": latency.run}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(_BENCHES)}; default all")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    results = {}
    for name in arguments.names or _BENCHES:
        for case, figures in _BENCHES[name]().items():
            results[f"{name}: {case}"] = figures
            print(f"{name:8} {case:32}", "  ".join(f"{key} {value:.1f}" for key, value in figures.items()), flush=True)
    if arguments.out:
        save(arguments.out, results)


if __name__ == "__main__":
    main()
