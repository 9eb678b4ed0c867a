"""The fenced blocks of the documents, and a reader who runs those of a page one after another.

`python -m tests.docs_blocks` runs them all with the Python that it is run by, of a fresh environment, say.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[1]
PORTS = ("8787", "8788")
"""In the documents; the reader has free ones in their place."""
WORKER = "kvfold serve --manifest tiny --weights random:1"
ENGINE = "needs a container engine; `make image-check` runs the same file"
MESSAGE = "a message; tests/test_docs.py reads it"
EXCLUDED = {
    "README.md": {"make demo": "tests/test_demo.py runs the demo", "make test": "this is one of them"},
    "docs/quickstart.md": {"docker compose": ENGINE},
    "docs/operations.md": {"docker compose": ENGINE},
    "docs/fleet.md": {
        "try:": "what to write around a step of one's own; tests/test_fleet_recovery.py recovers",
        "ray start": "starts a cluster on this machine; tests/test_fleet_ray.py starts its own",
    },
    "docs/contract.md": {"{\n": MESSAGE, "from kvfold_client": "a list of names, without the rows it speaks of"},
}
"""Page → (how a command begins → why it is not run)."""
_FILE = re.compile(r"# (\w+\.txt)\n")
"""First line of a block `text` that is a file."""
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$(\n\nIt prints:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Command:
    page: str
    language: str
    text: str
    output: str | None
    """What the page says that it prints; ... stands for anything."""

    @property
    def name(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def serves(self) -> bool:
        return self.language in ("sh", "console") and re.search(r"^kvfold serve ", self.text, re.MULTILINE) is not None


def pages() -> list[str]:
    return ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


def commands(page: str) -> list[Command]:
    """Those of the blocks sh, python and console; a console block has one behind each $. Files count as commands."""
    found: list[Command] = []
    for language, text, _, output in _BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        if language in ("sh", "python") or (language == "text" and _FILE.match(text)):
            found.append(Command(page, language, text, output or None))
        elif language == "console":
            parts = [part.partition("\n") for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]]
            found += [Command(page, language, command, shown or None) for command, _, shown in parts]
    return found


def told(table: dict[str, dict[str, str]], command: Command) -> str | None:
    """What a table says of a command."""
    texts = (text for start, text in table.get(command.page, {}).items() if command.text.startswith(start))
    return next(texts, None)


def wanted(page: str) -> list[Command]:
    """Those of a page that are run."""
    return [command for command in commands(page) if told(EXCLUDED, command) is None]


class Reader:
    """Runs commands in a folder that has the repository's `docker`. What serves goes on until the reader has done.

    Before the first command there is a worker, unless the page starts one itself.
    """

    def __init__(self, folder: Path, page: list[Command]) -> None:
        self._folder = folder
        shutil.copytree(ROOT / "docker", folder / "docker", dirs_exist_ok=True)
        self._ports = {port: _free_port() for port in PORTS}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        serving = {"KVFOLD_PORT": self._ports[PORTS[0]], "KVFOLD_DRAIN_SECONDS": "0", "KVFOLD_LOG_LEVEL": "error"}
        self._environment = os.environ | {"PATH": path} | serving
        self._servers: list[subprocess.Popen[str]] = []
        if not any(command.serves for command in page):
            self._serve(WORKER)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop()

    def run(self, command: Command) -> str:
        """Standard output. Raises AssertionError with what a command that failed said."""
        text = command.text
        for port, free in self._ports.items():
            text = text.replace(port, free)
        if command.language == "python":
            return self._done(sys.executable, "-c", text)
        if command.language == "text":
            (self._folder / _FILE.findall(text)[0]).write_text(text)
            return ""
        lines = text.splitlines()
        script = [line for line in lines if not line.startswith("kvfold serve ")]
        serving = lines[len(script) :]
        assert script + serving == lines, "kvfold serve must come last in its block"
        printed = self._done("bash", "-euo", "pipefail", "-c", "\n".join(script)) if script else ""
        if serving:
            self._stop()
        for line in serving:
            self._serve(line.removesuffix("&"))
        return printed

    def _done(self, *command: str) -> str:
        done = subprocess.run(
            command, cwd=self._folder, env=self._environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{command[-1]}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    def _serve(self, line: str) -> None:
        words = [sys.executable, "-m", "kvfold_service", *line.split()[2:]]
        server = subprocess.Popen(words, cwd=self._folder, env=self._environment, stdout=subprocess.PIPE, text=True)
        self._servers.append(server)
        assert server.stdout is not None
        assert server.stdout.readline().startswith("ready "), line

    def _stop(self) -> None:
        while self._servers:
            server = self._servers.pop()
            server.terminate()
            server.communicate(timeout=30)


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def main() -> None:
    for page in filter(wanted, pages()):
        with tempfile.TemporaryDirectory() as folder, Reader(Path(folder), wanted(page)) as reader:
            for command in wanted(page):
                began = time.monotonic()
                reader.run(command)
                print(f"{page}: {command.name[:80]!r} ran in {time.monotonic() - began:.1f} s", flush=True)
        for command in commands(page):
            if (reason := told(EXCLUDED, command)) is not None:
                print(f"{page}: {command.name[:80]!r} left out: {reason}", flush=True)


if __name__ == "__main__":
    main()
