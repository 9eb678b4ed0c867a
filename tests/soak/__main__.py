"""A worker under a bounded load for long: clients are killed, it is itself, and every reply is checked.

    python -m tests.soak [--minutes 30] [--rate 45] [--out tests/results/soak.json]

Clients are processes of two tenants (`client`); one is killed every few seconds and another takes its place. For the
first part of the time the worker is killed (SIGKILL) or stopped (SIGTERM) every other minute, and started again with
its key; then it runs through. At the end its memory must be flat, its pages free, its books in order.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.bench.measure import save
from tests.soak.make import make
from tests.soak.run import Soak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=45.0, help="calls a second, all clients together")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process of it lives on
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder))
        soak = Soak(Path(folder), given.rate)
        began = time.time()
        try:
            soak.run(60 * given.minutes)
            result = soak.result()
        finally:
            soak.kill()
    result |= {"minutes": round((time.time() - began) / 60, 1), "rate": given.rate}
    print(json.dumps({name: value for name, value in result.items() if name != "rss_mib"}, indent=1))
    if given.out:
        save(given.out, result)
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
