"""What `kvfold simulate` asks of the worker extra: the sizes of a manifest's compressors, and entries by `reference`.

The client finds both by entry points (group kvfold.expected), so that it imports neither torch nor this package.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvfold_kernels import plan as p
from kvfold_kernels.compress.reference import compress_rows
from kvfold_kernels.compressor import Compressor
from kvfold_kernels.entry import encode
from kvfold_service import manifest as manifests
from kvfold_service import weights as weight_files
from kvfold_service.caches import Caches
from kvfold_service.compat import compat_hash
from kvfold_service.errors import StartError


def sizes(source: str | dict[str, Any]) -> dict[str, Any]:
    """A manifest (a preset, a file, or its JSON) with what follows from its geometry. Raises ValueError.

    {"manifest": as `/v1/manifest`, "sizes": {compressor: {"halves", "row_width", "ring_rows", "ring_item_bytes",
    "entry_bytes", "page_entries", "page_bytes"}}}
    """
    manifest = _manifest(source)
    return {
        "manifest": manifest.to_json(),
        "sizes": {part.name: _sizes(part, manifest.draft_slack) for part in manifest.compressors},
    }


def _sizes(part: manifests.CompressorPart, draft_slack: int) -> dict[str, int]:
    geometry, layout = part.geometry(draft_slack), part.layout()
    return {
        "halves": geometry.halves,
        "row_width": geometry.row_width,
        "ring_rows": geometry.ring_rows,
        "ring_item_bytes": 2 if part.input_dtype == "bf16" else 4,
        "entry_bytes": layout.format.entry_bytes,
        "page_entries": layout.entries,
        "page_bytes": layout.page_bytes,
    }


class Reference:
    """Entries by the definition, window by window, of rows that the caller has. Raises ValueError for bad weights."""

    def __init__(self, manifest: dict[str, Any], weights: str) -> None:
        parsed = _manifest(manifest)
        try:
            loaded = weight_files.load(weights, parsed)
        except StartError as error:
            raise ValueError(str(error)) from None
        self.compat = compat_hash(parsed, loaded)
        caches = Caches.allocate(parsed, loaded, num_rings=1, pages_per_compressor=1, device="cpu")
        self._compressors = {cache.name: cache.compressor for cache in caches.compressors}

    def first_row(self, name: str, entry: int) -> int:
        """Position of the first row that entries from `entry` on are made of."""
        geometry = self._compressors[name].geometry
        return geometry.live_start(entry * geometry.ratio)

    def entries(self, name: str, first: int, stop: int, rows: NDArray[Any]) -> NDArray[np.uint8]:
        """Page-free rows uint8 `[stop − first, entry_bytes]` of entries [first, stop).

        rows   bf16 bits (uint16) or fp32 `[stop·ratio − first_row(name, first), row_width]`
        """
        compressor = self._compressors[name]
        windows = _windows(compressor, first, stop, self.first_row(name, first))
        tensor = torch.from_numpy(np.array(rows.view(np.int16) if rows.dtype == np.uint16 else rows))
        tensor = tensor.view(torch.bfloat16) if rows.dtype == np.uint16 else tensor
        no_ring = torch.zeros((1, 1, compressor.geometry.row_width))
        values, scales = encode(torch.from_numpy(compress_rows(windows, tensor, no_ring, compressor)), compressor)
        return torch.cat((values, scales), 1).numpy()


def _windows(compressor: Compressor, first: int, stop: int, first_row: int) -> torch.Tensor:
    """int32 `[7, stop − first]`, as `Plan.windows`, for rows that are all in the input, from position first_row on."""
    geometry = compressor.geometry
    entry = np.arange(first, stop, dtype=np.int32)
    end = (entry + 1) * geometry.ratio
    windows = np.zeros((p.WINDOW_FIELDS, len(entry)), np.int32)
    windows[p.INPUT_END] = end - 1 - first_row
    windows[p.NUM_PAD] = np.maximum(0, geometry.window_rows - end)
    windows[p.POSITION] = entry * geometry.ratio
    return torch.from_numpy(windows)


def _manifest(source: str | dict[str, Any]) -> manifests.Manifest:
    try:
        return manifests.load(source) if isinstance(source, str) else manifests.parse(source, "the manifest")
    except StartError as error:
        raise ValueError(str(error)) from None
