"""Every command of the README and the documents runs, in the order in which a reader meets it."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.docs_blocks import EXCLUDED, ROOT, WORKER, Command, Reader, commands, pages, told, wanted

PRINTS = {
    "README.md": {
        "import numpy": "1 entry, 2 tokens in the open window\n(1, 512)",
        "python -c": "...'skipped': []...'num_entries': 1...",
    },
}
"""What a command prints and its page does not show."""


WANTED = {page: wanted(page) for page in pages() if wanted(page)}


@pytest.mark.parametrize("page", WANTED)
def test_commands(page: str, tmp_path: Path) -> None:
    if any("npm " in command.text for command in WANTED[page]) and shutil.which("npm") is None:
        pytest.skip("npm is not on PATH")
    with Reader(tmp_path, WANTED[page]) as reader:
        for command in WANTED[page]:
            printed, shown = reader.run(command), command.output or told(PRINTS, command)
            if shown is not None:
                pattern = re.escape(shown.strip()).replace(re.escape("..."), ".*")
                assert re.fullmatch(pattern, printed.strip(), re.DOTALL), f"{command.name}\n{printed}"


@pytest.mark.parametrize("table", [EXCLUDED, PRINTS])
def test_what_is_told_is_told_of_a_command(table: dict[str, dict[str, str]]) -> None:
    for page, starts in table.items():
        for start in starts:
            assert any(command.text.startswith(start) for command in commands(page)), f"{page}: {start}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in (*pages(), "CONTRIBUTING.md"))
    named = set(re.findall(r"(?:^\$ |`)make ([a-z-]+)", text, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def test_a_command_that_fails_is_noticed(tmp_path: Path) -> None:
    with Reader(tmp_path, [Command("a page", "sh", WORKER, None)]) as reader:
        assert reader.run(Command("a page", "sh", "echo 1", None)) == "1\n"
        with pytest.raises(AssertionError, match="false"):
            reader.run(Command("a page", "sh", "false", None))
