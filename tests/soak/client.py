"""One soak client: random calls on requests of its own, every reply checked. `python -m tests.soak.client FOLDER URL …`

Killed at any moment by whoever started it; it keeps its counts in a file. A reply that is wrong ends it with code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvfold_client import Client, errors
from tests.soak.calls import CALLS
from tests.soak.soaker import Soaker
from tests.soak.streams import load

EXPECTED_WHEN_BUSY = (errors.PoolExhausted, errors.QueueFull, errors.QuotaExceeded)
EXPECTED_WHEN_LOST = (errors.TransportError, errors.UnknownRequest, errors.PositionGap, errors.PositionConflict)
EXPECTED_WHEN_LOST += (errors.StaleHandle, errors.Draining, errors.NotReady)


def run(soaker: Soaker, rate: float, keep: Callable[[], None], over: Callable[[], bool]) -> None:
    names = list(CALLS)
    weights = np.array([CALLS[name][0] for name in names], float)
    kept = time.monotonic()
    while not over():
        name = str(soaker.rng.choice(names, p=weights / weights.sum()))
        try:
            CALLS[name][1](soaker)
            soaker.counts[name] += 1
        except EXPECTED_WHEN_BUSY as error:
            soaker.counts[f"refused: {error.code}"] += 1
            soaker.make_room()
        except EXPECTED_WHEN_LOST as error:
            soaker.counts[f"lost: {type(error).__name__}"] += 1
            soaker.explain(error)
        if time.monotonic() - kept > 1:
            keep()
            kept = time.monotonic()
        time.sleep(float(soaker.rng.exponential(1 / rate)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("url")
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--token", required=True)
    parser.add_argument("--stranger", required=True, help="a token of another tenant")
    parser.add_argument("--admin", required=True)
    parser.add_argument("--lease-seconds", type=float, required=True)
    parser.add_argument("--rate", type=float, required=True, help="calls a second")
    given = parser.parse_args()
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    file = given.folder / f"client-{given.number}.json"
    clients = [Client(given.url, token, timeout=20) for token in (given.token, given.stranger, given.admin)]
    soaker = Soaker(*clients, load(given.folder), given.number, given.lease_seconds)

    def keep(**more: Any) -> None:
        draft = file.with_suffix(".part")
        draft.write_text(json.dumps({"counts": soaker.counts, **more}))
        os.replace(draft, file)

    try:
        run(soaker, given.rate, keep, over.is_set)
        soaker.leave()
    except Exception:
        keep(wrong=traceback.format_exc())
        return 1
    keep()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
