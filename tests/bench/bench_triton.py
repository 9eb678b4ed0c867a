"""The `triton` backend over the rows of the performance table, beside SGLang's and vLLM's kernels: graph replays in µs.

    python tests/bench/bench_triton.py [--peers FOLDER] [--out FILE.json] [--only WORD] [--compare] [--seeds]

--compare  other tilings, too
--seeds    the skip without a boundary, and two launches against one
"""

# ruff: noqa: E402
from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
import types
from dataclasses import replace

import torch
import triton
import triton.testing as tt

sys.path[:0] = [str(pathlib.Path(__file__).parents[2] / part) for part in ("", "kernels")]

from kvfold_kernels.compress import triton as backend
from tests.bench.bench_gpu import Ours, cases, copy_rate, graph_us, load_peer

Tiling = backend.Tiling


def alternatives(ratio: int, given: str, chosen: Tiling) -> list[Tiling]:
    """Tilings to compare with the chosen one."""
    if ratio == 128:
        wide, narrow = ((columns, columns // 16) for columns in (64, 32))
        found = [replace(chosen, columns=c, warps=w) for c, w in (wide, narrow)]
        found += [replace(chosen, band=band) for band in (8,)]
    elif given == "fp32":
        found = [replace(chosen, windows=n, warps=4 * n, max_registers=r) for n, r in ((1, 80), (2, None))]
    else:
        found = [replace(chosen, windows=n, warps=w, max_registers=None) for n, w in ((1, 2), (1, 4), (2, 8))]
    return [tiling for tiling in found if tiling != chosen]


class Case(Ours):
    def run(self) -> int:
        return backend.compress(
            self.windows, self.appends, self.rows, self.rings, self.pages, self.compressor,
            self.counts if self.bound else None,
        )  # fmt: skip

    def __init__(self, *arguments, bound: bool = False, **options):
        self.bound = bound
        super().__init__(*arguments, bound=bound, **options)


def load_vllm(folder: pathlib.Path):
    """vLLM's case class. Its CuTe kernels need cutlass; where that is missing, its Triton paths still run."""
    sys.path.insert(0, str(folder))
    name = "vllm.models.deepseek_v4.nvidia.ops.sparse_attn_compress_cutedsl"
    try:
        __import__(name)
    except ImportError:
        sys.modules[name] = types.SimpleNamespace(_SPARSE_ATTN_COMPRESSOR_CUTEDSL_KERNEL=None)
    import vllm_case

    return vllm_case.Case


def vllm_us(case_class, ratio, starts, lengths, dtype) -> dict[str, float]:
    result = {}
    case = case_class(ratio, starts, lengths, dtype)
    for path in ("triton1", "triton2") if ratio == 128 else ("triton1",):
        result[path] = graph_us(lambda path=path: (case.save(), getattr(case, path)()), rep=10)
    return result


def compare(case: Case, ratio: int, given: str) -> dict[str, float]:
    chosen, seen = backend.choose_tiling, []
    backend.choose_tiling = lambda *arguments: seen.append(chosen(*arguments)) or seen[0]
    case.run()
    found = {}
    for tiling in alternatives(ratio, given, seen[0]):
        backend.choose_tiling = lambda *_, tiling=tiling: tiling
        found[f"{tiling.windows}n{tiling.columns}c{tiling.warps}w{tiling.band}b"] = round(graph_us(case.run, rep=8), 2)
    backend.choose_tiling = chosen
    return found


def time_rows(args, result) -> None:
    peer = load_peer(args.peers) if args.peers else None
    vllm = load_vllm(args.peers) if args.peers else None
    for name, ratio, starts, lengths, mode in cases():
        if args.only not in name:
            continue
        row = result["rows"][name] = {}
        for given in ("fp32", "bf16"):
            case = Case(ratio, starts, lengths, given)
            row["windows"] = case.plan.num_windows
            row[f"{given}_floor"] = case.min_bytes / result["copy_bytes_per_s"] * 1e6
            row["launches"] = case.run()
            row[given] = graph_us(case.run, rep=10)
            if args.compare and case.plan.num_windows:
                row[f"{given}_tilings"] = compare(case, ratio, given)
            if given == "fp32" and "decode 1 " in name:
                row["eager"] = tt.do_bench(case.run, warmup=5, rep=20, return_mode="median") * 1e3
            if mode == "decode":
                bound = Case(ratio, starts, lengths, given, bound=True)
                row[f"{given}_full_graph"] = graph_us(bound.run, rep=10)
                del bound
            del case
            if peer:
                other = peer(ratio, starts, lengths, mode, "fff" if given == "fp32" else "bbb")
                row[f"{given}_sglang"] = graph_us(other.bind(1)[2], rep=10)
                del other
            if vllm and given == "fp32" and ("8192" in name or "32 all" in name):
                try:
                    row |= {f"vllm_{k}": v for k, v in vllm_us(vllm, ratio, starts, lengths, torch.float32).items()}
                except Exception as error:
                    print("vLLM:", repr(error)[:200])
                    vllm = None
        print(
            f"{name:24s}", *(f"{k}={v:.2f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()), flush=True
        )
        if args.out:
            args.out.write_text(json.dumps(result, indent=1))


def time_seeds(result) -> None:
    """The skip: one token at position 126 in a full graph's launches, against the append alone."""
    both = {}
    for label, bound in (("skipped", False), ("not_skipped", True)):
        case = Case(128, [126], [1], "fp32", bound=bound)
        both[label] = {
            "graph_us": graph_us(case.run),
            "eager_us": tt.do_bench(case.run, warmup=5, rep=20, return_mode="median") * 1e3,
        }
    split = {}
    for tokens in (1024, 8192, 65_536):
        case, chosen = Case(128, [0], [tokens], "fp32"), backend.choose_tiling
        split[tokens] = {"chosen_us": graph_us(case.run)}
        backend.choose_tiling = lambda *_: Tiling(1, 64, False, 4)
        split[tokens]["single_us"] = graph_us(case.run)
        backend.choose_tiling = chosen
    result["skip"], result["split"] = both, split
    print("skip", both, "\nsplit", split)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--seeds", action="store_true")
    args = parser.parse_args()
    started = time.time()
    result = {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_bytes_per_s": copy_rate(),
        "rows": {},
    }
    print(result["gpu"], f"torch {torch.__version__}, copy {result['copy_bytes_per_s'] / 1e12:.2f} TB/s", flush=True)
    if args.seeds:
        time_seeds(result)
    time_rows(args, result)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))
    print(f"{time.time() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
