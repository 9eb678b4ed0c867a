"""The `cute` backend on a GPU against the definition: bytes, rings, poison, chunking, repeats, races, far pages.

python tests/gpu/check_cute.py [--library FOLDER] [--quick] [NAME …]
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import time
from types import SimpleNamespace

import numpy as np
import torch

from kvfold_kernels import plan as p
from kvfold_kernels.compress import cute, reference
from kvfold_kernels.compressor import Compressor
from kvfold_kernels.entry import encode
from kvfold_kernels.pages import write_entries
from tests.cases import DTYPES, FORMATS, Holder, make_compressor, make_rows

PAIRS = (("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp32"))
TOKENS = {"hca": 1200, "csa": 2310, "indexer": 403}
ERROR = 4e-6
"""Stated fp32 error of a normed value, in units of the row's largest: weighted sums, approximate exp and rsqrt."""


def on_gpu(compressor: Compressor) -> Compressor:
    tensors = {name: getattr(compressor, name).cuda() for name in ("ape", "norm_weight", "cos_sin")}
    return dataclasses.replace(compressor, **tensors)


class GpuHolder(Holder):
    """A holder whose rings and pages lie on the GPU."""

    def __init__(self, compressor, ring, counts=False, **more):
        device = on_gpu(compressor)

        def run(windows, appends, rows, rings, pages, _):
            limits = torch.tensor([windows.shape[1], appends.shape[1]], dtype=torch.int32).cuda()
            if counts:  # as in a captured graph: more room than windows, the rest is poison
                windows = torch.nn.functional.pad(windows, (0, 5), value=-(2**30))
                appends = torch.nn.functional.pad(appends, (0, 3), value=-(2**30))
            limits = limits if counts else None
            return cute.compress(windows.cuda(), appends.cuda(), rows.cuda(), rings, pages, device, limits)

        super().__init__(compressor, SimpleNamespace(compress=run), ring_dtype=DTYPES[ring], **more)
        self.rings, self.pages = self.rings.cuda(), self.pages.cuda()


class ExactHolder(Holder):
    """A holder that keeps the fp64 rows of every slot beside the bytes."""

    def __init__(self, compressor, ring, dtype: type = np.float64, **more):
        self.exact: dict[int, np.ndarray] = {}

        def run(windows, appends, rows, rings, pages, _):
            values = reference.compress_rows(windows, rows, rings, compressor, dtype)
            self.exact.update(zip(windows[p.SLOT].tolist(), values, strict=True))
            flat = rings.view(-1, rings.shape[-1])
            flat[appends[p.APPEND_RING].long()] = rows[appends[p.APPEND_INPUT].long()].to(rings.dtype)
            return 1

        super().__init__(compressor, SimpleNamespace(compress=run), ring_dtype=DTYPES[ring], **more)


def explain(got: torch.Tensor, exact: ExactHolder, compressor: Compressor) -> tuple[int, int, int]:
    """(bytes, bytes that differ from the fp64 row's, bytes that no value within the stated error gives)."""
    slots = torch.tensor(sorted(exact.exact))
    rows = np.stack([exact.exact[slot] for slot in slots.tolist()])
    error = ERROR * np.abs(rows).max(1, keepdims=True)
    differ, unexplained = None, None
    for shift in (0, *(sign * 2.0**-i for i in range(9) for sign in (-1, 1))):
        page = exact.pages.clone()
        values, scales = encode(torch.from_numpy((rows + shift * error).astype(np.float32)), compressor)
        write_entries(page, slots, compressor.layout, values, scales)
        wrong = page != got
        if differ is None:
            differ, unexplained = int(wrong.sum()), wrong
        unexplained = unexplained & wrong
    if compressor.layout.format.name == "fp32":
        start = got.view(torch.float32)
        page = exact.pages.clone()
        values, scales = encode(torch.from_numpy(rows.astype(np.float32)), compressor)
        write_entries(page, slots, compressor.layout, values, scales)
        want = page.view(torch.float32)
        far = (start - want).abs() > 2 * ERROR * float(np.abs(rows).max())
        unexplained = far
        mantissa = (page.view(torch.int32) != got.view(torch.int32)) & torch.isnan(want)
        unexplained = unexplained | mantissa
    if compressor.indexer_profile == "sglang" and compressor.layout.format.name == "indexer_fp8":
        unexplained = unexplained & _not_raw_scales(got, exact, compressor)
    written = len(slots) * compressor.layout.format.entry_bytes
    return written, differ, int(unexplained.sum())


