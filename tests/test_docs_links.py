"""Links inside the documents lead somewhere, and lines can be read in a terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
_CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Of each heading, as GitHub makes them; a heading that is there twice has a number behind its second."""
    found: list[str] = []
    for head in re.findall(r"^#+ (.*)$", _CODE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE):
        slug = re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-")
        found.append(f"{slug}-{found.count(slug)}" if slug in found else slug)
    return set(found)


def links(page: Path) -> list[tuple[str, str]]:
    """(file or nothing, anchor or nothing) of each link that does not leave the repository."""
    text = _CODE.sub("", page.read_text(encoding="utf-8"))
    targets = [re.sub(r"\s+", "", target) for target in re.findall(r"\]\(([^)]+)\)", text)]
    return [target.partition("#")[::2] for target in targets if not re.match(r"[a-z]+:", target)]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(page: Path) -> None:
    for file, anchor in links(page):
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name} links to {file}"
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {file}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_no_address_of_a_machine_is_named(page: Path) -> None:
    hosts = set(re.findall(r"https?://([^/\s:`'\")]+)", page.read_text(encoding="utf-8")))
    assert hosts <= {"127.0.0.1", "HOST"}, f"{page.name} names {hosts}"


@pytest.mark.parametrize("name", ["quickstart", "engines", "sizing", "operations", "security", "errors", "pictures"])
def test_lines_fit(name: str) -> None:
    """All but rows of tables."""
    lines = (ROOT / f"docs/{name}.md").read_text(encoding="utf-8").splitlines()
    assert max(len(line) for line in lines if not line.startswith("|")) <= 120


@pytest.mark.parametrize("page", [path for path in PAGES if path.parent.name == "docs"], ids=lambda path: path.stem)
def test_every_page_is_found_from_the_readme(page: Path) -> None:
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        new = {
            (source.parent / file).resolve() for source in new for file, _ in links(source) if file.endswith(".md")
        } - reached
    assert page in reached
