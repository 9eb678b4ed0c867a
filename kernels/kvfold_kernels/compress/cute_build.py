"""Compile the `cute` backend's kernels ahead of time, without a GPU: one shared library an architecture.

    python -m kvfold_kernels.compress.cute_build [--architectures sm_90a …] [--out FOLDER] [--jobs N]
    python -m kvfold_kernels.compress.cute_build --table > tests/gpu/resources_cute.json

A library that was built from these sources, by this compiler, for this machine, stays as it is. Needs the compiler,
nvidia-cutlass-dsl[cu13], and g++; what loads the library needs apache-tvm-ffi and a CUDA 13 runtime.

--table   print what the built kernels take, for the test that holds new ones against it
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from kvfold_kernels.compress import cute
from kvfold_kernels.compress.cute import library
from kvfold_kernels.compress.cute.variants import ARCHITECTURES, all_variants

_SHIM = """
extern void TVMFFIErrorSetRaisedFromCStr(const char*, const char*);
extern const char* cudaGetErrorString(int);
void CuteDSLRT_TVMFFISetRaisedCudaError(int e) { TVMFFIErrorSetRaisedFromCStr("RuntimeError", cudaGetErrorString(e)); }
"""
_HOST_CPU = {"x86_64": "x86-64", "aarch64": "generic"}
"""The compiler takes the machine that it runs on for the host code's, AVX-512 and all; the library is for any."""

Built = tuple[dict[str, dict[str, int]], str]
"""Resources by variant, version of ptxas."""


def compile_objects(architecture: str, names: set[str], folder: Path) -> Built:
    """Runs in a process of its own: the architecture is read once, and the compiler leaves files where it runs."""
    os.environ["CUTE_DSL_ARCH"] = architecture
    os.chdir(folder)
    from kvfold_kernels.compress.cute import resources
    from kvfold_kernels.compress.cute.compile import compile_variant

    taken, version = {}, ""
    for variant in all_variants():
        if variant.name in names:
            compiled = compile_variant(variant, resources.KEEP)
            taken[variant.name] = resources.measure(variant, compiled, folder)
            version = resources.assembler_version(compiled)
            _for_any_host(compiled.ir_module)
            target = str(folder / f"{variant.name}.o")
            compiled.export_to_c(target, function_name=variant.name, export_only_tvm_ffi_symbols=True)
    return taken, version


def _for_any_host(module: Any) -> None:
    from cutlass._mlir import ir

    def narrow(operation: Any) -> Any:
        if operation.name == "llvm.func" and operation.regions[0].blocks:
            kept = (
                [str(entry) for entry in operation.attributes["passthrough"]]
                if "passthrough" in operation.attributes
                else []
            )
            chosen = [f'["target-cpu", "{_HOST_CPU[platform.machine()]}"]', '["target-features", ""]']
            operation.attributes["passthrough"] = ir.Attribute.parse(f"[{', '.join(kept + chosen)}]")
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(narrow)


def link(folder: Path, out: Path) -> None:
    """The runtime is named and not linked, so none need be here; one of another major version is refused at load."""
    import nvidia_cutlass_dsl
    import tvm_ffi

    shim, runtime = folder / "shim.c", folder / library.CUDA_RUNTIME
    shim.write_text(_SHIM)
    empty = ["-x", "c", os.devnull, f"-Wl,-soname,{library.CUDA_RUNTIME}"]
    subprocess.run(["g++", "-shared", "-o", str(runtime), *empty], check=True)
    dialect = Path(nvidia_cutlass_dsl.__path__[0]) / "cu13" / "lib" / "libcuda_dialect_runtime_static.a"
    command = ["g++", "-shared", "-fPIC", "-o", str(out), *map(str, sorted(folder.glob("*.o"))), "-x", "c", str(shim)]
    command += ["-x", "none", str(dialect), "-Wl,--exclude-libs,ALL", "-Wl,--no-as-needed", str(runtime)]
    command += [f"-L{Path(tvm_ffi.__file__).parent / 'lib'}", "-ltvm_ffi"]
    subprocess.run(command, check=True)


def build(architectures: list[str], out: Path, jobs: int) -> None:
    """Every library anew, variants spread over `jobs` processes."""
    start, names = time.perf_counter(), [variant.name for variant in all_variants()]
    shards = max(1, jobs // len(architectures))
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(jobs, spawn, max_tasks_per_child=1) as processes,
    ):
        parts = {}
        for architecture in architectures:
            target = Path(folder) / architecture
            target.mkdir()
            parts[architecture] = [
                processes.submit(compile_objects, architecture, set(names[i::shards]), target) for i in range(shards)
            ]
        for architecture, futures in parts.items():
            done = [future.result() for future in futures]
            path = library.path_of(out, architecture)
            _publish(Path(folder) / architecture, path, architecture, done)
            seconds = time.perf_counter() - start
            print(f"{path}: {len(names)} kernels, {path.stat().st_size / 2**20:.1f} MiB, {seconds:.0f} s", flush=True)


def _publish(folder: Path, path: Path, architecture: str, parts: list[Built]) -> None:
    """Library, then manifest, each whole or not at all; in between they do not fit each other, which is a miss."""
    path.parent.mkdir(parents=True, exist_ok=True)
    linked = path.with_suffix(".new")
    link(folder, linked)
    taken = {name: row for part, _ in parts for name, row in part.items()}
    manifest = {
        "identity": library.wanted(architecture),
        "sha256": hashlib.sha256(linked.read_bytes()).hexdigest(),
        "ptxas": parts[0][1],
        "kernels": {variant.name: taken[variant.name] for variant in all_variants()},
    }
    linked.replace(path)
    linked.write_text(json.dumps(manifest, indent=1) + "\n")
    linked.replace(library.manifest_of(path))


def table(out: Path) -> str:
    """What the built kernels take, by architecture, and what compiled them, as JSON with a line a kernel."""
    manifests = {name: library.read_manifest(library.path_of(out, name)) for name in ARCHITECTURES}
    first = manifests[ARCHITECTURES[0]]
    versions = {"cutlass_dsl": first["identity"]["cutlass_dsl"], "ptxas": first["ptxas"]}
    text = json.dumps(versions | {name: manifest["kernels"] for name, manifest in manifests.items()}, indent=1)
    return re.sub(r"\{[^{}]*\}", lambda row: " ".join(row[0].split()), text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, default=list(ARCHITECTURES))
    parser.add_argument("--out", type=Path, default=cute.LIBRARIES)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        print(table(args.out))
        return
    stale = []
    for name in args.architectures:
        path = library.path_of(args.out, name)
        reason = library.misfit(path, name)
        print(f"{path}: {f'to be built, {reason}' if reason else 'fits these sources, nothing to do'}", flush=True)
        stale += [name] if reason else []
    if stale:
        _require_compiler()
        build(stale, args.out, args.jobs)


def _require_compiler() -> None:
    found = None
    if importlib.util.find_spec("cutlass"):
        found = importlib.metadata.version("nvidia-cutlass-dsl")
    if found != library.CUTLASS_DSL:
        wanted = f"nvidia-cutlass-dsl[cu13]=={library.CUTLASS_DSL}"
        sys.exit(f"building needs {wanted}, and here is {found or 'none'}: pip install '{wanted}'")


if __name__ == "__main__":
    main()
