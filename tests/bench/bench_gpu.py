"""Every row of the performance table: CUDA-graph replays of the whole path, in µs, beside a peer's kernels where given.

    python -m tests.bench.bench_gpu [--library FOLDER] [--peers FOLDER] [--out FILE.json] [--only WORD]

Medians of graph replays over random data; floor = input once, entries, kept rows and carried rows at the copy rate
measured in the same process. Cases and the peer's path come from the folder `--peers` (bench_peers.py).
"""

from __future__ import annotations

import argparse
import functools
import json
import pathlib
import random
import sys
import time

import numpy as np
import torch
import triton
import triton.testing as tt

from kvfold_kernels import geometry as g
from kvfold_kernels import plan as p
from kvfold_kernels.compress import cute
from kvfold_kernels.compressor import Compressor

COLD_BYTES, COLD_COPIES = 200_000_000, 48
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def cases():
    for ratio in (128, 4):
        for tokens in (1024, 8192, 65536):
            yield f"C{ratio} prefill {tokens}", ratio, [0], [tokens], "prefill"
        for batch in (1, 32, 256):
            random.seed(1)
            spread = [4096 + random.randrange(128) for _ in range(batch)]
            yield f"C{ratio} decode {batch} none", ratio, [4097] * batch, [1] * batch, "decode"
            yield f"C{ratio} decode {batch} all", ratio, [4096 + ratio - 1] * batch, [1] * batch, "decode"
            yield f"C{ratio} decode {batch} rand", ratio, spread, [1] * batch, "decode"
        random.seed(1)
        [random.randrange(128) for _ in range(256)]
        starts = [4096 + random.randrange(128) for _ in range(128)] + [1000]
        yield f"C{ratio} mixed 128d+8192p", ratio, starts, [1] * 128 + [8192], "prefill"


