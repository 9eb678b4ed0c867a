"""What a compiled variant takes, read from its machine code. Needs cutlass, and triton for cuobjdump."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import triton

from kvfold_kernels.compress.cute.variants import Variant, compile_time

KEEP = "--keep-ptx --keep-cubin"
"""Options of `compile_variant` that leave what is measured here, in the working directory too."""


def measure(variant: Variant, compiled: Any, folder: Path) -> dict[str, int]:
    """registers of a thread; bytes of a block's shared memory; bytes of a thread's stack, which are spills here;
    fp32 operations without a stated rounding, free to be contracted; waits that stand before the early start."""
    cubin = folder / f"{variant.name}.cubin"
    cubin.write_bytes(compiled.__cubin__)
    report = subprocess.run([_cuobjdump(), "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    found = {key: int(number) for key, number in re.findall(r"(REG|STACK|SHARED):(\d+)", report)}
    ptx: str = compiled.__ptx__
    first = {name: ptx.index(f"griddepcontrol.{name}") for name in ("launch_dependents", "wait")}
    return {
        "registers": found["REG"],
        "shared_bytes": found["SHARED"] + getattr(compile_time(variant), "dynamic_shared_bytes", 0),
        "stack_bytes": found["STACK"],
        "unrounded": len(re.findall(r"^\s*(?:add|sub|mul|fma)\.f32", ptx, re.M)),
        "late_starts": int(first["wait"] < first["launch_dependents"]),
    }


def assembler_version(compiled: Any) -> str:
    """Of the compiler's own ptxas."""
    return re.search(r"Cuda compilation tools, release [\d.]+, V([\d.]+)", compiled.__ptx__)[1]


def _cuobjdump() -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
