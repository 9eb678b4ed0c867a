"""The drawings are well-formed, each is shown with a text in its place, and their numbers are the code's."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from kvfold_client import wire
from kvfold_kernels.geometry import KINDS, Geometry, PageLayout, entry_format

DOCS = Path(__file__).parents[1] / "docs"
PICTURES = sorted((DOCS / "img").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


def texts(name: str) -> list[str]:
    root = ElementTree.parse(DOCS / f"img/{name}.svg").getroot()
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def numbers(name: str) -> set[int]:
    return {int(word.replace(",", "")) for text in texts(name) for word in re.findall(r"\d[\d,]*\b", text)}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_pictures_are_described_and_shown(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    assert [child.tag for child in root][:2] == [f"{SVG}title", f"{SVG}desc"]
    assert not [element for element in root.iter() if element.tag.endswith(("script", "image", "use"))]
    page = (DOCS / "pictures.md").read_text(encoding="utf-8")
    (shown,) = re.findall(rf"!\[([^\]]{{20,}})\]\(img/{picture.name}\)", page)
    assert shown


def test_pictures_are_all_there() -> None:
    assert [path.stem for path in PICTURES] == ["bytes", "data-path", "window"]


def test_bytes_of_a_packed_page() -> None:
    layout = layout_of("csa", "fp8_ds_mla")
    assert layout.entries == 64
    assert {
        layout.format.value_bytes,
        layout.value_slice(63).start,
        layout.scale_offset,
        layout.format.scale_bytes,
        layout.scale_slice(63).stop,
        layout.page_bytes,
        Geometry("csa", 4, 512).nope_dim,
    } <= numbers("bytes")


def test_bytes_of_an_indexer_page() -> None:
    layout = layout_of("indexer", "indexer_fp8")
    assert {layout.value_slice(63).start, layout.scale_offset, layout.page_bytes} <= numbers("bytes")
    assert layout.scale_slice(63).stop == layout.page_bytes


def test_bytes_of_a_frame() -> None:
    rows = {"compressor": "c", "dtype": "fp32", "shape": [1, 1], "data": b"\0\0\0\0"}
    frame = wire.encode(wire.FRAME, {"version": 1, "tensors": [rows, rows]})
    assert frame[:4] == b"KVF1"
    assert int.from_bytes(frame[8:12], "little") == len(frame[12:].split(b"\0" * 8)[0].rstrip(b"\0"))
    assert {4, 12, 64} <= numbers("bytes")


def test_windows() -> None:
    csa, hca = (Geometry(kind, KINDS[kind].ratio, KINDS[kind].head_dim) for kind in ("csa", "hca"))
    assert csa.live_start(13) == 8
    assert csa.num_entries(13) == 3
    assert csa.num_entries(15) + 1 == csa.num_entries(16)
    assert (hca.num_entries(300), hca.live_start(300), 300 - hca.live_start(300)) == (2, 256, 44)
    assert hca.num_entries(383) + 1 == hca.num_entries(384)
    assert {8, 12, 15, 44, 256, 299, 383} <= numbers("window")


def layout_of(kind: str, cache_format: str) -> PageLayout:
    usual = KINDS[kind]
    geometry = Geometry(kind, usual.ratio, usual.head_dim)
    return PageLayout.of(entry_format(cache_format, geometry), geometry.default_page_entries)
