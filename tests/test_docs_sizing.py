"""The numbers of docs/sizing.md, worked out again by the code that allocates."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvfold_kernels.geometry import INPUT_ITEM_BYTES, KINDS
from kvfold_service import manifest as manifests
from kvfold_service import weights as weight_files
from kvfold_service.caches import Caches
from kvfold_service.manifest import Manifest

TEXT = (Path(__file__).parents[1] / "docs/sizing.md").read_text(encoding="utf-8")
MODELS = {"Flash": manifests.load("deepseek-v4-flash"), "Pro": manifests.load("deepseek-v4-pro")}
LENGTHS = {"8k": 8192, "128k": 131_072, "1M": 1_048_576}
GIB = 1 << 30


def mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f}"


def with_hca_pages_of(manifest: Manifest, entries: int) -> Manifest:
    parts = [p.model_copy(update={"page_entries": entries}) if p.kind == "hca" else p for p in manifest.compressors]
    return manifest.model_copy(update={"compressors": tuple(parts)})


def page_bytes(manifest: Manifest, num_tokens: int) -> dict[str, int]:
    """Bytes of all pages that a request of so many tokens holds, by kind."""
    total = dict.fromkeys(KINDS, 0)
    for part in manifest.compressors:
        layout, entries = part.layout(), part.geometry(manifest.draft_slack).num_entries(num_tokens)
        total[part.kind] += -(-entries // layout.entries) * layout.page_bytes
    return total


def ring_bytes(manifest: Manifest, dtype: str) -> int:
    geometries = [part.geometry(manifest.draft_slack) for part in manifest.compressors]
    return sum(geometry.ring_rows * geometry.row_width for geometry in geometries) * INPUT_ITEM_BYTES[dtype]


def row_bytes(manifest: Manifest, dtype: str) -> int:
    """Bytes that a step carries for one token, over all compressors."""
    return sum(part.geometry(0).row_width for part in manifest.compressors) * INPUT_ITEM_BYTES[dtype]


def says(*cells: object) -> None:
    assert f"| {' | '.join(str(cell) for cell in cells)} |\n" in TEXT


@pytest.mark.parametrize("name", MODELS)
def test_bytes_a_token_and_a_request(name):
    manifest = MODELS[name]
    counts = [sum(part.kind == kind for part in manifest.compressors) for kind in ("hca", "csa", "indexer")]
    a_token = sum(page_bytes(manifest, LENGTHS["1M"]).values()) / LENGTHS["1M"]
    rings = [mb(ring_bytes(manifest, dtype)) for dtype in ("fp32", "bf16")]
    says(name, ", ".join(map(str, counts)), f"{a_token:,.0f}", *rings)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", MODELS)
def test_a_request_of_a_length(name, length):
    manifest = MODELS[name]
    pages = page_bytes(manifest, LENGTHS[length])
    together = sum(pages.values())
    kinds = [mb(pages[kind]) for kind in ("hca", "csa", "indexer")]
    says(name, length, *kinds, mb(together), mb(together + ring_bytes(manifest, "fp32")))


@pytest.mark.parametrize("name", MODELS)
def test_hca_pages_of_64_entries(name):
    usual, packed = MODELS[name], with_hca_pages_of(MODELS[name], 64)
    at = LENGTHS["1M"]
    before, after = (sum(page_bytes(manifest, at).values()) for manifest in (usual, packed))
    says(name, f"{before / at:,.0f}", f"{after / at:,.0f}", f"{100 * (before - after) / before:.1f} %")


@pytest.mark.parametrize("name", MODELS)
def test_what_a_step_carries(name):
    sizes = {dtype: row_bytes(MODELS[name], dtype) for dtype in ("fp32", "bf16")}
    chunk = {dtype: f"{GIB // size:,}" for dtype, size in sizes.items()}
    says(name, *(f"{size:,}" for size in sizes.values()), *chunk.values())


@pytest.mark.parametrize("name", MODELS)
def test_tokens_in_a_budget(name):
    """A budget becomes as many pages for each compressor; of default size, they cover the same tokens in all."""
    layouts = {part: part.layout() for part in MODELS[name].compressors}
    (tokens,) = {part.ratio * layout.entries for part, layout in layouts.items()}
    num_pages = 64 * GIB // sum(layout.page_bytes for layout in layouts.values())
    says(name, *(f"{num_pages // -(-length // tokens):,}" for length in LENGTHS.values()))


def test_this_is_what_a_worker_allocates():
    """Of `tiny`, whose pages and rings are small enough to allocate here."""
    tiny = manifests.load("tiny")
    caches = Caches.allocate(tiny, weight_files.seeded(tiny, 1), 3, 7, "cpu")
    allocated = caches.bytes_by_pool()
    assert allocated.pop("rings") == 3 * ring_bytes(tiny, "fp32")
    assert sum(allocated.values()) == 7 * sum(page_bytes(tiny, 256).values())
