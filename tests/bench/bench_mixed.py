"""bf16 rows into fp32 rings, the worker's usual case: every kernel shape of hca on every row, and csa, in µs.

    python -m tests.bench.bench_mixed [--library FOLDER] [--out FILE.json] [--only WORD]

Medians of graph replays as in bench_gpu. `taken` is the shape that the switch points choose; `bf16` and `fp32` are the
same step with rings of the input's dtype, `floor` what it must move at the copy rate.
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

FAR = 10**6
SHAPES = {"tiles": (FAR, FAR), "boxes": (1, FAR), "stream": (1, 1)}
"""BOXES_WINDOWS and STREAM_WINDOWS that make every step with a window take the shape."""


def timed(case: Ours, switches: tuple[int, int]) -> float:
    variants = cute.variants
    usual = variants.BOXES_WINDOWS, variants.STREAM_WINDOWS
    variants.BOXES_WINDOWS, variants.STREAM_WINDOWS = switches
    try:
        return graph_us(case.run)
    finally:
        variants.BOXES_WINDOWS, variants.STREAM_WINDOWS = usual


def row_of(ratio: int, starts: list[int], lengths: list[int], rate: float) -> dict[str, Any]:
    case = Ours(ratio, starts, lengths, "bf16", ring="fp32")
    windows = case.plan.num_windows
    row: dict[str, Any] = {"windows": windows, "floor": case.min_bytes / rate * 1e6, "mixed": graph_us(case.run)}
    if ratio == 128 and windows:
        row["taken"] = cute.choose("hca", "fp8_ds_mla", "vllm", "bf16", "fp32", windows).shape
        row |= {shape: timed(case, switches) for shape, switches in SHAPES.items()}
    for given in ("bf16", "fp32"):
        row[given] = graph_us(Ours(ratio, starts, lengths, given).run)
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


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
        "kernels": cute.kernels().origin,
        "clusters": cute.max_clusters(),
        "copy_bytes_per_s": rate,
        "rows": {},
    }
    more = [(f"C128 decode {n} all", 128, [4096 + 127] * n, [1] * n, "decode") for n in (4, 6, 8, 12, 16, 24)]
    more += [(f"C128 prefill {128 * n}", 128, [0], [128 * n], "prefill") for n in (2, 4, 6, 12, 16, 24)]
    for name, ratio, starts, lengths, _ in (*cases(), *more):
        if args.only in name:
            row = result["rows"][name] = row_of(ratio, starts, lengths, rate)
            print(f"{name:24s}", " ".join(f"{key} {value}" for key, value in row.items()), flush=True)
            if args.out:
                args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