class Ours:
    """One step on random data: plan, tensors and the launch."""

    def __init__(self, ratio, starts, lengths, given, kind=None, fmt="fp8_ds_mla", ring=None, bound=False):
        kind = kind or ("hca" if ratio == 128 else "csa")
        geometry = self.geometry = g.Geometry(kind, ratio, g.KINDS[kind].head_dim)
        layout = g.PageLayout.of(g.entry_format(fmt, geometry), geometry.default_page_entries)
        batch, dtype = len(starts), DTYPES[given]
        state = p.empty_state(batch)
        state[p.COMMITTED] = starts
        state[p.LIVE_START] = [geometry.live_start(start) for start in starts]
        state[p.RING_START] = np.random.default_rng(0).integers(0, geometry.ring_rows, batch)
        entries = [geometry.num_entries(a + b) for a, b in zip(starts, lengths, strict=True)]
        need = [max(1, -(-n // layout.entries)) for n in entries]
        table = np.zeros((batch, max(need)), np.int32)
        order, at = np.random.default_rng(1).permutation(sum(need)), 0
        for row, count in zip(table, need, strict=True):
            row[:count] = order[at : at + count]
            at += count
        loc = np.cumsum([0, *lengths]).astype(np.int64)
        plan = self.plan = p.make_plan(geometry, state, np.arange(batch), loc, table, layout.entries)
        cap_windows = max(1, batch if bound else plan.num_windows)
        cap_appends = max(1, plan.num_appends)
        windows = np.zeros((p.WINDOW_FIELDS, cap_windows), np.int32)
        windows[:, : plan.num_windows] = plan.windows
        appends = np.zeros((p.APPEND_FIELDS, cap_appends), np.int32)
        appends[:, : plan.num_appends] = plan.appends
        self.windows = torch.from_numpy(windows).cuda()
        self.appends = torch.from_numpy(appends).cuda()
        self.counts = torch.tensor([plan.num_windows, plan.num_appends], dtype=torch.int32).cuda()
        if plan.num_windows == 0 and not bound:
            self.windows = self.windows[:, :0]
        total = sum(lengths)
        self.rows = torch.randn(total, geometry.row_width, device="cuda").to(dtype)
        ring_dtype = DTYPES[ring or given]
        self.rings = torch.randn(batch, geometry.ring_rows, geometry.row_width, device="cuda").to(ring_dtype)
        self.pages = torch.randint(0, 255, (sum(need), layout.page_bytes), dtype=torch.uint8, device="cuda")
        self.compressor = Compressor(
            geometry,
            layout,
            ape=torch.randn(ratio, geometry.half_width, device="cuda") * 0.1,
            norm_weight=torch.rand(geometry.head_dim, device="cuda") + 0.5,
            cos_sin=torch.randn(max(a + b for a, b in zip(starts, lengths, strict=True)) + ratio, 64, device="cuda"),
        )
        row_bytes = geometry.row_width * dtype.itemsize
        ring_bytes = geometry.row_width * ring_dtype.itemsize
        carried = int(plan.windows[p.NUM_RING].sum()) * ring_bytes // geometry.halves if plan.num_windows else 0
        self.min_bytes = total * row_bytes + plan.num_windows * layout.format.entry_bytes
        self.min_bytes += plan.num_appends * ring_bytes + carried

    @property
    def call(self) -> tuple:
        return self.windows, self.appends, self.rows, self.rings, self.pages, self.compressor, self.counts

    def run(self):
        return cute.compress(*self.call)


def graph_us(fn, rep=20) -> float:
    return tt.do_bench_cudagraph(fn, rep=rep, return_mode="median") * 1e3


def cold_us(make, num_bytes: int) -> float:
    """As graph_us, over so many copies of a case that the L2 holds none of a copy's data when its turn comes again."""
    copies = [make() for _ in range(min(COLD_COPIES, -(-COLD_BYTES // num_bytes)))]
    return graph_us(lambda: [run() for run in copies]) / len(copies)


def layer_rows(only: str) -> dict:
    """A csa layer: main and indexer in one launch against two."""
    found = {}
    for name, ratio, starts, lengths, _ in cases():
        if ratio != 4 or only not in name:
            continue
        row = found[f"layer {name[3:]}"] = {}
        for given in ("fp32", "bf16"):
            main = Ours(4, starts, lengths, given)
            indexer = Ours(4, starts, lengths, given, "indexer", "indexer_fp8")
            row[given] = graph_us(lambda a=main, b=indexer: cute.compress_layer(a.call, b.call))
            row[f"{given}_two"] = graph_us(lambda a=main, b=indexer: (a.run(), b.run()))
            row[f"{given}_indexer"] = graph_us(indexer.run)
    return found


def load_peer(folder: pathlib.Path):
    """The peer's case class, without running its script."""
    source = (folder / "bench_peers.py").read_text().split("CS=list(cases())")[0]
    space: dict = {"__name__": "peers"}
    argv, sys.argv = sys.argv, ["peers"]
    exec(compile(source, "bench_peers", "exec"), space)
    sys.argv = argv
    return space["S"]


def copy_rate() -> float:
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / (tt.do_bench(lambda: b.copy_(a), return_mode="median") * 1e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=pathlib.Path)
    parser.add_argument("--peers", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--layer", action="store_true", help="also time csa layers: main and indexer in one launch")
    parser.add_argument("--cold", action="store_true", help="also time with inputs that are not in the L2")
    parser.add_argument("--bound", action="store_true", help="also time decode with room for a window a request")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER", help="other switch points")
    args = parser.parse_args()
    for assignment in args.set:
        name, number = assignment.split("=")
        setattr(cute.variants, name, int(number))
    if args.library:
        cute.LIBRARIES = args.library
    started = time.time()
    rate = copy_rate()
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_bytes_per_s": rate,
        "rows": {},
    }
    print(f"{result['gpu']}, torch {torch.__version__}, copy {rate / 1e12:.2f} TB/s", flush=True)
    peer = load_peer(args.peers) if args.peers else None
    for name, ratio, starts, lengths, mode in cases():
        if args.only not in name:
            continue
        row = result["rows"][name] = {}
        for given in ("fp32", "bf16"):
            case = Ours(ratio, starts, lengths, given)
            row["windows"] = case.plan.num_windows
            row[f"{given}_floor"] = case.min_bytes / rate * 1e6
            row[given] = graph_us(case.run)
            row_bytes = case.min_bytes
            del case
            if mode == "decode" and args.bound:
                case = Ours(ratio, starts, lengths, given, bound=True)
                row[f"{given}_bound"] = graph_us(case.run)
                del case
            config = "fff" if given == "fp32" else "bbb"
            if args.cold and any(word in name for word in ("1024", "8192", "all")):
                ours = functools.partial(Ours, ratio, starts, lengths, given)
                row[f"{given}_cold"] = cold_us(lambda make=ours: make().run, row_bytes)
                if peer:
                    theirs = functools.partial(peer, ratio, starts, lengths, mode, config)
                    row[f"{given}_peer_cold"] = cold_us(lambda make=theirs: make().bind(1)[2], row_bytes)
            if peer:
                other = peer(ratio, starts, lengths, mode, config)
                row[f"{given}_peer"] = graph_us(other.bind(1)[2])
                del other
        line = " ".join(
            f"{key}={value:.2f}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()
        )
        print(f"{name:24s} {line}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1))
    if args.layer:
        for name, row in layer_rows(args.only).items():
            result["rows"][name] = row
            print(f"{name:24s}", " ".join(f"{key}={value:.2f}" for key, value in row.items()), flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1))
    print(f"{time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
