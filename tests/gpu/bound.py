"""What the kernels of rows that miss their aim, or just meet it, are bound by, as Nsight Compute counts it.

    python -m tests.gpu.bound [--out FILE.json] [--library FOLDER]

Each row's step runs alone, its launch and its end included, and ncu's own work between the runs leaves little of its
data in the L2 (`l2_hit_percent`): `us` is more than a replayed graph's. Clocks are left alone. `stalls` are cycles that
a warp waits, for each instruction it issues.
"""

from __future__ import annotations

import argparse
import csv
import io
import pathlib
import subprocess
import sys
from typing import Any, Final

ROWS: Final = (
    ("C128 prefill 8192", "bf16"),
    ("C128 prefill 65536", "bf16"),
    ("C128 prefill 65536", "fp32"),
    ("C128 decode 1 all", "fp32"),
    ("C128 decode 32 all", "fp32"),
    ("C128 decode 32 all", "bf16"),
    ("C128 decode 256 none", "fp32"),
    ("C4 prefill 8192", "bf16"),
    ("C4 prefill 65536", "bf16"),
    ("C4 decode 256 none", "fp32"),
    ("C4 decode 256 none", "bf16"),
    ("C4 decode 256 all", "fp32"),
)
RUNS: Final = 3
"""The last one counts."""
METRICS: Final = {
    "us": "gpu__time_duration.sum",
    "dram_percent": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "l2_percent": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "l1_percent": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "warps_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "active_percent": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "dram_bytes_read": "dram__bytes_read.sum",
    "dram_bytes_written": "dram__bytes_write.sum",
    "waves": "launch__waves_per_multiprocessor",
    "registers": "launch__registers_per_thread",
}
STALLS: Final = (
    *("barrier", "branch_resolving", "dispatch_stall", "gmma", "lg_throttle", "long_scoreboard"),
    *("math_pipe_throttle", "membar", "mio_throttle", "no_instruction", "not_selected", "short_scoreboard"),
    *("sleeping", "tex_throttle", "wait"),
)


def stall_metric(reason: str) -> str:
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


def launches(report: str) -> list[dict[str, float]]:
    """ncu's raw CSV → each launch's metrics by their short names, in base units; stalls that were counted, largest
    first. Lines before the header are the program's own."""
    lines = report[report.index('"ID"') :].splitlines()
    header, _, *rows = csv.reader(io.StringIO("\n".join(lines)))
    found = []
    for row in rows:
        values = {name: value.replace(",", "") for name, value in zip(header, row, strict=True)}
        launch: dict[str, Any] = {short: float(values[name]) for short, name in METRICS.items() if values.get(name)}
        launch["us"] /= 1e3  # a base unit is a nanosecond
        stalls = {reason: float(values.get(stall_metric(reason)) or 0) for reason in STALLS}
        by_size = sorted(stalls.items(), key=lambda item: -item[1])
        found.append(launch | {"stalls": {reason: round(cycles, 2) for reason, cycles in by_size if cycles >= 0.05}})
    return found


def profiled(library: pathlib.Path | None) -> list[dict[str, Any]]:
    metrics = ",".join([*METRICS.values(), *map(stall_metric, STALLS)])
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--csv", "--page", "raw"]
    command += ["--print-units", "base", "--kernel-name", "regex:^kernel_cutlass", "--metrics", metrics]
    command += [sys.executable, "-m", "tests.gpu.bound", "--run"]
    command += [f"--library={library}"] if library else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or '"ID"' not in done.stdout:
        raise SystemExit(f"ncu ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    found = launches(done.stdout)
    assert len(found) == RUNS * len(ROWS), f"{len(found)} launches of {RUNS * len(ROWS)}"
    return found[RUNS - 1 :: RUNS]


def run(library: pathlib.Path | None) -> None:
    """The program that ncu watches."""
    import torch

    from kvfold_kernels.compress import cute
    from tests.bench.bench_gpu import Ours, cases

    if library:
        cute.LIBRARIES = library
    by_name = {name: (ratio, starts, lengths) for name, ratio, starts, lengths, _ in cases()}
    for name, given in ROWS:
        case = Ours(*by_name[name], given)
        torch.cuda.synchronize()
        for _ in range(RUNS):
            assert case.run() == 1
            torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="be the program that is watched")
    parser.add_argument("--library", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.library)
        return
    rows = {f"{name} {given}": row for (name, given), row in zip(ROWS, profiled(arguments.library), strict=True)}
    for name, row in rows.items():
        print(f"{name:24}", row, flush=True)
    if arguments.out:
        from tests.bench.measure import save

        save(arguments.out, rows)


if __name__ == "__main__":
    main()
