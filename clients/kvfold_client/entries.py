"""Page bytes → float32 rows, in numpy: what a reader without a GPU needs.

page of n entries    [ n · value_bytes | n · scale_bytes | zeros ]
page-free row        [ value_bytes | scale_bytes ]

fp8_ds_mla         448 e4m3, 64 bf16            7 UE8M0, one a 64 columns, 0    e4m3 · 2^(scale − 127), bf16
indexer_fp8        128 e4m3                     fp32                            e4m3 · scale
indexer_mxfp4      64 bytes, low nibble first   4 UE8M0, one a 32 columns       e2m1 · 2^(scale − 127)
bf16, fp32, fp8    head_dim values                                              fp8: e4m3 · fp8_scale
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

_DEFAULT_HEAD_DIM = 512


def _e4m3_values() -> np.ndarray:
    """byte → float32: sign · 4 bits exponent, bias 7 · 3 bits mantissa; no infinities, S.1111.111 is NaN."""
    magnitude = np.arange(128)
    exponent, mantissa = magnitude >> 3, magnitude & 7
    values = np.where(exponent == 0, np.ldexp(mantissa, -9), np.ldexp(8 + mantissa, exponent - 10))
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


_E4M3 = _e4m3_values()
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_UE8M0 = np.append(np.ldexp(1.0, np.arange(255) - 127), np.nan).astype(np.float32)


def _bf16(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values).view("<u2").astype(np.uint32) << 16
    return bits.view(np.float32)


def _fp32(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).view("<f4").astype(np.float32)


def _blockwise(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """values [n, blocks·width] · 2^(scales [n, blocks] − 127)."""
    blocks = values.reshape(*scales.shape, values.shape[1] // scales.shape[1])
    return (blocks * _UE8M0[scales][:, :, None]).reshape(values.shape)


def _packed(values: np.ndarray, scales: np.ndarray, fp8_scale: float) -> np.ndarray:
    return np.concatenate([_blockwise(_E4M3[values[:, :448]], scales[:, :7]), _bf16(values[:, 448:])], axis=1)


def _indexer_fp8(values: np.ndarray, scales: np.ndarray, fp8_scale: float) -> np.ndarray:
    return _E4M3[values] * _fp32(scales)


def _indexer_mxfp4(values: np.ndarray, scales: np.ndarray, fp8_scale: float) -> np.ndarray:
    nibbles = np.stack([values & 15, values >> 4], axis=2).reshape(len(values), 2 * values.shape[1])
    return _blockwise(_E2M1[nibbles], scales)


@dataclass(frozen=True, slots=True)
class _Format:
    decode: Callable[[np.ndarray, np.ndarray, float], np.ndarray]
    value_bytes: int = 0
    """0: item_bytes · head_dim."""
    scale_bytes: int = 0
    item_bytes: int = 0


_FORMATS = {
    "fp8_ds_mla": _Format(_packed, value_bytes=576, scale_bytes=8),
    "indexer_fp8": _Format(_indexer_fp8, value_bytes=128, scale_bytes=4),
    "indexer_mxfp4": _Format(_indexer_mxfp4, value_bytes=64, scale_bytes=4),
    "bf16": _Format(lambda values, scales, fp8_scale: _bf16(values), item_bytes=2),
    "fp32": _Format(lambda values, scales, fp8_scale: _fp32(values), item_bytes=4),
    "fp8": _Format(lambda values, scales, fp8_scale: _E4M3[values] * np.float32(fp8_scale), item_bytes=1),
}


def decode_page(
    page: np.ndarray,
    cache_format: str,
    page_entries: int,
    num_entries: int,
    fp8_scale: float = 1.0,
    *,
    head_dim: int = _DEFAULT_HEAD_DIM,
) -> np.ndarray:
    """page uint8 [page_bytes] → float32 [num_entries, head_dim].

    `head_dim` counts for the plain formats only (bf16, fp32, fp8). Raises ValueError: unknown format, a page that is
    too small for its entries, more entries than a page has.
    """
    form, value_bytes = _format(cache_format, head_dim)
    if not 0 <= num_entries <= page_entries:
        raise ValueError(f"num_entries must be between 0 and {page_entries}, not {num_entries}")
    scales_at = page_entries * value_bytes
    page_bytes = scales_at + page_entries * form.scale_bytes
    if page.dtype != np.uint8 or page.ndim != 1 or len(page) < page_bytes:
        raise ValueError(f"a page of {page_entries} {cache_format} entries is uint8 [{page_bytes}] or longer")
    values = page[: num_entries * value_bytes].reshape(num_entries, value_bytes)
    scales = page[scales_at : scales_at + num_entries * form.scale_bytes].reshape(num_entries, form.scale_bytes)
    return form.decode(values, scales, fp8_scale)


def decode_rows(
    rows: np.ndarray, cache_format: str, fp8_scale: float = 1.0, *, head_dim: int = _DEFAULT_HEAD_DIM
) -> np.ndarray:
    """Page-free rows, as exported: uint8 [num_entries, entry_bytes] → float32 [num_entries, head_dim]."""
    form, value_bytes = _format(cache_format, head_dim)
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != value_bytes + form.scale_bytes:
        raise ValueError(f"rows of {cache_format} entries are uint8 [num_entries, {value_bytes + form.scale_bytes}]")
    return form.decode(rows[:, :value_bytes], rows[:, value_bytes:], fp8_scale)


def _format(cache_format: str, head_dim: int) -> tuple[_Format, int]:
    if cache_format not in _FORMATS:
        raise ValueError(f"cache_format must be one of {', '.join(_FORMATS)}, not {cache_format!r}")
    form = _FORMATS[cache_format]
    return form, form.value_bytes or form.item_bytes * head_dim
