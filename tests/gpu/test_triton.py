"""The `triton` backend on a CUDA or ROCm device, at real sizes.

python -m pytest tests/gpu/test_triton.py
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from kvfold_kernels import plan as p
from kvfold_kernels.compressor import Compressor
from kvfold_kernels.geometry import KINDS
from tests.cases import DTYPES, FORMATS, Holder, make_compressor, make_rows
from tests.checks import assert_bits, assert_explained, row_error

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA or ROCm device", allow_module_level=True)

from types import SimpleNamespace

from kvfold_kernels.compress import reference
from kvfold_kernels.compress import triton as backend

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

ERROR_UNITS = 48
"""fp32 roundings of a row's largest value that a normed value may be off by: approximate exp, sums of 128 rows."""
SERVED = {"hca": "fp8_ds_mla", "csa": "fp8_ds_mla", "indexer": "indexer_fp8"}
PAIRS = (("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp32"))
TILINGS = {
    "hca": [
        backend.Tiling(1, 64, False, 4),
        backend.Tiling(1, 32, True, 2),
        backend.Tiling(1, 64, True, 4),
        backend.Tiling(1, 128, True, 4),
    ],
    "csa": [backend.Tiling(1, 512, False, 4), backend.Tiling(2, 512, False, 4), backend.Tiling(1, 512, False, 2)],
    "indexer": [backend.Tiling(1, 128, False, 1), backend.Tiling(4, 128, False, 4), backend.Tiling(8, 128, False, 4)],
}


def on_device(compressor: Compressor) -> Compressor:
    tensors = {name: getattr(compressor, name).cuda() for name in ("ape", "norm_weight", "cos_sin")}
    return dataclasses.replace(compressor, **tensors)


class DeviceHolder(Holder):
    """A holder whose rings and pages lie on the device. `room`: as in a captured graph, more columns than the plan has,
    the rest poison, and counts on the device."""

    def __init__(self, compressor: Compressor, ring: str = "fp32", room: int = 0, **more):
        device = on_device(compressor)

        def compress(windows, appends, rows, rings, pages, _):
            counts = None
            if room:
                counts = torch.tensor([windows.shape[1], appends.shape[1]], dtype=torch.int32).cuda()
                windows, appends = (torch.nn.functional.pad(a, (0, room), value=-(2**30)) for a in (windows, appends))
            return backend.compress(windows.cuda(), appends.cuda(), rows.cuda(), rings, pages, device, counts)

        super().__init__(compressor, SimpleNamespace(compress=compress), ring_dtype=DTYPES[ring], **more)
        self.rings, self.pages = self.rings.cuda(), self.pages.cuda()

    def entries(self, slot: int = 0) -> torch.Tensor:
        return super().entries(slot).cpu()


def feed(holder: Holder, rows: torch.Tensor, sizes: list[int], slot: int = 1) -> None:
    at = int(holder.state[p.COMMITTED, slot])
    for size in sizes:
        holder.step([(slot, size)], rows[at : at + size])
        at += size


def chunks(total: int, seed: int = 0) -> list[int]:
    rng, sizes = np.random.default_rng(seed), []
    while sum(sizes) < total:
        sizes.append(int(min(rng.choice([1, 2, 3, 5, 60, 127, 128, 200, 300]), total - sum(sizes))))
    return sizes


def exact_rows(compressor: Compressor, rows: torch.Tensor, entries: np.ndarray) -> np.ndarray:
    """fp64 rows before quantising of some entries of one request."""
    geometry = compressor.geometry
    windows = np.zeros((p.WINDOW_FIELDS, len(entries)), np.int32)
    windows[p.POSITION] = entries * geometry.ratio
    windows[p.INPUT_END] = entries * geometry.ratio + geometry.ratio - 1
    windows[p.NUM_PAD] = np.maximum(0, geometry.window_rows - (entries + 1) * geometry.ratio)
    rings = torch.zeros(1, geometry.ring_rows, geometry.row_width)
    return reference.compress_rows(torch.from_numpy(windows), rows, rings, compressor, np.float64)


