"""`make image-check`: builds the images for real, runs compose.yaml with them, and fails on any difference."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import engine as engines
import fleet
import sandbox
import single
from engine import ROOT, CheckFailed, Engine

IMAGES = ("cpu", "client")


def main() -> int:
    parser = argparse.ArgumentParser(prog="make image-check", description=__doc__)
    parser.add_argument("--log", type=Path, help="append what is found to this file")
    parser.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    arguments = parser.parse_args()

    def say(text: str) -> None:
        line = f"{time.time() - arguments.began:6.1f} s  {text}"
        print(line, flush=True)
        if arguments.log is not None:
            with arguments.log.open("a", encoding="utf-8") as log:
                log.write(line + "\n")

    try:
        if sandbox.is_inside():
            return _run(sandbox.engine(), say)
        engine = engines.found()
        if engine is not None:
            _build(engine, say)
            return _run(engine, say)
        _build(sandbox.prepare(), say)
        return sandbox.run_inside(sys.executable, *sys.argv, "--began", str(arguments.began))
    except CheckFailed as error:
        print(f"image check failed: {error}", file=sys.stderr)
        return 1


def _build(engine: Engine, say: Callable[[str], None]) -> None:
    version = engine.run(engine.cli, "--version")
    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {platform.machine()}"
    say(f"{datetime.date.today()}, {machine}, {version}")
    if engine.base_image is not None:
        say(f"base image, this machine's Debian with its Python: {_megabytes(engine, engine.base_image)}")
    for target in IMAGES:
        began = time.monotonic()
        image = engine.build(target)
        say(f"image {target} built in {time.monotonic() - began:.0f} s: {_megabytes(engine, image)}, base included")


def _megabytes(engine: Engine, image: str) -> str:
    return f"{engine.image_bytes(image) / 1e6:.0f} MB"


def _run(engine: Engine, say: Callable[[str], None]) -> int:
    with tempfile.TemporaryDirectory() as secrets:
        engine.run(str(ROOT / "docker/make-secrets.sh"), secrets)
        os.environ["KVFOLD_SECRETS"] = secrets
        try:
            single.check(engine, Path(secrets), say)
            fleet.check(engine, say)
        finally:
            engine.down()
    say("passed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
