"""The CPU backend against the definition: the same bits but for `exp`, and every byte that differs explained."""

from __future__ import annotations

import itertools

import numba
import numpy as np
import pytest
import torch

from kvfold_kernels import backends
from kvfold_kernels import plan as p
from kvfold_kernels.compress import cpu, cpu_encode, cpu_jit, cpu_pool, reference
from kvfold_kernels.compressor import Compressor
from kvfold_kernels.entry import encode
from kvfold_kernels.geometry import KINDS
from tests.cases import DTYPES, FORMATS, Holder, make_compressor, make_rows
from tests.checks import assert_bits, assert_explained, row_error

CPU, REFERENCE = backends.load("cpu"), backends.load("reference")
NUM_TOKENS = {"hca": 3 * 128, "csa": 40, "indexer": 40}
ERROR_UNITS = 12
"""fp32 roundings of a row's largest value; measured over 450,000 values, here as in `reference`: at most 7.6."""
EXP_ULPS = 1.02

VARIANTS = (
    *((kind, name, {}) for kind, name in FORMATS),
    ("hca", "fp8_ds_mla", {"scale_floor": "scale"}),
    ("csa", "fp8_ds_mla", {"scale_floor": "scale"}),
    ("csa", "fp8", {"fp8_scale": 0.037}),
    ("indexer", "indexer_fp8", {"scale_floor": "scale"}),
    ("indexer", "indexer_fp8", {"indexer_profile": "sglang"}),
    ("indexer", "indexer_mxfp4", {"indexer_profile": "sglang"}),
)
variants = pytest.mark.parametrize(("kind", "cache_format", "options"), VARIANTS)
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@numba.njit
def _exp_all(x, result):
    for i in range(x.size):
        result[i] = cpu_pool.exp(x[i])


@numba.njit
def _encode_all(rows, values_at, value_bytes, scales_at, scale_bytes, spec_at):
    spec = cpu_jit.spec_at(spec_at)
    for i in range(len(rows)):
        cpu_encode.encode(rows[i], values_at + i * value_bytes, scales_at + i * scale_bytes, spec)


def exp(x: np.ndarray) -> np.ndarray:
    """The backend's, in fp32; the definition's in fp64."""
    if x.dtype == np.float64:
        return np.exp(x)
    result = np.empty(x.size, np.float32)
    _exp_all(np.ascontiguousarray(x).reshape(-1), result)
    return result.reshape(x.shape)


@pytest.fixture
def shared_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "exp", exp)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch):
    """Set the number of threads; two or more share out whatever there is."""
    before = cpu._threads

    def set_num(num: int) -> None:
        monkeypatch.setattr(cpu, "_GRAIN_BYTES", 1 if num > 1 else 1 << 62)
        cpu.set_num_threads(num)

    yield set_num
    cpu._threads = before


def run(
    backend: backends.Backend, compressor: Compressor, rows: torch.Tensor, steps: list[int], ring: str = "fp32"
) -> Holder:
    """One request in the given steps."""
    holder = Holder(compressor, backend, num_rings=1, num_pages=64, ring_dtype=DTYPES[ring])
    for step in rows.split(steps):
        holder.step([(0, len(step))], step)
    return holder


