"""The CPU backend beside transformers' own DeepSeek-V4 compressors (pooling, norm, rotation), on the same rows.

    python tests/bench/bench_compress_cpu.py [--threads 1 2] [--rounds 15] [--out FILE.json]

Ours also quantises, stores fp8 pages and keeps the ring rows; transformers' modules stop at the rotated rows, and their
projections are replaced by the halves of a row. Both take turns in one process, one process for each number of threads
(torch does not change its number well). Milliseconds: median (least). Ratio: median over the turns of theirs / ours.
GB/s: of input, in our least time. Copy: torch's, of the whole input.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Callable

import torch
from torch import nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from kvfold_kernels import backends  # noqa: E402
from kvfold_kernels.bench.cases import Case  # noqa: E402
from kvfold_kernels.bench.check import check  # noqa: E402
from kvfold_kernels.bench.problem import Problem  # noqa: E402
from kvfold_kernels.bench.result import environment  # noqa: E402
from kvfold_kernels.bench.timing import in_turns  # noqa: E402
from kvfold_kernels.compress import cpu  # noqa: E402
from kvfold_kernels.compressor import Compressor  # noqa: E402

CASES = (
    ("hca", 128),
    ("hca", 32768),
    ("csa", 8),
    ("csa", 65536),
    ("indexer", 65536),
)
"""(kind, tokens of one new request)."""
LAYERS = {"hca": "heavily_compressed_attention", "csa": "compressed_sparse_attention"}
ROPE = {
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 65536,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
COLUMNS = ("case", "dtype", "threads", "ours_ms", "transformers_ms", "ratio", "gb_s", "find_non_finite_ms", "copy_ms")


class _Pooled(Exception):  # noqa: N818
    """A csa module has its rotated rows; what follows is the indexer's work."""


class _Half(nn.Module):
    def __init__(self, index: int):
        super().__init__()
        self.index = index

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        return row.chunk(2, dim=-1)[self.index]


class _Stop(nn.Module):
    def forward(self, *_) -> None:
        raise _Pooled


def peer(compressor: Compressor, rows: torch.Tensor) -> Callable[[], object]:
    """transformers' module over all of `rows`, stateless."""
    geometry = compressor.geometry
    config = DeepseekV4Config(
        num_hidden_layers=1,
        layer_types=[LAYERS[geometry.kind]],
        compress_rates=dict.fromkeys(LAYERS.values(), geometry.ratio),
        hidden_size=geometry.row_width,
        rope_parameters=ROPE,
    )
    name = "DeepseekV4HCACompressor" if geometry.kind == "hca" else "DeepseekV4CSACompressor"
    module = getattr(deepseek, name)(config)
    module.kv_proj, module.gate_proj, module.indexer = _Half(0), _Half(1), _Stop()
    module.position_bias.data.copy_(compressor.ape)
    module.kv_norm.weight.data.copy_(compressor.norm_weight)
    hidden, one_position = rows[None], torch.zeros(1, 1, dtype=torch.int64)

    def run() -> torch.Tensor | None:
        with torch.inference_mode():
            try:
                return module(hidden, None, one_position, None, 0)[0][0, 0]
            except _Pooled:
                return None

    return run


def measure(kind: str, num_tokens: int, dtype: str, rounds: int, threads: int) -> dict[str, object]:
    problem = Problem(Case(f"{kind} {num_tokens}", kind, (0,), (num_tokens,)), dtype, "cpu")
    backend, rows = backends.load("cpu"), problem.rows
    check(problem, backend)
    copy = torch.empty_like(rows)
    functions: dict[str, Callable[[], object]] = {"ours": problem.runs(backend.compress)}
    if kind in LAYERS:
        functions["transformers"] = peer(problem.compressor, rows)
    functions["find_non_finite"] = lambda: backend.find_non_finite(rows, num_tokens)
    functions["copy"] = lambda: copy.copy_(rows)
    times = in_turns(functions, rounds, "cpu")
    result: dict[str, object] = {"case": problem.case.name, "dtype": dtype, "threads": threads}
    for name, us in times.items():
        result[f"{name}_ms"] = [round(statistics.median(us) / 1e3, 4), round(min(us) / 1e3, 4)]
    if "transformers" in times:
        pairs = zip(times["transformers"], times["ours"], strict=True)
        result["ratio"] = round(statistics.median(theirs / own for theirs, own in pairs), 2)
    result["gb_s"] = round(rows.nbytes / min(times["ours"]) / 1e3, 2)
    return result


def print_row(result: dict[str, object]) -> None:
    cells = []
    for column in COLUMNS:
        value = result.get(column, "–")
        cells.append(f"{value[0]:.3f} ({value[1]:.3f})" if isinstance(value, list) else str(value))
    print("| " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        (threads,) = options.threads
        torch.set_num_threads(threads)
        cpu.set_num_threads(threads)
        for kind, num_tokens in CASES:
            for dtype in ("fp32", "bf16"):
                print(json.dumps(measure(kind, num_tokens, dtype, options.rounds, threads)), flush=True)
        return
    print(json.dumps(environment()))
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    results = []
    for threads in options.threads:
        command = [sys.executable, __file__, "--child", "--threads", str(threads), "--rounds", str(options.rounds)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            for line in child.stdout or ():
                results.append(json.loads(line))
                print_row(results[-1])
        if child.returncode:
            raise SystemExit(child.returncode)
    if options.out:
        options.out.write_text(json.dumps({"environment": environment(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
