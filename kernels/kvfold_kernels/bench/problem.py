"""A case in memory: its plan, random rows, rings and pages, and the bytes that it must move."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvfold_kernels import plan as p
from kvfold_kernels.bench.cases import DEFAULT_FORMATS, Case
from kvfold_kernels.compressor import Compressor
from kvfold_kernels.geometry import KINDS, Geometry, PageLayout, entry_format

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Problem:
    """Operands of `compress` for one step on one device. Pages lie in a shuffled order, rings begin anywhere.

    windows, appends   int32, as in `plan`; with `bound` there is room for a window a request, however many close
    counts             int32 `[2]`: how many of them are real
    rows               `[num_tokens, row_width]` of `dtype`; rings of `ring_dtype`, if given, else the same
    """

    def __init__(
        self,
        case: Case,
        dtype: str,
        device: str,
        *,
        cache_format: str | None = None,
        ring_dtype: str | None = None,
        bound: bool = False,
    ) -> None:
        kind = KINDS[case.kind]
        geometry = self.geometry = Geometry(case.kind, kind.ratio, kind.head_dim)
        fmt = entry_format(cache_format or DEFAULT_FORMATS[case.kind], geometry)
        layout = PageLayout.of(fmt, geometry.default_page_entries)
        self.case, self.device = case, device
        self.plan, num_pages = _plan(case, geometry, layout.entries)
        self.windows = _padded(self.plan.windows, len(case.starts) if bound else 0).to(device)
        self.appends = _padded(self.plan.appends, 1 if bound else 0).to(device)
        self.counts = torch.tensor([self.plan.num_windows, self.plan.num_appends], dtype=torch.int32, device=device)
        given, kept = DTYPES[dtype], DTYPES[ring_dtype or dtype]
        rings = (len(case.starts), geometry.ring_rows, geometry.row_width)
        self.rows = torch.randn(case.num_tokens, geometry.row_width, device=device).to(given)
        self.rings = torch.randn(rings, device=device).to(kept)
        self.pages = torch.randint(0, 255, (num_pages, layout.page_bytes), dtype=torch.uint8, device=device)
        most = max(start + length for start, length in zip(case.starts, case.lengths, strict=True))
        self.compressor = Compressor(
            geometry,
            layout,
            ape=torch.randn(geometry.ratio, geometry.half_width, device=device) * 0.1,
            norm_weight=torch.rand(geometry.head_dim, device=device) + 0.5,
            cos_sin=torch.randn(most + geometry.ratio, geometry.rope_dim, device=device),
        )
        self.min_bytes = self._min_bytes(given.itemsize, kept.itemsize)

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, Compressor]:
        """Of `compress`, without counts."""
        return self.windows, self.appends, self.rows, self.rings, self.pages, self.compressor

    def runs(self, compress: Callable[..., int]) -> Callable[[], int]:
        """The step, ready to be timed."""
        return lambda: compress(*self.operands)

    def _min_bytes(self, row_item: int, ring_item: int) -> int:
        """The input once, the rows of rings that windows read, the rows that are kept, the entries."""
        width, plan = self.geometry.row_width, self.plan
        from_rings = int(plan.windows[p.NUM_RING].sum()) * width * ring_item // self.geometry.halves
        moved = self.case.num_tokens * width * row_item + plan.num_appends * width * ring_item + from_rings
        return moved + plan.num_windows * self.compressor.layout.format.entry_bytes


def _plan(case: Case, geometry: Geometry, page_entries: int) -> tuple[p.Plan, int]:
    """The plan, and the number of pages: enough for all entries of all requests, each request's in a random order."""
    batch = len(case.starts)
    state = p.empty_state(batch)
    state[p.COMMITTED] = case.starts
    state[p.LIVE_START] = [geometry.live_start(start) for start in case.starts]
    state[p.RING_START] = np.random.default_rng(0).integers(0, geometry.ring_rows, batch)
    entries = [geometry.num_entries(a + b) for a, b in zip(case.starts, case.lengths, strict=True)]
    need = [max(1, -(-num // page_entries)) for num in entries]
    ends = np.cumsum(need)
    order = np.random.default_rng(1).permutation(ends[-1])
    table = np.zeros((batch, max(need)), np.int32)
    for row, num, end in zip(table, need, ends, strict=True):
        row[:num] = order[end - num : end]
    query_start_loc = np.cumsum([0, *case.lengths]).astype(np.int64)
    return p.make_plan(geometry, state, np.arange(batch), query_start_loc, table, page_entries), int(ends[-1])


def _padded(columns: np.ndarray, room: int) -> torch.Tensor:
    """With room for so many columns, or for its own if they are more."""
    padded = np.zeros((columns.shape[0], max(room, columns.shape[1])), np.int32)
    padded[:, : columns.shape[1]] = columns
    return torch.from_numpy(padded)
