"""Every kernel shape of hca on every row and on small steps, for each pair of input and ring dtype; csa, too. In µs.

    python -m tests.bench.bench_shapes [--library FOLDER] [--out FILE.json] [--only WORD]

Medians of graph replays as in bench_gpu. `taken` is the time of the shape that the switch points choose, `floor` what
the step must move at the copy rate. bf16 rows into fp32 rings are the worker's usual case.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import time
from typing import Any

import torch

from kvfold_kernels.compress import cute
from tests.bench.bench_gpu import Ours, cases, copy_rate, graph_us
from tests.bench.measure import from_root

PAIRS = (("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp32"))
SHAPES = {"tiles": 10**6, "stream": 1}
"""Switch points that make every step with a window take the shape."""


def timed(case: Ours, switch: int) -> float:
    variants = cute.variants
    usual = variants.STREAM_WINDOWS, variants.MIXED_STREAM_WINDOWS
    variants.STREAM_WINDOWS = variants.MIXED_STREAM_WINDOWS = switch
    try:
        return graph_us(case.run)
    finally:
        variants.STREAM_WINDOWS, variants.MIXED_STREAM_WINDOWS = usual


def row_of(ratio: int, starts: list[int], lengths: list[int], rate: float) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for given, ring in PAIRS:
        case = Ours(ratio, starts, lengths, given, ring=ring)
        row["windows"] = windows = case.plan.num_windows
        pair = row[f"{given}/{ring}"] = {"floor": case.min_bytes / rate * 1e6, "taken": graph_us(case.run)}
        if ratio == 128 and windows:
            pair["shape"] = cute.choose("hca", "fp8_ds_mla", "vllm", given, ring, windows).shape
            pair |= {shape: timed(case, switch) for shape, switch in SHAPES.items()}
        row[f"{given}/{ring}"] = {k: round(v, 3) if isinstance(v, float) else v for k, v in pair.items()}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    if args.library:
        cute.LIBRARIES = args.library
    rate = copy_rate()
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "kernels": from_root(cute.kernels().origin),
        "clusters": cute.max_clusters(),
        "copy_bytes_per_s": rate,
        "rows": {},
    }
    decodes, prefills = (2, 4, 6, 8, 12, 15, 16, 24, 30, 31, 40, 45, 48), (2, 4, 6, 12, 15, 16, 24, 30, 40)
    more = [(f"C128 decode {n} all", 128, [4096 + 127] * n, [1] * n, "decode") for n in decodes]
    more += [(f"C128 prefill {128 * n}", 128, [0], [128 * n], "prefill") for n in prefills]
    for name, ratio, starts, lengths, _ in (*cases(), *more):
        if args.only in name:
            row = result["rows"][name] = row_of(ratio, starts, lengths, rate)
            print(f"{name:24s}", row, flush=True)
            if args.out:
                args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
