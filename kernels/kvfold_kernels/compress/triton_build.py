"""Compile the `triton` backend's kernels ahead of time, without a device, and print what they take as JSON.

    python -m kvfold_kernels.compress.triton_build [TARGET …]

Per target and kernel: registers of a thread, bytes of shared memory of a program, spilled registers.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvfold_kernels import geometry as g
from kvfold_kernels.compress import triton as backend
from kvfold_kernels.compress import triton_kernels as kernels
from kvfold_kernels.compress import triton_tiling as tilings

TARGETS = {
    "cuda90": GPUTarget("cuda", 90, 32),
    "cuda100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}
_NUM_SMS = 132
_FEW, _SOME, _MANY = 8, 256, 1 << 20
"""Numbers of windows that `choose_tiling` answers differently."""

_POINTERS = {"bf16": "*bf16", "fp32": "*fp32"}
_ITEM_BYTES = g.INPUT_ITEM_BYTES
_ALIGNED = ("kv_score", "rings", "ape", "norm_weight", "cos_sin", "pages", "scratch", "page_stride")


@dataclass(frozen=True)
class Variant:
    """A kernel as one launch compiles it. `constants` are its compile-time arguments, None for an absent tensor."""

    name: str
    kernel: Any
    given: str
    ring: str
    constants: dict[str, Any]
    warps: int
    options: dict[str, Any]

    def signature(self) -> dict[str, str]:
        types = dict.fromkeys(("windows", "appends", "counts", "flag"), "*i32")
        types |= dict.fromkeys(("ape", "norm_weight", "cos_sin", "scratch"), "*fp32")
        types |= dict.fromkeys(("rms_eps", "inverse_scale"), "fp32")
        types |= {"kv_score": _POINTERS[self.given], "rings": _POINTERS[self.ring], "pages": "*u8"}
        names = self.kernel.arg_names
        return {name: "constexpr" if name in self.constants else types.get(name, "i32") for name in names}

    def compile(self, target: GPUTarget):
        names = self.kernel.arg_names
        aligned = [i for i, name in enumerate(names) if name in _ALIGNED and name not in self.constants]
        source = ASTSource(
            fn=self.kernel,
            signature=self.signature(),
            constexprs={(names.index(name),): value for name, value in self.constants.items()},
            attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
        )
        return triton.compile(source, target=target, options={"num_warps": self.warps, **self.options})


def variants(target: GPUTarget) -> Iterator[Variant]:
    """What serves: every kind in its packed format, every pairing of dtypes, few windows and many; and each kernel."""
    rocm, hopper = target.backend == "hip", target.arch == 90
    common = {"EARLY": not rocm, "counts": None}
    options = tilings.launch_options(rocm, not rocm)

    def tiling(geometry: g.Geometry, given: str, ring: str, num_windows: int) -> tilings.Tiling:
        sizes = _ITEM_BYTES[given], _ITEM_BYTES[ring]
        return tilings.choose_tiling(geometry, *sizes, num_windows, _NUM_SMS, target.warp_size)

    def close(name: str, kind: str, fmt: str, given: str, ring: str, tiling: tilings.Tiling, ratio=None, **more):
        geometry = g.Geometry(kind, ratio or g.KINDS[kind].ratio, g.KINDS[kind].head_dim)
        constants = tilings.pool_constants(geometry) | {
            **tilings.entry_constants(geometry, g.entry_format(fmt, geometry), "amax", more.get("profile", "vllm")),
            "HALVES": geometry.halves,
            "WINDOWS": tiling.windows,
            "COLUMNS": tiling.columns,
            **({"scratch": None} if tilings.num_groups(geometry) == 1 else {}),
        }
        limit = tilings.register_limit(hopper, tiling)
        constants |= common | {"STREAM": tiling.streams}
        if more.get("counts"):
            del constants["counts"]
        return Variant(name, kernels.close_windows, given, ring, constants, tiling.warps, options | limit)

    for kind, fmt in (("csa", "fp8_ds_mla"), ("indexer", "indexer_fp8")):
        geometry = g.Geometry(kind, g.KINDS[kind].ratio, g.KINDS[kind].head_dim)
        for given, ring in (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")):
            for size, number in (("few", _FEW), ("many", _MANY)):
                if kind == "csa" or (size == "many" and ring == "bf16"):
                    chosen = tiling(geometry, given, ring, number)
                    yield close(f"{kind} {given}/{ring} {size}", kind, fmt, given, ring, chosen)
    csa = g.Geometry("csa", 4, g.KINDS["csa"].head_dim)
    yield close("csa fp32/fp32 some", "csa", "fp8_ds_mla", "fp32", "fp32", tiling(csa, "fp32", "fp32", _SOME))
    yield close("csa counts", "csa", "fp8_ds_mla", "bf16", "bf16", tiling(csa, "bf16", "bf16", _FEW), counts=True)
    indexer = g.Geometry("indexer", 4, g.KINDS["indexer"].head_dim)
    chosen = tiling(indexer, "bf16", "bf16", _MANY)
    yield close("indexer mxfp4", "indexer", "indexer_mxfp4", "bf16", "bf16", chosen)
    yield close("indexer sglang", "indexer", "indexer_fp8", "bf16", "bf16", chosen, profile="sglang")
    hca = g.Geometry("hca", g.KINDS["hca"].ratio, g.KINDS["hca"].head_dim)
    for given, ring in (("fp32", "fp32"), ("bf16", "bf16"), ("bf16", "fp32")):
        for size, number in (("few", _FEW), ("many", _MANY)):
            chosen = tiling(hca, given, ring, number)
            constants = tilings.pool_constants(hca) | common | {"COLUMNS": chosen.columns, "STREAM": chosen.streams}
            limit = tilings.register_limit(hopper, chosen)
            name = f"hca pool {given}/{ring} {size}"
            yield Variant(name, kernels.pool_windows, given, ring, constants, chosen.warps, options | limit)
    single = replace(tiling(hca, "fp32", "fp32", _FEW), columns=64, warps=8 * 64 // (4 * target.warp_size), split=False)
    yield close("hca single fp32/fp32", "hca", "fp8_ds_mla", "fp32", "fp32", single)
    yield close("hca ratio 100", "hca", "fp8_ds_mla", "fp32", "fp32", replace(single, columns=512), ratio=100)
    constants = tilings.entry_constants(hca, g.entry_format("fp8_ds_mla", hca), "amax", "vllm")
    constants |= common | {"DIM": hca.head_dim}
    warps = tilings.num_warps(hca.head_dim, 4, target.warp_size)
    yield Variant("hca finish", kernels.finish_windows, "fp32", "fp32", constants, warps, options)
    for geometry in (hca, csa, indexer):
        warps = tilings.append_warps(geometry.row_width, target.warp_size)
        constants = common | {"WIDTH": geometry.row_width}
        yield Variant(f"append {geometry.kind}", kernels.append_rows, "fp32", "fp32", constants, warps, options)
    constants = {"WIDTH": hca.row_width, "BLOCK": backend.FLAG_BLOCK}
    yield Variant("flag", kernels.flag_values, "bf16", "bf16", constants, backend.FLAG_WARPS, {})


def resources(compiled, target: GPUTarget) -> dict[str, int]:
    return _amd_resources(compiled) if target.backend == "hip" else _nvidia_resources(compiled)


def _amd_resources(compiled) -> dict[str, int]:
    def number(key: str) -> int:
        return int(re.search(rf"\.{key}:\s+(\d+)", compiled.asm["amdgcn"])[1])

    spills = number("vgpr_spill_count") + number("sgpr_spill_count")
    return {"registers": number("vgpr_count"), "shared_bytes": compiled.metadata.shared, "spills": spills}


def _nvidia_resources(compiled) -> dict[str, int]:
    """A spill is a local load or store in the machine code; the resource report's LOCAL stays 0 with spills."""
    tools = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin", delete=False) as file:
        file.write(compiled.asm["cubin"])
    try:
        commands = [tools / "cuobjdump", "-res-usage", file.name], [tools / "nvdisasm", "-c", file.name]
        report, code = (subprocess.run(c, capture_output=True, text=True, check=True).stdout for c in commands)
    finally:
        os.unlink(file.name)
    registers, stack = (int(re.search(rf"{key}:(\d+)", report)[1]) for key in ("REG", "STACK"))
    spills = max(len(re.findall(r"\b(?:STL|LDL)\b", code)), stack)
    return {"registers": registers, "shared_bytes": compiled.metadata.shared, "spills": spills}


def main() -> None:
    table: dict[str, dict[str, dict[str, int]]] = {}
    for name in sys.argv[1:] or TARGETS:
        target = TARGETS[name]
        table[name] = {v.name: resources(v.compile(target), target) for v in variants(target)}
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