def step_windows(compressor: Compressor, num_tokens: int) -> torch.Tensor:
    """Windows of a request that arrives whole."""
    geometry, n = compressor.geometry, compressor.layout.entries
    table = np.zeros((1, geometry.num_entries(num_tokens) // n + 1), np.int32)
    length = np.array([0, num_tokens])
    return torch.from_numpy(
        p.make_plan(geometry, p.empty_state(1), np.zeros(1, np.int64), length, table, n).windows.copy()
    )


def test_exp():
    x = -np.concatenate(([0.0], np.geomspace(1e-30, 1, 200_000), np.linspace(0, 104, 2_000_000))).astype(np.float32)
    actual, exact = exp(x), np.exp(x.astype(np.float64))
    ulp = np.spacing(np.maximum(exact, 2.0**-126).astype(np.float32)).astype(np.float64)
    assert (np.abs(actual - exact) / ulp).max() <= EXP_ULPS
    assert (np.diff(exp(np.linspace(-100, 0, 1_000_000, dtype=np.float32))) >= 0).all()
    special = exp(np.array([0.0, -0.0, -104.01, -1e30, -np.inf, np.nan], np.float32))
    assert special.tolist() == [1, 1, 0, 0, 0, 0]


@variants
def test_quantiser_of_every_bf16_value(kind, cache_format, options):
    """Values by size, so that every code occurs, and shuffled, so that small ones meet large scales."""
    compressor = make_compressor(kind, cache_format, **options)
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = values[values.isfinite()]
    if "indexer_profile" in options:
        values = values[values.abs() < 1e36]  # a Hadamard row of larger ones overflows
    by_size = values[values.abs().sort(stable=True).indices]
    shuffled = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(0))]
    between = torch.randn(1 << 15, generator=torch.Generator().manual_seed(1)) * 3
    dim = compressor.geometry.head_dim
    rows = torch.cat([part[: len(part) // dim * dim].view(-1, dim) for part in (by_size, shuffled, between)])
    rows = torch.cat((rows, rows.roll(dim // 2, 1)))  # every value in and out of the rotated columns
    expected = encode(rows.clone(), compressor)
    fmt = compressor.layout.format
    stored = torch.full((len(rows), fmt.value_bytes), 0xFF, dtype=torch.uint8)
    scales = torch.full((len(rows), fmt.scale_bytes), 0xFF, dtype=torch.uint8)
    at = stored.data_ptr(), fmt.value_bytes, scales.data_ptr(), fmt.scale_bytes
    _encode_all(rows.numpy().copy(), *at, cpu._prepare(compressor).spec_at)
    assert_bits(stored, expected[0])
    assert_bits(scales, expected[1])


@variants
@dtypes
def test_same_operations_as_reference(kind, cache_format, options, dtype, shared_exp):
    """With one `exp` the two agree bit for bit: entries, in steps that mix ring and input, and rings."""
    compressor = make_compressor(kind, cache_format, page_entries=3, **options)
    num_tokens = NUM_TOKENS[kind]
    rows = make_rows(compressor.geometry, num_tokens, dtype=dtype)
    steps = [num_tokens // 3, 1, num_tokens - num_tokens // 3 - 1]
    actual, expected = (run(backend, compressor, rows, steps, dtype) for backend in (CPU, REFERENCE))
    assert_bits(actual.pages, expected.pages)
    assert_bits(actual.rings, expected.rings)


@pytest.mark.parametrize(
    ("kind", "ratio"), [("hca", 1), ("hca", 2), ("hca", 12), ("hca", 16), ("csa", 1), ("csa", 2), ("indexer", 8)]
)
def test_other_ratios(kind, ratio, shared_exp):
    compressor = make_compressor(kind, "fp32", ratio=ratio)
    rows = make_rows(compressor.geometry, 50, dtype="bf16")
    actual, expected = (run(backend, compressor, rows, [7, 30, 13]) for backend in (CPU, REFERENCE))
    assert_bits(actual.pages, expected.pages)
    assert_bits(actual.rings, expected.rings)


@variants
@dtypes
def test_every_byte_is_explained(kind, cache_format, options, dtype):
    """Against fp64, within the stated error; the definition in fp32 passes the same test."""
    compressor = make_compressor(kind, cache_format, **options)
    num_tokens = NUM_TOKENS[kind]
    rows = make_rows(compressor.geometry, num_tokens, dtype=dtype, seed=3)
    actual, expected = (run(backend, compressor, rows, [num_tokens]).entries() for backend in (CPU, REFERENCE))
    windows = step_windows(compressor, num_tokens)
    rings = torch.empty(1, 1, compressor.geometry.row_width)
    exact = reference.compress_rows(windows, rows, rings, compressor, np.float64)
    flips = assert_explained(actual, compressor, exact, row_error(exact, ERROR_UNITS))
    assert_explained(expected, compressor, exact, row_error(exact, ERROR_UNITS))
    if cache_format != "fp32":
        raw_scales = len(exact) if compressor.indexer_profile == "sglang" else 0
        assert flips <= raw_scales + 0.002 * exact.size


def test_a_wrong_byte_is_not_explained():
    for kind, name in FORMATS:
        compressor = make_compressor(kind, name)
        exact = np.random.default_rng(0).standard_normal((2, compressor.geometry.head_dim))
        entries = torch.cat(encode(torch.from_numpy(exact).float(), compressor), 1)
        assert assert_explained(entries, compressor, exact, 1e-6) <= exact.size
        for column in (0, compressor.layout.format.value_bytes - 1, compressor.layout.format.entry_bytes - 1):
            for change in (0x10, 0x80):
                wrong = entries.clone()
                wrong[1, column] ^= change
                with pytest.raises(AssertionError):
                    assert_explained(wrong, compressor, exact, 1e-9)


@pytest.mark.parametrize("kind", KINDS)
@dtypes
def test_threads_change_nothing(kind, dtype, threads):
    compressor = make_compressor(kind, "fp32")
    rows = make_rows(compressor.geometry, 10 * NUM_TOKENS[kind] + 3, dtype=dtype)
    threads(1)
    alone = run(CPU, compressor, rows, [len(rows)])
    for num in (2, 3, 5):
        threads(num)
        shared = run(CPU, compressor, rows, [len(rows)])
        assert_bits(shared.pages, alone.pages)
        assert_bits(shared.rings, alone.rings)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case", ["equal", "one row", "no row", "no row of a group", "huge scores", "wide scores", "huge kv", "tiny kv"]
)
def test_extremes(kind, case, shared_exp):
    """No NaN, and the definition's bits; exponentials may be subnormal, sums may overflow."""
    compressor = make_compressor(kind, "fp32")
    geometry, inf = compressor.geometry, float("inf")
    rows = make_rows(geometry, 2 * geometry.ratio, dtype="fp32")
    kv, score = rows.chunk(2, 1)
    match case:
        case "equal":
            score.fill_(7.0)
            compressor.ape.zero_()
        case "one row":
            score[1:] = -inf
        case "no row":
            score[:, ::3] = -inf
        case "no row of a group":
            score[:16] = -inf
        case "huge scores":
            score *= 1e38 / score.abs().max()
        case "wide scores":
            score *= 40
        case "huge kv":
            kv.copy_(torch.sign(kv) * 3e38)
            kv[:, :8] = 3e38
        case "tiny kv":
            kv *= 1e-41
    actual, expected = (run(backend, compressor, rows, [len(rows)]).entries() for backend in (CPU, REFERENCE))
    assert actual.view(torch.float32).isfinite().all()
    assert_bits(actual, expected)


@variants
def test_huge_kv_stores_no_nan(kind, cache_format, options):
    compressor = make_compressor(kind, cache_format, **options)
    rows = make_rows(compressor.geometry, 2 * compressor.geometry.ratio, dtype="fp32")
    rows[:, : compressor.geometry.half_width] = 3e38
    entries = run(CPU, compressor, rows, [len(rows)]).entries()
    values = entries[:, : compressor.layout.format.value_bytes]
    if cache_format == "bf16":
        assert values.contiguous().view(torch.bfloat16).isfinite().all()
    elif cache_format in ("fp8", "indexer_fp8"):
        assert (values & 0x7F != 0x7F).all()
    elif cache_format == "fp8_ds_mla":
        assert (values[:, : compressor.geometry.nope_dim] & 0x7F != 0x7F).all()


@pytest.mark.parametrize(("kind", "cache_format"), FORMATS)
def test_page_views_keep_what_is_between(kind, cache_format):
    """Pages at an offset, farther apart than their size: the bytes around and between them stay."""
    compressor = make_compressor(kind, cache_format, page_entries=3)
    rows = make_rows(compressor.geometry, NUM_TOKENS[kind])
    plain = run(CPU, compressor, rows, [len(rows)])
    size, gap, offset = compressor.layout.page_bytes, 80, 48
    holder = Holder(compressor, CPU, num_rings=1, num_pages=64)
    backing = torch.full((offset + 64 * (size + gap),), 0xFF, dtype=torch.uint8)
    holder.pages = backing.as_strided((64, size), (size + gap, 1), offset)
    holder.step([(0, len(rows))], rows)
    assert_bits(holder.pages.contiguous(), plain.pages)
    assert (backing[:offset] == 0xFF).all()
    assert (backing[offset:].view(64, size + gap)[:, size:] == 0xFF).all()


def test_pool_beyond_2_gib():
    compressor = make_compressor("csa", "fp8_ds_mla")
    rows = make_rows(compressor.geometry, 8)
    num_pages = (1 << 31) // compressor.layout.page_bytes + 2
    holder = run(CPU, compressor, rows, [8])
    pages = torch.empty(num_pages, compressor.layout.page_bytes, dtype=torch.uint8)  # only what is written takes memory
    windows = step_windows(compressor, 8)
    windows[p.SLOT] += (num_pages - 1) * compressor.layout.entries
    cpu.compress(windows, torch.empty(2, 0, dtype=torch.int32), rows, holder.rings, pages, compressor)
    n = compressor.layout
    for i in range(2):
        written = pages[-1, n.value_slice(i)], pages[-1, n.scale_slice(i)]
        assert_bits(torch.cat(written), holder.entries()[i])


def test_nothing_to_do():
    compressor = make_compressor("hca")
    holder = Holder(compressor, CPU, num_rings=1, num_pages=1)
    empty = torch.empty(7, 0, dtype=torch.int32), torch.empty(2, 0, dtype=torch.int32)
    rows = make_rows(compressor.geometry, 1)
    assert cpu.compress(*empty, rows, holder.rings, holder.pages, compressor) == 0


def test_set_num_threads_refuses_zero():
    with pytest.raises(ValueError, match="at least 1, not 0"):
        cpu.set_num_threads(0)


def test_kernels_do_without_a_cache_directory(monkeypatch):
    njit = numba.njit

    def refuse(**options):
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(cpu_jit.numba, "njit", refuse)
    assert cpu_jit.kernel(lambda x: x + 1)(1) == 2


@dtypes
@pytest.mark.parametrize("num_threads", [1, 3])
def test_find_non_finite(dtype, num_threads, threads):
    threads(num_threads)
    compressor = make_compressor("indexer", "fp32")
    width, half = compressor.geometry.row_width, compressor.geometry.half_width
    clean = make_rows(compressor.geometry, 40, dtype=dtype)
    clean[3, half + 5] = -float("inf")
    largest = torch.finfo(clean.dtype).max
    clean[4, 0], clean[4, half], clean[5, 0], clean[5, half] = largest, largest, -largest, -largest
    clean[6, 0], clean[6, half] = -0.0, -0.0
    clean[35:] = float("nan")
    assert cpu.find_non_finite(clean, 35) is None
    assert cpu.find_non_finite(clean, 0) is None
    assert cpu.find_non_finite(clean, 40) == (35, 0)
    spots = [(0, 0), (3, half - 1), (3, half), (20, 7), (34, width - 1)]
    for (row, column), value in itertools.product(spots, [float("nan"), float("inf"), -float("inf")]):
        rows = clean.clone()
        rows[row, column] = value
        expected = None if value == -float("inf") and column >= half else (row, column)
        assert cpu.find_non_finite(rows, 35) == expected
        assert reference.find_non_finite(rows, 35) == expected
        if row < 34:
            rows[34, half - 1] = float("nan")
            assert cpu.find_non_finite(rows, 35) == (expected or (34, half - 1))


def test_find_non_finite_sees_every_nan():
    """All bf16 bit patterns, in kv and in score."""
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    compressor = make_compressor("indexer", "fp32")
    half = compressor.geometry.half_width
    for column, legal in ((3, ~torch.isfinite(patterns)), (half + 3, ~torch.isfinite(patterns))):
        rows = torch.zeros(len(patterns), compressor.geometry.row_width, dtype=torch.bfloat16)
        rows[:, column] = patterns
        bad = legal & ((patterns != -float("inf")) | (column < half))
        found = 0
        for row in bad.nonzero().flatten().tolist():
            assert cpu.find_non_finite(rows[found:], len(rows) - found) == (row - found, column)
            found = row + 1
        assert cpu.find_non_finite(rows[found:], len(rows) - found) is None
