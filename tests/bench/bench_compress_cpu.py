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
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numba
import numpy as np
import torch
import transformers
from torch import nn
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

ROOT = pathlib.Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from kvfold_kernels import plan as p  # noqa: E402
from kvfold_kernels.compress import cpu, reference  # noqa: E402
from kvfold_kernels.compressor import Compressor  # noqa: E402
from tests.cases import make_compressor, make_rows  # noqa: E402

CASES = (
    ("hca", 128),
    ("hca", 32768),
    ("csa", 8),
    ("csa", 65536),
    ("indexer", 65536),
)
"""(kind, tokens of one new request)."""
FORMATS = {"hca": "fp8_ds_mla", "csa": "fp8_ds_mla", "indexer": "indexer_fp8"}
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


def ours(compressor: Compressor, rows: torch.Tensor) -> Callable[[], torch.Tensor]:
    """One step of a new request."""
    geometry, n = compressor.geometry, compressor.layout.entries
    num_pages = -(-geometry.num_entries(len(rows)) // n)
    table = np.arange(num_pages, dtype=np.int32)[None]
    plan = p.make_plan(geometry, p.empty_state(1), np.zeros(1, np.int64), np.array([0, len(rows)]), table, n)
    windows, appends = (torch.from_numpy(a.copy()) for a in (plan.windows, plan.appends))
    rings = torch.full((1, geometry.ring_rows, geometry.row_width), float("nan"), dtype=rows.dtype)
    pages = torch.full((num_pages, compressor.layout.page_bytes), 0xFF, dtype=torch.uint8)

    def run() -> torch.Tensor:
        cpu.compress(windows, appends, rows, rings, pages, compressor)
        return pages

    expected = pages.clone()
    few = windows[:, :4].contiguous()
    reference.compress(few, appends, rows, rings, expected, compressor)
    cpu.compress(few, appends, rows, rings, pages, compressor)
    differing = int((expected != pages).sum())
    assert differing <= 2 * few.shape[1], f"{differing} bytes of {few.shape[1]} entries differ from the definition's"
    return run


def in_turns(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each function, alternating; short ones are repeated."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    repeats = {}
    for name, function in functions.items():
        function()
        start = time.perf_counter()
        function()
        repeats[name] = max(1, int(2e-3 / (time.perf_counter() - start)))
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            for _ in range(repeats[name]):
                function()
            times[name].append((time.perf_counter() - start) * 1e3 / repeats[name])
    return times


def measure(kind: str, num_tokens: int, dtype: str, rounds: int, threads: int) -> dict[str, object]:
    compressor = make_compressor(kind, FORMATS[kind], max_position=65536)
    rows = make_rows(compressor.geometry, num_tokens, dtype=dtype)
    copy = torch.empty_like(rows)
    functions: dict[str, Callable[[], object]] = {"ours": ours(compressor, rows)}
    if kind in LAYERS:
        functions["transformers"] = peer(compressor, rows)
    functions["find_non_finite"] = lambda: cpu.find_non_finite(rows, num_tokens)
    functions["copy"] = lambda: copy.copy_(rows)
    times = in_turns(functions, rounds)
    result: dict[str, object] = {"case": f"{kind} {num_tokens}", "dtype": dtype, "threads": threads}
    for name, values in times.items():
        result[f"{name}_ms"] = [round(statistics.median(values), 4), round(min(values), 4)]
    least = min(times["ours"])
    if "transformers" in times:
        pairs = zip(times["transformers"], times["ours"], strict=True)
        result["ratio"] = round(statistics.median(theirs / own for theirs, own in pairs), 2)
    result["gb_s"] = round(rows.nbytes / least / 1e6, 2)
    return result


def print_row(result: dict[str, object]) -> None:
    cells = []
    for column in COLUMNS:
        value = result.get(column, "–")
        cells.append(f"{value[0]:.3f} ({value[1]:.3f})" if isinstance(value, list) else str(value))
    print("| " + " | ".join(cells) + " |", flush=True)


def versions() -> dict[str, str]:
    model = [line for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "torch": torch.__version__,
        "numba": numba.__version__,
        "numpy": np.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": model[0].split(":")[1].strip() if model else platform.processor(),
        "cpus": str(os.cpu_count()),
    }


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
    print(json.dumps(versions()))
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
        options.out.write_text(json.dumps({"versions": versions(), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