def assert_exact(got: torch.Tensor, compressor: Compressor, rows: torch.Tensor, some: int = 40) -> None:
    """The entries of a request that began at 0, all or `some` of them, are explained by the fp64 formula."""
    entries = np.unique(np.r_[0, np.linspace(0, len(got) - 1, some).astype(int)])
    exact = exact_rows(compressor, rows, entries)
    assert_explained(got[torch.from_numpy(entries)], compressor, exact, row_error(exact, ERROR_UNITS))


def same_rings(a: torch.Tensor, b: torch.Tensor) -> bool:
    integer = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(a.cpu().view(integer), b.cpu().view(integer))


@pytest.mark.parametrize(("given", "ring"), PAIRS)
@pytest.mark.parametrize(("kind", "cache_format"), FORMATS)
def test_every_format(kind, cache_format, given, ring):
    compressor = make_compressor(kind, cache_format)
    total = 700 if kind == "hca" else 230
    rows = make_rows(compressor.geometry, total, dtype=given)
    once, pieces = DeviceHolder(compressor, ring), DeviceHolder(compressor, ring, room=3)
    feed(once, rows, [total])
    assert_exact(once.entries(1), compressor, rows)
    feed(pieces, rows, chunks(total))
    assert_bits(pieces.entries(1), once.entries(1))
    geometry = compressor.geometry
    live = geometry.live_start(total)
    assert torch.equal(once.rings[1, : total - live].cpu(), rows[live:].to(DTYPES[ring]))


@pytest.mark.parametrize("options", [{"scale_floor": "scale"}, {"indexer_profile": "sglang"}, {"fp8_scale": 0.37}])
def test_options(options):
    formats = {"scale_floor": "fp8_ds_mla", "indexer_profile": "indexer_fp8", "fp8_scale": "fp8"}
    cases = [("indexer" if "indexer_profile" in options else "csa", formats[next(iter(options))])]
    if "indexer_profile" in options:
        cases.append(("indexer", "indexer_mxfp4"))
    for kind, cache_format in cases:
        compressor = make_compressor(kind, cache_format, **options)
        rows = make_rows(compressor.geometry, 200)
        rows[:100, : compressor.geometry.half_width] *= 1e-5
        holder = DeviceHolder(compressor)
        feed(holder, rows, [200])
        assert_exact(holder.entries(1), compressor, rows)


