"""Build the `cute` backend's kernels ahead of time, without a GPU: one shared library an architecture.

    CUTE_DSL_ARCH=sm_90a python -m kvfold_kernels.compress.cute_build OUT.so --runtime LIB.a --cudart LIB.so

--runtime  libcuda_dialect_runtime_static.a of the wheel nvidia-cutlass-dsl-libs-cu13
--cudart   libcudart.so.13
--only     variants to build; none: all

The library needs apache-tvm-ffi where it is loaded, and no compiler.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import subprocess
import tempfile

from kvfold_kernels.compress.cute.variants import ARCHITECTURES, all_variants

_SHIM = """
extern void TVMFFIErrorSetRaisedFromCStr(const char*, const char*);
extern const char* cudaGetErrorString(int);
void CuteDSLRT_TVMFFISetRaisedCudaError(int e) { TVMFFIErrorSetRaisedFromCStr("RuntimeError", cudaGetErrorString(e)); }
"""


def link(objects: list[pathlib.Path], out: pathlib.Path, runtime: pathlib.Path, cudart: pathlib.Path) -> None:
    import tvm_ffi

    shim = out.with_suffix(".shim.c")
    shim.write_text(_SHIM)
    library = pathlib.Path(tvm_ffi.__file__).parent / "lib"
    command = ["g++", "-shared", "-fPIC", "-o", str(out), *map(str, objects), "-x", "c", str(shim), "-x", "none"]
    subprocess.run([*command, str(runtime), str(cudart), f"-L{library}", "-ltvm_ffi"], check=True)
    shim.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME")
    parser.add_argument("--runtime", type=pathlib.Path, required=True)
    parser.add_argument("--cudart", type=pathlib.Path, required=True)
    args = parser.parse_args()
    if os.environ.get("CUTE_DSL_ARCH") not in ARCHITECTURES:
        parser.error(f"set CUTE_DSL_ARCH to one of {', '.join(ARCHITECTURES)}")
    from kvfold_kernels.compress.cute.compile import compile_variant

    with tempfile.TemporaryDirectory() as folder:
        objects = []
        for variant in all_variants():
            if not args.only or variant.name in args.only:
                objects.append(pathlib.Path(folder) / f"{variant.name}.o")
                compile_variant(variant).export_to_c(str(objects[-1]), function_name=variant.name)
        link(objects, args.out, args.runtime, args.cudart)
    print(f"{args.out}: {len(objects)} kernels, {args.out.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
