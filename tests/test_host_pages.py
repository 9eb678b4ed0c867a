"""host_pages: the same rows as `kernels.pages` gives, for any range of a request in any layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvfold_kernels import pages as by_entry
from kvfold_kernels.geometry import Geometry, PageLayout, entry_format
from kvfold_service import host_pages

FORMATS = (("fp8_ds_mla", "csa"), ("bf16", "csa"), ("indexer_fp8", "indexer"))


@pytest.mark.parametrize(("name", "kind"), FORMATS)
@pytest.mark.parametrize(("entries", "pad"), [(1, 0), (2, 32), (3, 16), (7, 0), (64, 48)])
def test_any_range(name, kind, entries, pad, monkeypatch):
    """Read and written, in pieces of a few pages; what lies around the range stays as it is."""
    fmt = entry_format(name, Geometry(kind, 4, 128, 1))
    least = -(-entries * fmt.entry_bytes // 16) * 16
    layout = PageLayout.of(fmt, entries, least + pad)
    monkeypatch.setattr(host_pages, "_AT_A_TIME", 3 * layout.page_bytes)
    dice = np.random.default_rng(entries)
    num_pages = 200 // entries + 1
    memory = torch.from_numpy(dice.integers(0, 256, (num_pages + 5, layout.page_bytes), np.uint8))
    table = dice.permutation(num_pages + 5)[:num_pages].astype(np.int32)
    ranges = [(0, 0), (0, 1), (0, entries), (entries, 3 * entries), (0, 200), (1, 2), (199, 200), (5, 5)]
    ranges += [tuple(sorted(dice.integers(0, 201, 2).tolist())) for _ in range(40)]
    for start, stop in ranges:
        entry = np.arange(start, stop)
        slots = torch.from_numpy(table[entry // entries].astype(np.int64) * entries + entry % entries)
        rows = np.empty((stop - start, fmt.entry_bytes), np.uint8)
        host_pages.read_rows(memory.numpy(), table, layout, start, stop, rows)
        assert torch.equal(torch.from_numpy(rows), by_entry.read_entries(memory, slots, layout))
        new = dice.integers(0, 256, rows.shape, np.uint8)
        expected = memory.clone()
        by_entry.write_rows(expected, slots, layout, torch.from_numpy(new))
        host_pages.write_rows(memory.numpy(), table, layout, start, new)
        assert torch.equal(memory, expected)
