"""Entry bytes of every format against exact arithmetic in fp64 and ml_dtypes' types, over all finite bf16 values."""

from __future__ import annotations

import functools

import ml_dtypes
import numpy as np
import pytest
import torch

from kvfold_kernels import entry
from kvfold_kernels.compressor import Compressor
from tests.checks import assert_bits
from tests.conftest import compressor_of, inject

CASES = {
    "packed, floor on amax": ("csa", "fp8_ds_mla", {}),
    "packed, floor on scale": ("csa", "fp8_ds_mla", {"scale_floor": "scale"}),
    "bf16": ("csa", "bf16", {}),
    "fp32": ("csa", "fp32", {}),
    "fp8": ("csa", "fp8", {}),
    "fp8, scale 7": ("csa", "fp8", {"fp8_scale": 7.0}),  # y · (1 / 7) is on other ties than y / 7
    "fp8, scale 1e20": ("csa", "fp8", {"fp8_scale": 1e20}),
    "packed, head_dim 128": ("hca", "fp8_ds_mla", {"head_dim": 128, "ratio": 8}),
    "indexer fp8, floor on amax": ("indexer", "indexer_fp8", {}),
    "indexer fp8, floor on scale": ("indexer", "indexer_fp8", {"scale_floor": "scale"}),
    "indexer fp8, sglang": ("indexer", "indexer_fp8", {"indexer_profile": "sglang"}),
    "indexer mxfp4": ("indexer", "indexer_mxfp4", {}),
    "indexer mxfp4, head_dim 64": ("indexer", "indexer_mxfp4", {"head_dim": 64}),
    "indexer mxfp4, sglang": ("indexer", "indexer_mxfp4", {"indexer_profile": "sglang"}),
}
cases = pytest.mark.parametrize(("kind", "cache_format", "options"), CASES.values(), ids=CASES)

E4M3 = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E2M1 = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
POWERS = np.arange(-140, 129)


def nearest_code(x: np.ndarray, values: np.ndarray, sign_bit: int) -> np.ndarray:
    """Codes of the nearest of ascending `values`, ties to the even code, saturating; the sign in front."""
    size = np.abs(x.astype(np.float64))
    above = np.searchsorted(values, size).clip(1, len(values) - 1)
    down, up = size - values[above - 1], values[above] - size
    code = np.where((down < up) | ((down == up) & (above % 2 == 1)), above - 1, above)
    return (code | np.signbit(x) << sign_bit).astype(np.uint8)


def smallest_power(amax: np.ndarray, limit: float) -> np.ndarray:
    """Smallest e with limit · 2^e ≥ amax, by trying each; kept last dimension."""
    return POWERS[np.argmax(limit * 2.0**POWERS >= amax, axis=-1)][..., None]


def floored_power(amax: np.ndarray, compressor: Compressor) -> np.ndarray:
    if compressor.scale_floor == "amax":
        return smallest_power(np.maximum(amax, np.float64(np.float32(1e-4))), 448)
    return np.maximum(smallest_power(amax, 448), smallest_power(np.full_like(amax, 1e-4), 1))