def _not_raw_scales(got: torch.Tensor, exact: ExactHolder, compressor: Compressor) -> torch.Tensor:
    """True but in the raw fp32 scales that lie within the stated error of the exact ones. A raw scale takes the value's
    error, so a value may also move by one code; those are bounded too."""
    layout, slots = compressor.layout, sorted(exact.exact)
    rows = torch.from_numpy(np.stack([exact.exact[slot] for slot in slots]).astype(np.float32))
    values, scales = encode(rows, compressor)
    keep = torch.ones_like(got, dtype=torch.bool)
    for slot, value, scale in zip(slots, values, scales, strict=True):
        page, entry = divmod(slot, layout.entries)
        found = got[page, layout.scale_slice(entry)].clone().view(torch.float32)
        close = bool((found - scale.view(torch.float32)).abs() <= 2 * ERROR * scale.view(torch.float32))
        keep[page, layout.scale_slice(entry)] = not close
        codes = got[page, layout.value_slice(entry)].int()
        keep[page, layout.value_slice(entry)] = (codes - value.int()).abs() > int(close)
    return keep


def chunks(total: int, how: str, seed: int = 0) -> list[int]:
    if how == "once":
        return [total]
    if how == "single":
        return [1] * total
    generator = np.random.default_rng(seed)
    sizes: list[int] = []
    while sum(sizes) < total:
        sizes.append(int(min(generator.choice([1, 2, 3, 5, 60, 127, 128, 200, 300]), total - sum(sizes))))
    return sizes


def feed(holder: Holder, rows: torch.Tensor, sizes: list[int], slot: int = 1) -> None:
    at = 0
    for size in sizes:
        holder.step([(slot, size)], rows[at : at + size])
        at += size


def check_format(kind: str, fmt: str, given: str, ring: str, **options) -> str:
    compressor = make_compressor(kind, fmt, **options)
    total = TOKENS[kind]
    rows = make_rows(compressor.geometry, total, dtype=given)
    exact = ExactHolder(compressor, ring)
    feed(exact, rows, [total])
    once = GpuHolder(compressor, ring)
    feed(once, rows, [total])
    torch.cuda.synchronize()
    pages, rings = once.pages.cpu(), once.rings.cpu()
    written, differ, unexplained = explain(pages, exact, compressor)
    integer = torch.int16 if ring == "bf16" else torch.int32
    rings_same = torch.equal(rings.view(integer), exact.rings.view(integer))
    results = [f"{differ}/{written} bytes differ, {unexplained} unexplained, rings {'same' if rings_same else 'WRONG'}"]
    bad = unexplained or not rings_same
    for how in ("random", "single"):
        other = GpuHolder(compressor, ring, counts=how == "random")
        feed(other, rows, chunks(total, how))
        torch.cuda.synchronize()
        wrong = int((other.entries(1) != once.entries(1)).sum())
        bad = bad or wrong
        results.append(f"{how} {'same' if not wrong else f'{wrong} DIFFER'}")
    return ("BAD " if bad else "ok  ") + ", ".join(results)


def check_hard_scores(kind: str, given: str) -> str:
    """−∞ in rows and whole columns, huge scores, huge values."""
    compressor = make_compressor(kind, "indexer_fp8" if kind == "indexer" else "fp8_ds_mla")
    geometry = compressor.geometry
    total = 4 * geometry.window_rows
    rows = make_rows(geometry, total, dtype=given)
    score = rows[:, geometry.half_width :]
    generator = torch.Generator().manual_seed(3)
    score[torch.rand(score.shape, generator=generator) < 0.3] = -float("inf")
    score[:, 3::7] = -float("inf")
    score[:, 5::11] *= 1e4
    rows[:, 9 : geometry.half_width : 13] *= 1e30
    exact = ExactHolder(compressor, given, np.float32)  # the definition: fp64 would not overflow where fp32 does
    feed(exact, rows, [total])
    got = GpuHolder(compressor, given)
    feed(got, rows, [total])
    torch.cuda.synchronize()
    written, differ, unexplained = explain(got.pages.cpu(), exact, compressor)
    return f"{'BAD' if unexplained else 'ok '} {differ}/{written} bytes differ, {unexplained} unexplained"


