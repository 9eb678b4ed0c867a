"""The README's examples run as they stand, but for the port."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.measure import worker

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


@pytest.fixture(scope="module")
def port() -> Iterator[str]:
    with worker() as (url, _):
        yield url.rpartition(":")[2]


def run(*command: str) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | {"PATH": path})
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_python_example(port: str) -> None:
    (example,) = blocks("python")
    output = run(sys.executable, "-c", example.replace("8787", port))
    assert output == "1 entry, 2 tokens in the open window\n(1, 512)\n"


def test_curl_example(port: str) -> None:
    (example,) = blocks("sh")
    output = run("bash", "-c", example.replace("8787", port))
    assert "'num_entries': 1" in output
    assert "'skipped': []" in output


def test_commands_are_make_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    (console,) = blocks("console")
    named = set(re.findall(r"\$ make ([a-z-]+)", console))
    assert named == {"demo", "test"}
    assert named <= targets
