"""The `cute` backend without a GPU: every variant compiles for both architectures, and no register spills."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvfold_kernels.compress.cute.variants import ARCHITECTURES, BOXES_WINDOWS, STREAM_WINDOWS, all_variants, choose

COMPILE = """
import re, sys
from kvfold_kernels.compress.cute.compile import compile_variant
from kvfold_kernels.compress.cute.variants import all_variants
for variant in all_variants():
    kernel = compile_variant(variant, "--keep-ptx --keep-cubin")
    ptx = kernel.__ptx__
    ordered = ptx.index("griddepcontrol.launch_dependents") < ptx.index("griddepcontrol.wait")
    loose = re.findall(r"^\\s*(?:add|sub|mul|fma)\\.f32", ptx, re.M)  # without a rounding, so free to be contracted
    open(f"{sys.argv[1]}/{variant.name}.cubin", "wb").write(kernel.__cubin__)
    print(variant.name, ordered, len(loose))
"""
REGISTERS = 208
"""Most registers a thread of any variant may take: blocks of 256 threads, one on a multiprocessor at the least."""


def test_the_windows_of_a_step_choose_the_kernel():
    def shape(kind, windows, given="bf16", ring="bf16"):
        return choose(kind, "fp8_ds_mla", "vllm", given, ring, windows).shape

    assert shape("hca", 0) == shape("csa", 0) == "append"
    assert shape("csa", 1) == shape("csa", 10**5) == "overlap"
    assert [shape("hca", n) for n in (1, BOXES_WINDOWS, STREAM_WINDOWS)] == ["tiles", "boxes", "stream"]
    assert shape("hca", 10**5, "bf16", "fp32") == "tiles"


def test_every_variant_has_a_name_of_its_own():
    names = [variant.name for variant in all_variants()]
    assert len(names) == len(set(names))
    assert all(re.fullmatch(r"[a-z0-9_]+", name) for name in names)


def environment(arch: str) -> dict[str, str]:
    return {**os.environ, "CUTE_DSL_ARCH": arch, "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_variant_compiles_without_spills(arch: str, tmp_path: Path):
    pytest.importorskip("cutlass", reason="the CuTe DSL is not installed")
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE, str(tmp_path)],
        env=environment(arch),
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    lines = [line.split() for line in run.stdout.splitlines()]
    assert [line[0] for line in lines] == [variant.name for variant in all_variants()]
    assert all(ordered == "True" for _, ordered, _ in lines), "a kernel waits before it lets the next one start"
    assert all(loose == "0" for _, _, loose in lines), "an operation without a stated rounding"
    triton = pytest.importorskip("triton", reason="cuobjdump comes with triton")
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    for cubin in tmp_path.glob("*.cubin"):
        usage = subprocess.run([str(tool), "-res-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
        registers, stack = (int(re.search(rf"{key}:(\d+)", usage).group(1)) for key in ("REG", "STACK"))
        assert stack == 0, f"{cubin.stem} spills"
        assert registers <= REGISTERS, cubin.stem