@pytest.mark.parametrize("given", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", TILINGS)
def test_variants_mix_over_one_request(kind, given, monkeypatch):
    """Every tiling gives the same bits, also when each step takes another."""
    compressor = make_compressor(kind, "fp32")
    total = 1100 if kind == "hca" else 300
    rows = make_rows(compressor.geometry, total, dtype=given)
    once = DeviceHolder(compressor, given)
    feed(once, rows, [total])
    for tiling in TILINGS[kind]:
        monkeypatch.setattr(backend, "choose_tiling", lambda *_, tiling=tiling: tiling)
        other = DeviceHolder(compressor, given)
        feed(other, rows, [total])
        assert_bits(other.entries(1), once.entries(1))
    mixed, rng = DeviceHolder(compressor, given), np.random.default_rng(1)
    for size in chunks(total, 5):
        tiling = TILINGS[kind][int(rng.integers(len(TILINGS[kind])))]
        monkeypatch.setattr(backend, "choose_tiling", lambda *_, tiling=tiling: tiling)
        feed(mixed, rows, [size])
    assert_bits(mixed.entries(1), once.entries(1))


@pytest.mark.parametrize(("kind", "ratio"), [(k, r) for k in KINDS for r in (1, 2, 8)] + [("hca", 100), ("csa", 24)])
def test_other_ratios(kind, ratio):
    compressor = make_compressor(kind, "fp32", ratio=ratio)
    total = 4 * ratio + 37
    rows = make_rows(compressor.geometry, total, dtype="fp32")
    once, pieces = DeviceHolder(compressor), DeviceHolder(compressor)
    feed(once, rows, [total])
    feed(pieces, rows, [1, 1, ratio, 3, total - ratio - 5])
    assert_exact(once.entries(1), compressor, rows)
    assert_bits(pieces.entries(1), once.entries(1))


@pytest.mark.parametrize("given", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", SERVED)
def test_hard_scores(kind, given):
    """−∞ in rows and whole columns, huge scores, huge values."""
    compressor = make_compressor(kind, SERVED[kind])
    geometry = compressor.geometry
    rows = make_rows(geometry, 4 * geometry.window_rows, dtype=given)
    score = rows[:, geometry.half_width :]
    generator = torch.Generator().manual_seed(3)
    score[torch.rand(score.shape, generator=generator) < 0.3] = -float("inf")
    score[:, 3::7] = -float("inf")
    score[:, 5::11] *= 1e4
    rows[:, 9 : geometry.half_width : 13] *= 1e15
    holder = DeviceHolder(compressor, given)
    feed(holder, rows, [len(rows)])
    assert_exact(holder.entries(1), compressor, rows)


@pytest.mark.parametrize("total", [8192, 65_536])
@pytest.mark.parametrize("kind", SERVED)
def test_long_prefills(kind, total):
    """One step; then as chunks; then 100 times."""
    compressor = make_compressor(kind, SERVED[kind], page_entries=64, max_position=65_536)
    rows = make_rows(compressor.geometry, total)
    num_pages = total // compressor.geometry.ratio // 64 + 2
    once, pieces = (DeviceHolder(compressor, "bf16", num_rings=2, num_pages=num_pages) for _ in range(2))
    feed(once, rows, [total])
    assert_exact(once.entries(1), compressor, rows, 12)
    feed(pieces, rows, [total // 2 + 37, 1, 129, total // 2 - 37 - 130])
    assert_bits(pieces.entries(1), once.entries(1))
    pages, rings = once.pages.clone(), once.rings.clone()
    plan, device, given = once.plans[0], on_device(compressor), rows.cuda()
    windows, appends = (torch.from_numpy(a.copy()).cuda() for a in (plan.windows, plan.appends))
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(100):
        once.pages.fill_(0xFF)
        backend.compress(windows, appends, given, once.rings, once.pages, device)
        wrong += (once.pages != pages).sum()
    assert int(wrong) == 0
    assert same_rings(once.rings, rings)


@pytest.mark.parametrize("kind", SERVED)
def test_256_phases_and_a_prefill(kind):
    """256 requests of one token at 256 phases with one of 8,192; as serial."""
    compressor = make_compressor(kind, SERVED[kind], page_entries=64, max_position=16_384)
    rows = make_rows(compressor.geometry, 8192 + 300)
    serial = DeviceHolder(compressor, "bf16", num_rings=2)
    feed(serial, rows, [len(rows)])
    expected = serial.entries(1)
    batch = DeviceHolder(compressor, "bf16", num_rings=258, num_pages=1024)
    for slot in range(256):
        if slot:
            batch.step([(slot, slot)], rows[:slot])
    batch.step([(256, 300)], rows[:300])
    for _ in range(2):
        slots = [int(s) for s in np.random.default_rng(4).permutation(256)]
        parts = [rows[at : at + 1] for at in (int(batch.state[p.COMMITTED, s]) for s in slots)]
        at = int(batch.state[p.COMMITTED, 256])
        batch.step([*((s, 1) for s in slots), (256, 4096)], torch.cat([*parts, rows[at : at + 4096]]))
    for slot in range(257):
        got = batch.entries(slot)
        assert_bits(got, expected[: len(got)])


@pytest.mark.parametrize("kind", SERVED)
def test_pages_beyond_two_gigabytes(kind):
    """Nothing else in the pool is touched; the view has an offset and a padded stride."""
    compressor = make_compressor(kind, SERVED[kind])
    layout = compressor.layout
    near = DeviceHolder(compressor, "bf16")
    near.free = list(range(512))
    rows = make_rows(compressor.geometry, 512)
    feed(near, rows, [512])
    stride = layout.page_bytes + 64
    num_pages = 2**32 // stride + 600
    pool = torch.full((num_pages * stride + 1024,), 0xFF, dtype=torch.uint8, device="cuda")
    pages = torch.as_strided(pool, (num_pages, layout.page_bytes), (stride, 1), 1008)
    windows = torch.from_numpy(near.plans[0].windows.copy())
    shift = num_pages - 512
    windows[p.SLOT] += shift * layout.entries
    appends = torch.from_numpy(near.plans[0].appends.copy())
    backend.compress(windows.cuda(), appends.cuda(), rows.cuda(), near.rings, pages, on_device(compressor))
    assert torch.equal(pages[shift:], near.pages)
    written = near.plans[0].num_windows * layout.format.entry_bytes
    assert int((pool != 0xFF).sum()) == int((near.pages != 0xFF).sum()) <= written


@pytest.mark.parametrize("kind", SERVED)
def test_a_captured_graph_replays_other_steps(kind):
    """Captured at the most windows and appends; replayed with other lengths, phases, and fewer requests."""
    compressor = make_compressor(kind, SERVED[kind], page_entries=4)
    geometry, device = compressor.geometry, on_device(compressor)
    rows = {slot: make_rows(geometry, 640, seed=slot) for slot in range(4)}
    eager, graphed = DeviceHolder(compressor, "bf16"), DeviceHolder(compressor, "bf16")
    caps = 4 * 640 // geometry.ratio, 4 * geometry.max_live_rows
    windows = torch.full((p.WINDOW_FIELDS, caps[0]), -(2**30), dtype=torch.int32, device="cuda")
    appends = torch.full((p.APPEND_FIELDS, caps[1]), -(2**30), dtype=torch.int32, device="cuda")
    counts = torch.zeros(2, dtype=torch.int32, device="cuda")
    given = torch.zeros(4 * 640, geometry.row_width, dtype=torch.bfloat16, device="cuda")

    def launch():
        backend.compress(windows, appends, given, graphed.rings, graphed.pages, device, counts)

    launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()

    def replay(new_windows, new_appends, new_rows, *_):
        windows[:, : new_windows.shape[1]] = new_windows.cuda()
        appends[:, : new_appends.shape[1]] = new_appends.cuda()
        given[: len(new_rows)] = new_rows.cuda()
        counts.copy_(torch.tensor([new_windows.shape[1], new_appends.shape[1]], dtype=torch.int32))
        graph.replay()
        return 1

    graphed.backend = SimpleNamespace(compress=replay)
    for step in (
        [(0, 127), (1, 1), (2, 300), (3, 2)],
        [(3, 1)],
        [(1, 1), (0, 1), (3, 126)],
        [(2, 0)],
        [(0, 500), (1, 600)],
    ):
        step_rows = []
        for slot, length in step:
            at = int(eager.state[p.COMMITTED, slot])
            step_rows.append(rows[slot][at : at + length])
        for holder in (eager, graphed):
            holder.step(step, torch.cat(step_rows))
    torch.cuda.synchronize()
    assert torch.equal(graphed.pages, eager.pages)
    assert same_rings(graphed.rings, eager.rings)


def test_non_finite_values():
    compressor = make_compressor("csa")
    half = compressor.geometry.half_width
    for given in ("bf16", "fp32"):
        rows = make_rows(compressor.geometry, 3000, dtype=given).cuda()
        rows[7, half + 5] = -float("inf")
        assert backend.find_non_finite(rows, 3000) is None
        for row, column, value in (
            (2999, 2 * half - 1, float("nan")),
            (1500, half, float("inf")),
            (3, 9, -float("inf")),
        ):
            rows[row, column] = value
            assert backend.find_non_finite(rows, 3000) == (row, column)
            assert backend.find_non_finite(rows, 2) is None


def test_a_steady_state_allocates_nothing():
    compressor = make_compressor("hca")
    holder = DeviceHolder(compressor, "bf16")
    rows = make_rows(compressor.geometry, 600)
    feed(holder, rows, [600])
    plan, device, given = holder.plans[0], on_device(compressor), rows.cuda()
    windows, appends = (torch.from_numpy(a.copy()).cuda() for a in (plan.windows, plan.appends))
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(5):
        backend.compress(windows, appends, given, holder.rings, holder.pages, device)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_the_error_before_quantising():
    """Unit-scale rows: far below 1e-4."""
    for kind in KINDS:
        compressor = make_compressor(kind, "fp32")
        rows = make_rows(compressor.geometry, 1280, dtype="fp32")
        holder = DeviceHolder(compressor)
        feed(holder, rows, [1280])
        entries = np.arange(0, 1280 // compressor.geometry.ratio, 1 if kind == "hca" else 16)
        got = holder.entries(1)[torch.from_numpy(entries)].contiguous().view(torch.float32).numpy()
        error = np.abs(got - exact_rows(compressor, rows, entries)).max()
        print(f"{kind}: largest error before quantising {error:.2e}")
        assert error < 1e-5
