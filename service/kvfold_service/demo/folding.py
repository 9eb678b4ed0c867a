"""The model's compressed entries, made by a worker: the only place where the model and kvfold meet.

transformers' compressors ask their cache layer for two things: `store_compression_weights` takes the projected kv and
gate rows and gives back those whose windows have closed, and `update_compressor_states` takes the entries pooled from
them and gives back all entries so far. A `FoldedCacheLayer` sends the rows to the worker, gives back none to pool, and
answers the second question with the entries read from the worker's pages. The model itself is not touched.

Importing this module imports `transformers`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HCACache

from kvfold_client import decode_page


class Worker(Protocol):
    """What is used of `kvfold_client.Client`."""

    def step(self, requests: Any, tensors: Any) -> Any: ...

    def read_pages(self, handles: Any) -> Any: ...

    def release(self, id: str) -> Any: ...


class FoldingError(RuntimeError):
    """The worker's entries and the model do not fit together."""


@dataclass
class Tally:
    """What one compressor cost over a run. `timings_us` is the worker's own account of its steps."""

    steps: int = 0
    entries: int = 0
    launches: int = 0
    skipped: int = 0
    pages_read: int = 0
    sent_bytes: int = 0
    read_bytes: int = 0
    step_us: float = 0.0  # the calls as the client sees them, HTTP included
    read_us: float = 0.0
    timings_us: Mapping[str, float] = field(default_factory=dict)

    def __add__(self, other: Tally) -> Tally:
        numbers = [name for name in vars(self) if name != "timings_us"]
        phases = [*self.timings_us, *(phase for phase in other.timings_us if phase not in self.timings_us)]
        return Tally(
            **{name: getattr(self, name) + getattr(other, name) for name in numbers},
            timings_us={phase: self.timings_us.get(phase, 0) + other.timings_us.get(phase, 0) for phase in phases},
        )


class FoldedCompressor:
    """One compressor of one request, kept by the worker; here only the entries already read and the token count."""

    def __init__(self, worker: Worker, request_id: str, manifest_row: dict):
        self.worker, self.request_id, self.name = worker, request_id, manifest_row["name"]
        self.page_entries, self.cache_format = manifest_row["page_entries"], manifest_row["cache_format"]
        self.entries = torch.zeros(0, manifest_row["head_dim"])  # [num_entries, head_dim] fp32
        self.num_tokens = 0
        self.tally = Tally()

    def append(self, kv: torch.Tensor, gate: torch.Tensor) -> None:
        """Send the rows `[kv | gate]` of the next tokens (each [1, T, halves·D]) and read the pages that changed."""
        rows = torch.cat([kv, gate], dim=-1)[0].float().cpu().numpy()
        began = time.perf_counter()
        reply = self.worker.step([(self.request_id, self.num_tokens, len(rows))], {self.name: rows})
        self.tally += Tally(
            steps=1,
            launches=reply.launches,
            skipped=len(reply.skipped),
            sent_bytes=rows.nbytes,
            step_us=(time.perf_counter() - began) * 1e6,
            timings_us=reply.timings_us,
        )
        self.num_tokens += len(rows)
        part = reply.requests[self.request_id][self.name]
        if part.pages:
            self._read(part.pages, first_page=part.new_entries[0] // self.page_entries)
        if len(self.entries) != part.num_entries:
            raise FoldingError(f"{self.name}: {len(self.entries)} entries read, the worker counts {part.num_entries}")

    def _read(self, handles: Sequence[str], first_page: int) -> None:
        """Read `handles`, consecutive pages from `first_page` on; the entries of earlier pages stay as they are."""
        began = time.perf_counter()
        pages = self.worker.read_pages(handles)
        self.tally += Tally(
            pages_read=len(pages),
            read_bytes=sum(page.data.nbytes for page in pages),
            read_us=(time.perf_counter() - began) * 1e6,
        )
        num_before = len(self.entries)
        kept = self.entries[: first_page * self.page_entries]
        self.entries = torch.cat([kept, *(self._decoded(page) for page in pages)])
        self.tally += Tally(entries=len(self.entries) - num_before)

    def _decoded(self, page: Any) -> torch.Tensor:
        head_dim = self.entries.shape[1]
        values = decode_page(page.data, self.cache_format, self.page_entries, page.num_entries, head_dim=head_dim)
        return torch.from_numpy(values)


class FoldedCacheLayer(DeepseekV4HCACache):
    """The sliding-window cache layer of an hca or csa layer, whose compressed entries come from the worker."""

    _layer_type = None  # transformers registers a subclass that names a layer type as everyone's cache for it

    def __init__(self, config: Any, folded: dict[str, FoldedCompressor]):
        super().__init__(config)
        self.folded = folded  # by transformers' names: "compressor", and "indexer" in a csa layer

    def store_compression_weights(
        self, name: str, kv: torch.Tensor, gate: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Send the rows to the worker; hand none back, so that the model pools, norms and rotates nothing."""
        self.folded[name].append(kv, gate)
        return kv[:, :0], gate[:, :0], 0

    def update_compressor_states(self, name: str, compressed: torch.Tensor) -> torch.Tensor:
        """All entries so far, [1, num_entries, head_dim]; `compressed` has none."""
        if compressed.shape[1]:
            raise FoldingError("the model pooled entries itself; this version of transformers is not supported")
        return self.folded[name].entries.to(compressed)[None]


class FoldedCache(DynamicCache):
    """A cache for one sequence whose compressors are the worker's, under the request `request_id`."""

    def __init__(self, config: Any, worker: Worker, manifest: dict, request_id: str):
        super().__init__(config=config)
        self.worker, self.request_id = worker, request_id
        self.compressors = {row["name"]: FoldedCompressor(worker, request_id, row) for row in manifest["compressors"]}
        for layer_idx in range(len(self.layers)):
            own = {n.rpartition(".")[2]: c for n, c in self.compressors.items() if n.startswith(f"layers.{layer_idx}.")}
            if own:
                folded = {"indexer" if kind == "indexer" else "compressor": c for kind, c in own.items()}
                self.layers[layer_idx] = FoldedCacheLayer(config, folded)

    def release(self) -> None:
        """Let the worker forget the request."""
        self.worker.release(self.request_id)
