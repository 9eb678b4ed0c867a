"""Options, variables and files that the documents name exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvfold_service.settings import Settings

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").glob("*.md"))
OF_OTHERS = {"--build-arg", "--help"}
"""Of docker, and of every command."""
OF_THE_WORKER = {f"--{name.replace('_', '-')}" for name in Settings.model_fields}
COMPOSE = (ROOT / "docker/compose.yaml").read_text(encoding="utf-8")
MINE = ("engines", "errors", "operations", "quickstart", "security", "sizing")


def words(name: str) -> list[str]:
    """What stands in backquotes outside of blocks."""
    text = re.sub(r"^```.*?^```", "", (ROOT / f"docs/{name}.md").read_text(encoding="utf-8"), flags=re.M | re.S)
    return re.findall(r"`([^`\n]+)`", text)


@pytest.mark.parametrize("name", MINE)
def test_options(name: str) -> None:
    named = {option for word in words(name) for option in re.findall(r"--[a-z][a-z-]+", word)}
    assert named <= OF_THE_WORKER | OF_OTHERS


@pytest.mark.parametrize("name", MINE)
def test_variables(name: str) -> None:
    named = {variable for word in words(name) for variable in re.findall(r"KVFOLD_[A-Z_]+", word)}
    settings = {f"KVFOLD_{field.upper()}" for field in Settings.model_fields} | {"KVFOLD_TOKENS"}
    assert named <= settings | set(re.findall(r"\$\{(KVFOLD_\w+)", COMPOSE))


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_files(page: Path) -> None:
    named = {
        word for word in words(page.stem) if re.fullmatch(r"(tests|docker|service|kernels|clients|docs)/[\w./-]+", word)
    }
    made_by_readers = {"docker/secrets/client_token", "docker/secrets/grafana_password", "docker/.env"}
    assert not [path for path in named - made_by_readers if not (ROOT / path).exists()]