def blocks(x: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    parts = x.astype(np.float64).reshape(len(x), -1, width)
    return parts, np.abs(parts).max(-1, keepdims=True)


def golden(rows: np.ndarray, compressor: Compressor) -> np.ndarray:
    """Page-free rows uint8: values, then scales."""
    name, sglang = compressor.layout.format.name, compressor.indexer_profile == "sglang"
    rounded = rows.astype(ml_dtypes.bfloat16)
    wide = rounded.astype(np.float64)
    if sglang:
        rows = entry.hadamard(torch.from_numpy(rows)).numpy()
        wide = rows.astype(np.float64)
    scales = np.empty((len(rows), 0), np.uint8)
    match name:
        case "fp32":
            values = rows.view(np.uint8)
        case "bf16":
            values = rounded.view(np.uint8)
        case "fp8":
            inverse = np.float32(1) / np.float32(compressor.fp8_scale)
            with np.errstate(over="ignore"):
                values = nearest_code(rounded.astype(np.float32) * inverse, E4M3, 7)
        case "fp8_ds_mla":
            nope = rows.shape[1] - 64
            parts, amax = blocks(wide[:, :nope], 64)
            e = floored_power(amax, compressor)
            values = nearest_code(parts / 2.0**e, E4M3, 7).reshape(len(rows), nope)
            values = np.concatenate((values, rounded[:, nope:].view(np.uint8)), 1)
            scales = np.concatenate((e[..., 0] + 127, np.zeros((len(rows), 1))), 1).astype(np.uint8)
        case "indexer_fp8":
            parts, amax = blocks(wide, rows.shape[1])
            if sglang:
                scale = np.maximum(amax, 1e-4).astype(np.float32) / np.float32(448)
                parts = parts.astype(np.float32) / scale
            else:
                scale = 2.0 ** floored_power(amax, compressor)
                parts = parts / scale
            values = nearest_code(parts[:, 0], E4M3, 7)
            scales = scale.reshape(-1, 1).astype(np.float32).view(np.uint8)
        case "indexer_mxfp4":
            parts, amax = blocks(wide, 32)
            e = smallest_power(np.maximum(amax, 6 * 2.0**-126), 6)
            codes = nearest_code(parts / 2.0**e, E2M1, 3).reshape(rows.shape)
            values = codes[:, ::2] + 16 * codes[:, 1::2]
            scales = (e[..., 0] + 127).astype(np.uint8)
    return np.concatenate((values, scales), 1)


@functools.cache
def finite_rows(head_dim: int, kind: str = "any") -> np.ndarray:
    """fp32 rows over every finite bf16 value, and fp32 values that lie on and beside the middle of two of them.

    In ascending order (blocks of one exponent), shuffled (blocks ruled by the huge), below a block's limit with the
    limit in it (every code is met), and below each floor. Kind "moderate" keeps to what no Hadamard sum overflows.
    """
    bits = np.arange(1 << 16, dtype=np.uint32) << 16
    finite = bits[np.isfinite(bits.view(np.float32))]
    below_top = finite[(finite & 0x7FFF0000) < 0x7F7F0000]
    values = np.concatenate((finite, *(below_top[::5] | low for low in (0x7FFF, 0x8000, 0x8001)))).view(np.float32)
    if kind == "moderate":
        values = values[np.abs(values) < 1e30]
    rng = np.random.default_rng(8)
    parts = [values, rng.permutation(values)]
    for top, in_block in ((448, True), (6, True), (0.04, False), (1e-4, False), (7e-38, False)):
        part = rng.permutation(values[np.abs(values) <= top])[: 64 * head_dim]
        part[::32] = top if in_block else part[::32]
        parts.append(part)
    return np.concatenate([part[: len(part) // head_dim * head_dim].reshape(-1, head_dim) for part in parts])


def rows_for(compressor: Compressor) -> np.ndarray:
    return finite_rows(compressor.geometry.head_dim, "moderate" if compressor.indexer_profile == "sglang" else "any")


@cases
def test_all_finite_values(kind, cache_format, options):
    compressor = compressor_of(kind, cache_format, **options)
    rows = rows_for(compressor)
    values, scales = entry.encode(torch.from_numpy(rows), compressor)
    expected = golden(rows, compressor)
    assert_bits(torch.cat((values, scales), 1), torch.from_numpy(expected))
    if cache_format in ("fp8", "fp8_ds_mla", "indexer_fp8"):
        geometry = compressor.geometry
        codes = expected[:, : geometry.nope_dim if cache_format == "fp8_ds_mla" else geometry.head_dim]
        assert set(np.unique(codes)) == set(range(256)) - {0x7F, 0xFF}, "every code but NaN is met"


@cases
def test_kernels_store_the_definition_s_bytes(backend, kind, cache_format, options):
    """The same values through pooling, norm and rotation, all three of which leave them as they are here."""
    compressor = compressor_of(kind, cache_format, page_entries=1, **options)
    rows = rows_for(compressor)[:: 40 if backend.name == "reference" else 4].copy()
    rotated = rows[:, compressor.geometry.nope_dim :]
    rotated[rotated == 0] = 1  # a rotation by 0 may turn a zero's sign
    made = torch.cat([inject(backend, compressor, torch.from_numpy(row)) for row in rows])
    assert_bits(made, torch.from_numpy(golden(rows, compressor)))


@pytest.mark.parametrize(
    ("case", "value", "expected_value", "expected_scale"),
    [
        ("packed, floor on amax", 0.0, 0x00, [127 - 22] * 7 + [0]),  # 448 · 2^−22 ≥ 1e-4 > 448 · 2^−23
        ("packed, floor on scale", 0.0, 0x00, [127 - 13] * 7 + [0]),  # 2^−13 ≥ 1e-4 > 2^−14
        ("packed, floor on amax", -0.0, 0x80, [105] * 7 + [0]),
        ("packed, floor on amax", -1e-30, 0x80, [105] * 7 + [0]),
        ("packed, floor on amax", 1.0, 0x78, [127 - 8] * 7 + [0]),  # 256 = 1 · 2^8
        ("packed, floor on scale", 1.0, 0x78, [127 - 8] * 7 + [0]),
        ("packed, floor on amax", 448.0, 0x7E, [127] * 7 + [0]),
        ("packed, floor on amax", 450.0, 0x76, [128] * 7 + [0]),  # one bf16 step more: 225 = 0x76 · 2
        ("packed, floor on scale", 1e-3, 0x50, [127 - 13] * 7 + [0]),  # 8.1875 → 8
        ("indexer fp8, floor on amax", 1.0, 0x78, list(np.float32(2**-8).tobytes())),
        ("indexer fp8, sglang", 0.0, 0x00, list((np.float32(1e-4) / np.float32(448)).tobytes())),
        ("indexer mxfp4", 0.0, 0x00, [1] * 4),
        ("indexer mxfp4", 6.0, 0x77, [127] * 4),
        ("indexer mxfp4", -6.03125, 0xDD, [128] * 4),
        ("indexer mxfp4", 1.0, 0x66, [125] * 4),
    ],
)
def test_uniform_rows_by_hand(case, value, expected_value, expected_scale):
    kind, cache_format, options = CASES[case]
    compressor = compressor_of(kind, cache_format, **options)
    values, scales = entry.encode(torch.full((1, compressor.geometry.head_dim), value), compressor)
    assert set(values[0, : 448 if kind == "csa" else None].tolist()) == {expected_value}
    assert scales[0].tolist() == expected_scale


def test_codes_are_ml_dtypes_codes():
    """e4m3 and e2m1 of every finite bf16 value that does not overflow, cast by another library."""
    bits = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    for ours, dtype, top in ((entry.e4m3, ml_dtypes.float8_e4m3fn, 448), (entry.e2m1, ml_dtypes.float4_e2m1fn, 6)):
        x = bits[np.abs(bits) <= top]
        assert_bits(ours(torch.from_numpy(x)), torch.from_numpy(x.astype(dtype).view(np.uint8)))
        over = torch.tensor([top * 1.04, top * 2.0, 3e38, -3e38])
        assert_bits(ours(over), ours(torch.tensor([top, top, top, -top], dtype=torch.float32)))


@pytest.mark.parametrize("limit", [448.0, 6.0, 1.0])
def test_ceil_log2_beside_every_power(limit):
    """On limit · 2^e, one fp32 step below and one above, for each e that a normal number allows."""
    on = np.float32(limit) * np.exp2(np.arange(-110, 118)).astype(np.float32)
    amax = np.concatenate((np.nextafter(on, np.float32(0)), on, np.nextafter(on, np.float32(np.inf))))
    e = entry.ceil_log2(torch.from_numpy(amax), limit).numpy()
    np.testing.assert_array_equal(e, smallest_power(amax.astype(np.float64)[:, None], limit)[:, 0])


@pytest.mark.parametrize("n", [64, 128])
def test_hadamard_is_sylvester_s_matrix(n):
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.kron([[1, 1], [1, -1]], matrix)
    rng = np.random.default_rng(2)
    integers = rng.integers(-1000, 1000, (16, n)).astype(np.float32)  # exact sums: only the scaling rounds
    expected = (integers @ matrix.T).astype(np.float32) * np.float32(1 / np.sqrt(n))
    assert_bits(entry.hadamard(torch.from_numpy(integers)), torch.from_numpy(expected))
    rows = rng.standard_normal((16, n)).astype(np.float32)
    error = np.abs(entry.hadamard(torch.from_numpy(rows)).numpy() - rows.astype(np.float64) @ matrix.T / np.sqrt(n))
    assert error.max() < 1e-6
