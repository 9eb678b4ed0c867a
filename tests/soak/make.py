"""Rows and entries of the soak's streams: random, and by `reference`; once, on disk, so that clients need no torch."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from kvfold_service import manifest as manifests
from kvfold_service.expected import Reference
from tests.soak.streams import MANIFEST, NUM_STREAMS, NUM_TOKENS, WEIGHTS


def make(folder: Path) -> None:
    """Rows and entries of all streams, and the manifest."""
    (folder / "manifest.json").write_text(json.dumps(MANIFEST))
    reference = Reference(MANIFEST, WEIGHTS)
    for part in manifests.parse(MANIFEST, "soak").compressors:
        geometry = part.geometry(0)
        for stream in range(NUM_STREAMS):
            seed = [stream, geometry.row_width]
            rows = np.random.default_rng(seed).standard_normal((NUM_TOKENS, geometry.row_width), np.float32)
            np.save(folder / f"{part.name}.{stream}.rows.npy", rows)
            entries = reference.entries(part.name, 0, NUM_TOKENS // geometry.ratio, rows)
            np.save(folder / f"{part.name}.{stream}.entries.npy", entries)