def check_repeats_and_races(kind: str, given: str, ring: str, repeats: int) -> str:
    """The same step again and again, back to back with early starts; every other launch writes other bytes."""
    compressor = make_compressor(kind, "fp8_ds_mla")
    device = on_gpu(compressor)
    holder = Holder(compressor, SimpleNamespace(compress=lambda *_: 0), ring_dtype=DTYPES[ring])
    total = 600 if ring == given else 2100
    holder.state[p.COMMITTED, 1], holder.state[p.LIVE_START, 1] = 1000, compressor.geometry.live_start(1000)
    holder.rings = make_rows(compressor.geometry, holder.rings[..., 0].numel(), dtype=ring).view_as(holder.rings)
    plan = holder.step([(1, total)], torch.empty(0))
    windows, appends = (torch.from_numpy(a.copy()).cuda() for a in (plan.windows, plan.appends))
    chain = [make_rows(compressor.geometry, total, seed=i, dtype=given).cuda() for i in range(2)]
    stream_rows = torch.empty_like(chain[0])
    rings = [holder.rings.cuda() for _ in range(2)]
    want = []
    for i in range(2):
        pages = holder.pages.cuda()
        cute.compress(windows, appends, chain[i], rings[i], pages, device)
        torch.cuda.synchronize()
        want.append((pages.clone(), rings[i].clone()))
        rings[i].copy_(holder.rings)
    pages = holder.pages.cuda()
    got_rings = holder.rings.cuda()
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for i in range(repeats):
        stream_rows.copy_(chain[i % 2])  # a kernel writes the input just before
        cute.compress(windows, appends, stream_rows, got_rings, pages, device)
        wrong += (pages != want[i % 2][0]).sum()  # a kernel reads the pages just after
        if i % 2:
            integer = torch.int16 if ring == "bf16" else torch.int32
            wrong += (got_rings.view(integer) != want[1][1].view(integer)).sum()
    torch.cuda.synchronize()
    return f"{'BAD' if int(wrong) else 'ok '} {repeats} launches, {int(wrong)} wrong bytes"


