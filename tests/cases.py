"""Seeded compressors and inputs, and a holder that runs plans on them without a worker."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from kvfold_kernels import plan as p
from kvfold_kernels.backends import Backend
from kvfold_kernels.compressor import Compressor
from kvfold_kernels.geometry import KINDS, Geometry, PageLayout, entry_format
from kvfold_kernels.pages import read_entries
from kvfold_kernels.rope import Rope

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
FORMATS = (
    ("hca", "fp8_ds_mla"),
    ("hca", "bf16"),
    ("hca", "fp8"),
    ("hca", "fp32"),
    ("csa", "fp8_ds_mla"),
    ("csa", "bf16"),
    ("csa", "fp8"),
    ("csa", "fp32"),
    ("indexer", "indexer_fp8"),
    ("indexer", "indexer_mxfp4"),
    ("indexer", "bf16"),
    ("indexer", "fp32"),
)
MAX_POSITION = 8192
ROPE = Rope()
_TABLES: dict[tuple[Rope, int], torch.Tensor] = {}


def rope_table(rope: Rope = ROPE, max_position: int = MAX_POSITION) -> torch.Tensor:
    if (rope, max_position) not in _TABLES:
        _TABLES[rope, max_position] = torch.from_numpy(rope.table(max_position))
    return _TABLES[rope, max_position]


def make_compressor(
    kind: str = "hca",
    cache_format: str = "fp8_ds_mla",
    *,
    seed: int = 0,
    page_entries: int | None = None,
    page_bytes: int | None = None,
    rope: Rope = ROPE,
    draft_slack: int = 8,
    ratio: int | None = None,
    max_position: int = MAX_POSITION,
    **options,
) -> Compressor:
    usual = KINDS[kind]
    geometry = Geometry(kind, ratio or usual.ratio, usual.head_dim, draft_slack)
    layout = PageLayout.of(
        entry_format(cache_format, geometry), page_entries or geometry.default_page_entries, page_bytes
    )
    generator = torch.Generator().manual_seed(seed)
    return Compressor(
        geometry,
        layout,
        ape=torch.randn(geometry.ratio, geometry.half_width, generator=generator),
        norm_weight=1 + 0.2 * torch.randn(geometry.head_dim, generator=generator),
        cos_sin=rope_table(rope, max_position),
        **options,
    )


def make_rows(geometry: Geometry, num_tokens: int, *, seed: int = 1, dtype: str = "bf16") -> torch.Tensor:
    """Random `[num_tokens, row_width]`: unit kv, scores with a spread of 2."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(num_tokens, geometry.row_width, generator=generator)
    rows[:, geometry.half_width :] *= 2
    return rows.to(DTYPES[dtype])


@dataclass
class Holder:
    """Rings, pages and ring state of one compressor: what a worker keeps, without the worker.

    Rings and pages start as NaN bytes (0xFF), so that whatever reads a row nobody wrote shows.
    Pages are handed out in a shuffled order, first free first.
    """

    compressor: Compressor
    backend: Backend
    num_rings: int = 8
    num_pages: int = 512
    ring_dtype: torch.dtype = torch.float32
    launches: int = 0
    plans: list[p.Plan] = field(default_factory=list)

    def __post_init__(self) -> None:
        geometry, layout = self.compressor.geometry, self.compressor.layout
        self.state = p.empty_state(self.num_rings)
        shape = (self.num_rings, geometry.ring_rows, geometry.row_width)
        self.rings = torch.full(shape, float("nan"), dtype=self.ring_dtype)
        self.pages = torch.full((self.num_pages, layout.page_bytes), 0xFF, dtype=torch.uint8)
        self.page_table = np.full((self.num_rings, self.num_pages), -1, np.int32)
        self.free = list(np.random.default_rng(7).permutation(self.num_pages))

    def step(self, requests: list[tuple[int, int]], rows: torch.Tensor, drafts: list[int] | None = None) -> p.Plan:
        """Run one step: requests are (ring slot, num_tokens) pairs; rows may be padded behind the last token."""
        geometry, n = self.compressor.geometry, self.compressor.layout.entries
        slots = np.array([slot for slot, _ in requests], np.int64)
        query_start_loc = np.cumsum([0, *(length for _, length in requests)]).astype(np.int64)
        for slot, length in requests:
            entries = geometry.num_entries(int(self.state[p.COMMITTED, slot]) + length)
            for page in range(-(-entries // n)):
                if self.page_table[slot, page] < 0:
                    self.page_table[slot, page] = self.free.pop()
        draft_tokens = None if drafts is None else np.array(drafts, np.int64)
        plan = p.make_plan(geometry, self.state, slots, query_start_loc, self.page_table, n, draft_tokens)
        self.plans.append(plan)
        windows, appends = (torch.from_numpy(a.copy()) for a in (plan.windows, plan.appends))
        self.launches += self.backend.compress(windows, appends, rows, self.rings, self.pages, self.compressor)
        plan.commit(self.state)
        return plan

    def slots_of(self, slot: int) -> torch.Tensor:
        n = self.compressor.layout.entries
        entry = np.arange(self.compressor.geometry.num_entries(int(self.state[p.COMMITTED, slot])))
        return torch.from_numpy(self.page_table[slot, entry // n].astype(np.int64) * n + entry % n)

    def entries(self, slot: int = 0) -> torch.Tensor:
        """Page-free rows `[num_entries, entry_bytes]` of a request."""
        return read_entries(self.pages, self.slots_of(slot), self.compressor.layout)

    def reset(self, slot: int) -> None:
        """Give the ring slot to a new request; its pages are not returned."""
        self.state[:, slot] = 0
        self.page_table[slot] = -1
