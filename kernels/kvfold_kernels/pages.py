"""Page bytes as page-free rows, and back: entry i of a pool is values then scales, whatever page it lies in."""

from __future__ import annotations

import torch

from kvfold_kernels.geometry import PageLayout


def _areas(pages: torch.Tensor, layout: PageLayout) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the value and scale areas, `[num_pages, entries, value_bytes or scale_bytes]`."""
    fmt, n = layout.format, layout.entries
    values = pages[:, : layout.scale_offset].unflatten(1, (n, fmt.value_bytes))
    scales = pages[:, layout.scale_offset : layout.scale_offset + n * fmt.scale_bytes]
    return values, scales.unflatten(1, (n, fmt.scale_bytes)) if fmt.scale_bytes else scales.unsqueeze(1).expand(
        -1, n, -1
    )


def write_entries(
    pages: torch.Tensor, slots: torch.Tensor, layout: PageLayout, values: torch.Tensor, scales: torch.Tensor
) -> None:
    """Store uint8 values `[n, value_bytes]` and scales `[n, scale_bytes]` at int64 slots `[n]` (page · entries + i) of
    pages uint8 `[num_pages, page_bytes]`; nothing else is touched."""
    value_area, scale_area = _areas(pages, layout)
    page, within = slots // layout.entries, slots % layout.entries
    value_area[page, within] = values
    if layout.format.scale_bytes:
        scale_area[page, within] = scales


def read_entries(pages: torch.Tensor, slots: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Page-free rows uint8 `[n, entry_bytes]` of int64 slots `[n]`."""
    value_area, scale_area = _areas(pages, layout)
    page, within = slots // layout.entries, slots % layout.entries
    return torch.cat((value_area[page, within], scale_area[page, within]), 1)


def write_rows(pages: torch.Tensor, slots: torch.Tensor, layout: PageLayout, rows: torch.Tensor) -> None:
    """The inverse of `read_entries`: uint8 `[n, entry_bytes]` to slots `[n]`."""
    values, scales = rows.split((layout.format.value_bytes, layout.format.scale_bytes), 1)
    write_entries(pages, slots, layout, values, scales)
