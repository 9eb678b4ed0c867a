"""Every row of the performance table, our backends beside SGLang's and vLLM's kernels, in one process.

    python -m tests.bench.bench_beside --library FOLDER --peers FOLDER [--out FILE.json] [--only WORD]

µs, medians of whole paths over random data: `graph` replays, `eager` calls (the cache flushed before each), and `cold`
replays over so many copies that the L2 holds none of them. Which path of vLLM: its own choice on NVIDIA (`vllm`: save,
then CuTe DSL), its single pass and its two stages in Triton. A peer that cannot be imported ends the run.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton
import triton.testing as tt

from kvfold_kernels.compress import cute
from tests.bench.bench_gpu import DTYPES, Ours, cases, cold_us, copy_rate, graph_us, load_peer
from tests.bench.bench_triton import Case as OursInTriton

Paths = dict[str, Callable[[], Any]]


def vllm_paths(case: Any, ratio: int) -> Paths:
    paths = {"vllm": case.cute, "vllm_single_pass": case.triton1}
    if ratio == 128:
        paths["vllm_two_stage"] = case.triton2
    return {name: lambda path=path: (case.save(), path()) for name, path in paths.items()}


def makers(row: tuple, given: str, sglang: Any, vllm: Any) -> dict[str, Callable[[], Paths]]:
    """Whose paths a row has: each makes its own tensors, and frees them when its turn is over."""
    _, ratio, starts, lengths, mode = row
    config = "fff" if given == "fp32" else "bbb"
    return {
        "cute": lambda: {"cute": Ours(ratio, starts, lengths, given).run},
        "triton": lambda: {"triton": OursInTriton(ratio, starts, lengths, given).run},
        "sglang": lambda: {"sglang": sglang(ratio, starts, lengths, mode, config).bind(1)[2]},
        "vllm": lambda: vllm_paths(vllm(ratio, starts, lengths, DTYPES[given]), ratio),
    }


def timed(row: tuple, given: str, sglang: Any, vllm: Any, min_bytes: int) -> Iterator[tuple[str, dict[str, float]]]:
    for owner, make in makers(row, given, sglang, vllm).items():
        for name, run in make().items():
            run()
            found = {"graph": graph_us(run, rep=10)}
            found["eager"] = tt.do_bench(run, warmup=3, rep=10, return_mode="median") * 1e3
            if owner != "vllm" and any(word in row[0] for word in ("1024", "8192", "all")):
                found["cold"] = cold_us(lambda make=make, name=name: make()[name], min_bytes)
            yield name, {key: round(us, 3) for key, us in found.items()}


def versions() -> dict[str, str]:
    return {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "sglang": "0.5.23",
        "vllm": "0.33.0",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=pathlib.Path)
    parser.add_argument("--peers", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    if args.library:
        cute.LIBRARIES = args.library
    started, rate = time.time(), copy_rate()
    sglang = load_peer(args.peers)
    sys.path.insert(0, str(args.peers))
    import vllm_case

    result: dict[str, Any] = {**versions(), "copy_bytes_per_s": rate, "rows": {}}
    for row in cases():
        if args.only not in row[0]:
            continue
        into = result["rows"][row[0]] = {}
        for given in DTYPES:
            ours = Ours(*row[1:4], given)
            into["windows"], min_bytes = ours.plan.num_windows, ours.min_bytes
            del ours
            part = into[given] = {"floor": round(min_bytes / rate * 1e6, 3)}
            part |= dict(timed(row, given, sglang, vllm_case.Case, min_bytes))
            line = " ".join(f"{name} {us['graph']:.2f}" for name, us in part.items() if isinstance(us, dict))
            print(f"{row[0]:22s} {given} floor {part['floor']:.2f}  {line}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(result, indent=1))
    print(f"{time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
