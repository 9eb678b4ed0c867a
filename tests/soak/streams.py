"""The rows that soak requests are made of, and the entries that must come of them, as `make` has put them on disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvfold_kernels.geometry import PageLayout, entry_format
from kvfold_service import manifest as manifests

NUM_TOKENS = 1024
NUM_STREAMS = 5
WEIGHTS = "random:1"
PAGE_ENTRIES = {"hca": 1, "csa": 16, "indexer": 24}
"""Few, so that requests cross pages often."""

MANIFEST = {
    "model": "soak",
    "max_position": 2 * NUM_TOKENS,
    "compressors": [
        part.model_dump(exclude_none=True) | {"page_entries": PAGE_ENTRIES[part.kind]}
        for part in manifests.load("tiny").compressors
    ],
}


class Part:
    """One compressor as a client sees it: ratio, pages, and for each stream its rows and entries."""

    def __init__(self, part: manifests.CompressorPart, folder: Path) -> None:
        geometry = part.geometry(0)
        self.name, self.ratio, self.halves = part.name, geometry.ratio, geometry.halves
        self.layout = PageLayout.of(entry_format(part.cache_format, geometry), part.page_entries or 0)
        self.rows, self.entries = (
            [np.load(folder / f"{part.name}.{stream}.{what}.npy", mmap_mode="r") for stream in range(NUM_STREAMS)]
            for what in ("rows", "entries")
        )
        """fp32 `[NUM_TOKENS, row_width]`, uint8 `[NUM_TOKENS / ratio, entry_bytes]`."""

    def rows_of(self, page: NDArray[np.uint8], num_entries: int) -> NDArray[np.uint8]:
        """Page-free rows of a page's first entries. Raises AssertionError if anything else in it is not zero."""
        layout, n = self.layout, self.layout.entries
        assert page.shape == (layout.page_bytes,), "a page of another size"
        values = page[: layout.scale_offset].reshape(n, layout.format.value_bytes)
        end = layout.scale_offset + n * layout.format.scale_bytes
        scales = page[layout.scale_offset : end].reshape(n, layout.format.scale_bytes)
        beside = (values[num_entries:], scales[num_entries:], page[end:])
        assert not any(part.any() for part in beside), "bytes beside the entries"
        return np.concatenate([values, scales], 1)[:num_entries]

    def first_open_row(self, committed: int) -> int:
        """Position of the first row that later windows need."""
        whole = committed // self.ratio * self.ratio
        return whole if self.halves == 1 else max(0, whole - self.ratio)


def load(folder: Path) -> list[Part]:
    manifest = manifests.parse(json.loads((folder / "manifest.json").read_text()), "soak")
    return [Part(part, folder) for part in manifest.compressors]