def check_chain(given: str, repeats: int) -> str:
    """Two launches back to back, the second reading the ring rows that the first appended; both start early."""
    compressor = make_compressor("csa", "fp8_ds_mla")
    rows = make_rows(compressor.geometry, 4 * 200, dtype=given)
    first = GpuHolder(compressor, given)
    feed(first, rows, [4] * 200)
    torch.cuda.synchronize()
    want = first.entries(1)
    wrong = 0
    for _ in range(repeats // 200):
        again = GpuHolder(compressor, given)
        steps = []
        for i in range(200):
            slots, loc = np.array([1]), np.array([0, 4])
            for page in range(-(-(i + 1) // compressor.layout.entries)):
                if again.page_table[1, page] < 0:
                    again.page_table[1, page] = again.free.pop()
            plan = p.make_plan(
                compressor.geometry, again.state, slots, loc, again.page_table, compressor.layout.entries
            )
            steps.append([torch.from_numpy(a.copy()).cuda() for a in (plan.windows, plan.appends)])
            plan.commit(again.state)
        device, inputs = on_gpu(compressor), rows.cuda().view(200, 4, -1)
        torch.cuda.synchronize()
        for i, (windows, appends) in enumerate(steps):
            cute.compress(windows, appends, inputs[i], again.rings, again.pages, device)
        torch.cuda.synchronize()
        wrong += int((again.entries(1) != want).sum())
    return f"{'BAD' if wrong else 'ok '} {repeats} chained launches, {wrong} wrong bytes"


def check_shapes(given: str, ring: str, starts: list[int], lengths: list[int]) -> str:
    """Every kernel shape of hca on one step: the same bytes."""
    longest = max(start + length for start, length in zip(starts, lengths, strict=True))
    compressor = make_compressor("hca", "fp8_ds_mla", max_position=longest + 8192)
    geometry, layout, batch, total = compressor.geometry, compressor.layout, len(starts), sum(lengths)
    state = p.empty_state(batch)
    state[p.COMMITTED], state[p.LIVE_START] = starts, [geometry.live_start(start) for start in starts]
    state[p.RING_START] = (geometry.ring_rows - 70 + 37 * np.arange(batch)) % geometry.ring_rows  # some wrap
    width = -(-geometry.num_entries(longest) // layout.entries)
    num_pages = batch * width
    table = np.random.default_rng(0).permutation(num_pages).astype(np.int32).reshape(batch, width)
    plan = p.make_plan(geometry, state, np.arange(batch), np.cumsum([0, *lengths]), table, layout.entries)
    windows, appends = (torch.from_numpy(a.copy()).cuda() for a in (plan.windows, plan.appends))
    rows = torch.randn(total, geometry.row_width, device="cuda").to(DTYPES[given])
    first_rings = torch.randn(batch, geometry.ring_rows, geometry.row_width, device="cuda").to(DTYPES[ring])
    device, results = on_gpu(compressor), []
    points = (cute.variants.STREAM_WINDOWS, cute.variants.MIXED_STREAM_WINDOWS)
    for switch in (10**6, 1):
        cute.variants.STREAM_WINDOWS = cute.variants.MIXED_STREAM_WINDOWS = switch
        pages = torch.full((num_pages, layout.page_bytes), 0xFF, dtype=torch.uint8, device="cuda")
        rings = first_rings.clone()
        for _ in range(3):
            cute.compress(windows, appends, rows, rings, pages, device)
        torch.cuda.synchronize()
        results.append((pages, rings))
    cute.variants.STREAM_WINDOWS, cute.variants.MIXED_STREAM_WINDOWS = points
    wrong = [int((pages != results[0][0]).sum()) + int((rings != results[0][1]).sum()) for pages, rings in results]
    return f"{'BAD' if any(wrong) else 'ok '} {plan.num_windows} windows, differing bytes of tiles, stream: {wrong}"


def check_layer(given: str, ring: str, indexer_format: str) -> str:
    """Main and indexer in one launch: the bytes of two launches."""
    sides, total = [], 901
    for kind, fmt in (("csa", "fp8_ds_mla"), ("indexer", indexer_format)):
        compressor = make_compressor(kind, fmt)
        holder = GpuHolder(compressor, ring)
        rows = make_rows(compressor.geometry, 1000 + total, dtype=given)
        feed(holder, rows, [1000])
        state = holder.state.copy()
        pages, rings = holder.pages.clone(), holder.rings.clone()
        feed(holder, rows[1000:], [total])
        plan = holder.plans[-1]
        assert int(state[p.COMMITTED, 1]) == 1000
        arrays = [torch.from_numpy(a.copy()).cuda() for a in (plan.windows, plan.appends)]
        call = (*arrays, rows[1000:].cuda(), rings, pages, on_gpu(compressor))
        sides.append((call, holder))
    launches = cute.compress_layer(*(call for call, _ in sides))
    torch.cuda.synchronize()
    integer = torch.int16 if ring == "bf16" else torch.int32
    wrong = 0
    for call, holder in sides:
        wrong += int((call[4] != holder.pages).sum()) + int((call[3].view(integer) != holder.rings.view(integer)).sum())
    return f"{'BAD' if wrong or launches != 1 else 'ok '} {launches} launch, {wrong} differing bytes"


def check_flags(kind: str, given: str) -> str:
    """The first value that no step may hold, planted everywhere it matters."""
    geometry = make_compressor(kind, "bf16").geometry
    clean = make_rows(geometry, 300, dtype=given).cuda()
    clean[7, geometry.half_width :] = -float("inf")
    wrong = int(cute.find_non_finite(clean, 300) is not None)
    generator = np.random.default_rng(0)
    for _ in range(60):
        rows, column = clean.clone(), int(generator.integers(geometry.row_width))
        row = int(generator.integers(300))
        value = generator.choice([np.nan, np.inf] + ([-np.inf] if column < geometry.half_width else []))
        rows[row, column] = float(value)
        rows[min(299, row + 1) :, -1] = float("nan")
        want = (row, column)
        wrong += int(cute.find_non_finite(rows, row + 1) != want) + int(cute.find_non_finite(rows, row) is not None)
    return f"{'BAD' if wrong else 'ok '} {wrong} wrong"


def check_far_pages() -> str:
    """Page ids whose bytes lie beyond 4 GiB."""
    compressor = make_compressor("csa", "fp8_ds_mla")
    layout, geometry = compressor.layout, compressor.geometry
    num_pages = 5 * 2**30 // layout.page_bytes
    pages = torch.full((num_pages, layout.page_bytes), 0xFF, dtype=torch.uint8, device="cuda")
    near = GpuHolder(compressor, "bf16")
    near.free = list(range(512))
    rows = make_rows(geometry, 512)
    feed(near, rows, [512])
    plan = near.plans[0]
    windows = torch.from_numpy(plan.windows.copy())
    shift = num_pages - 512
    windows[p.SLOT] += shift * layout.entries
    appends = torch.from_numpy(plan.appends.copy())
    rings = near.rings.clone()
    cute.compress(windows.cuda(), appends.cuda(), rows.cuda(), rings, pages, on_gpu(compressor))
    torch.cuda.synchronize()
    same = torch.equal(pages[shift:], near.pages) and int((pages[:shift] != 0xFF).sum()) == 0
    return f"{'ok ' if same else 'BAD'} pages up to {num_pages * layout.page_bytes / 2**30:.1f} GiB"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--library", type=pathlib.Path)
    parser.add_argument("--repeats", type=int, default=1000)
    args = parser.parse_args()
    if args.library:
        cute.LIBRARIES = args.library
    checks = [
        (f"{kind} {fmt} {given}/{ring}", lambda k=kind, f=fmt, a=given, b=ring: check_format(k, f, a, b))
        for kind, fmt in FORMATS
        for given, ring in PAIRS
    ]
    for fmt in ("indexer_fp8", "indexer_mxfp4"):
        checks.append(
            (
                f"indexer {fmt} sglang",
                lambda f=fmt: check_format("indexer", f, "bf16", "fp32", indexer_profile="sglang"),
            )
        )
    checks.append(("csa scale floor", lambda: check_format("csa", "fp8_ds_mla", "bf16", "bf16", scale_floor="scale")))
    for kind in ("hca", "csa", "indexer"):
        for given in ("bf16", "fp32"):
            checks.append((f"hard {kind} {given}", lambda k=kind, g=given: check_hard_scores(k, g)))
    for kind in ("hca", "csa"):
        for given, ring in PAIRS:
            checks.append(
                (
                    f"race {kind} {given}/{ring}",
                    lambda k=kind, g=given, b=ring: check_repeats_and_races(k, g, b, args.repeats),
                )
            )
    for given, ring in PAIRS:
        steps = [([s], [n]) for n, s in ((300, 100), (1500, 60), (5000, 77), (61440, 0), (62000, 130), (131072, 5))]
        steps.append(([127 + 128 * i for i in range(40)], [1] * 40))
        steps.append(([5 * i for i in range(60)], [1 + 7 * i % 400 for i in range(60)]))
        for starts, lengths in steps:
            checks.append(
                (
                    f"shapes {given}/{ring} {len(starts)} from {starts[0]}, {sum(lengths)}",
                    lambda g=given, b=ring, s=starts, n=lengths: check_shapes(g, b, s, n),
                )
            )
    for given in ("bf16", "fp32"):
        checks.append((f"chain csa {given}", lambda g=given: check_chain(g, args.repeats)))
    for given, ring in PAIRS:
        for fmt in ("indexer_fp8", "indexer_mxfp4"):
            checks.append((f"layer {fmt} {given}/{ring}", lambda a=given, b=ring, f=fmt: check_layer(a, b, f)))
    for kind in ("hca", "csa", "indexer"):
        for given in ("bf16", "fp32"):
            checks.append((f"flags {kind} {given}", lambda k=kind, g=given: check_flags(k, g)))
    checks.append(("far pages", check_far_pages))
    bad = 0
    for name, check in checks:
        if args.names and not any(word in name for word in args.names):
            continue
        start = time.perf_counter()
        try:
            line = check()
        except Exception as error:  # one broken variant should not hide the others
            line = f"BAD {type(error).__name__}: {str(error)[:300]}"
            if "CUDA error" in line or "illegal" in line:
                print(f"{name:34s} {line}", flush=True)
                raise
        bad += line.startswith("BAD")
        print(f"{name:34s} {line} ({time.perf_counter() - start:.1f} s)", flush=True)
    print(f"{bad} bad")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
