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
import sys
import time

import torch
import triton
import triton.testing as tt

from kvfold_kernels.bench import copying
from kvfold_kernels.bench.cases import Case, step_cases
from kvfold_kernels.bench.problem import DTYPES, Problem
from kvfold_kernels.compress import cute
from kvfold_kernels.geometry import KINDS

COLD_BYTES, COLD_COPIES = 200_000_000, 48
LAYER_DTYPES = {"fp32": ("fp32", "fp32"), "bf16": ("bf16", "bf16"), "mixed": ("bf16", "fp32")}
"""Input and ring; a worker's usual case is the last."""
__all__ = ["DTYPES", "Ours", "cases", "cold_us", "copy_rate", "graph_us", "load_peer"]


def cases():
    """(name, ratio, starts, lengths, mode) of every row."""
    for kind in ("hca", "csa"):
        for case in step_cases(kind):
            ratio, what = KINDS[kind].ratio, case.name.removeprefix(f"{kind} ")
            mode = "decode" if what.startswith("decode") else "prefill"
            yield f"C{ratio} {what}", ratio, list(case.starts), list(case.lengths), mode


class Ours(Problem):
    """One step on random data, and its launch."""

    def __init__(self, ratio, starts, lengths, given, kind=None, fmt=None, ring=None, bound=False):
        kind = kind or ("hca" if ratio == 128 else "csa")
        case = Case(f"C{ratio}", kind, tuple(starts), tuple(lengths))
        super().__init__(case, given, "cuda", cache_format=fmt, ring_dtype=ring, bound=bound)

    @property
    def call(self) -> tuple:
        return *self.operands, self.counts

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
        for dtypes, (given, ring) in LAYER_DTYPES.items():
            main = Ours(4, starts, lengths, given, ring=ring)
            indexer = Ours(4, starts, lengths, given, "indexer", "indexer_fp8", ring=ring)
            row[dtypes] = graph_us(lambda a=main, b=indexer: cute.compress_layer(a.call, b.call))
            row[f"{dtypes}_two"] = graph_us(lambda a=main, b=indexer: (a.run(), b.run()))
            row[f"{dtypes}_indexer"] = graph_us(indexer.run)
    return found


def load_peer(folder: pathlib.Path):
    """The peer's case class, without running its script."""
    source = (folder / "bench_peers.py").read_text().split("CS=list(cases())")[0]
    space: dict = {"__name__": "peers"}
    argv, sys.argv = sys.argv, ["peers"]
    exec(compile(source, "bench_peers", "exec"), space)
    sys.argv = argv
    return space["S"]


copy_rate = functools.partial(copying.copy_rate, "cuda")


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
