"""Libraries of compiled kernels, one an architecture: what one must have been built from, and opening one that fits.

Beside `kvfold_cute_<architecture>.so` lies a manifest: the library's identity (`wanted`), its digest, and what each
kernel takes. Nothing of a library runs before both were compared: a damaged one could end the process.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import platform
from pathlib import Path
from typing import Any, Final

CUTLASS_DSL: Final = "4.8.1"
"""The compiler's version. Another one may allocate registers differently or emit another order of loads."""
CUDA_RUNTIME: Final = "libcudart.so.13"
PACKAGE: Final = Path(__file__).parents[2]
SOURCES: Final = (
    "geometry",
    "plan",
    *(
        f"compress/cute/{stem}"
        for stem in (
            *("append", "compile", "encode", "flags", "layer", "ops"),
            *("overlap", "step", "stream", "tile", "tiles", "variants"),
        )
    ),
)
"""Modules that decide what a kernel is, or with which arguments it is called."""


def path_of(folder: Path, architecture: str) -> Path:
    return folder / f"kvfold_cute_{architecture}.so"


def manifest_of(library: Path) -> Path:
    return library.with_suffix(".json")


@functools.cache
def sources_digest() -> str:
    digest = hashlib.sha256()
    for name in SOURCES:
        text = (PACKAGE / f"{name}.py").read_bytes()
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def wanted(architecture: str) -> dict[str, str]:
    """What identifies a library that these sources can use here."""
    import tvm_ffi

    return {
        "architecture": architecture,
        "machine": platform.machine(),
        "cutlass_dsl": CUTLASS_DSL,
        "tvm_ffi": ".".join(tvm_ffi.__version__.split(".")[:2]),
        "sources": sources_digest(),
    }


def misfit(library: Path, architecture: str) -> str | None:
    """Why the library cannot be used here, in a sentence's part, or None."""
    if not library.is_file():
        return f"there is no {library.name}"
    try:
        manifest = json.loads(manifest_of(library).read_text())
        found, digest = manifest["identity"], manifest["sha256"]
        differ = [(name, found.get(name), value) for name, value in wanted(architecture).items()]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        return f"{manifest_of(library).name} cannot be read ({type(error).__name__})"
    for name, built, here in differ:
        if built != here:
            return f"{library.name} was built for {name} {str(built)[:12]}, and here it is {here[:12]}"
    if hashlib.sha256(library.read_bytes()).hexdigest() != digest:
        return f"{library.name} is damaged: its bytes are not those that were built"
    return None


def read_manifest(library: Path) -> dict[str, Any]:
    return json.loads(manifest_of(library).read_text())


@functools.cache
def cuda_runtime() -> ctypes.CDLL:
    """The CUDA runtime: torch's own, if torch brings one of this version, else the system's. OSError: there is none."""
    return ctypes.CDLL(CUDA_RUNTIME, mode=ctypes.RTLD_GLOBAL)


def open_library(library: Path) -> Any:
    """The kernels by name. Raises OSError or RuntimeError where something that the library needs is missing."""
    import tvm_ffi

    cuda_runtime()
    return tvm_ffi.load_module(str(library))
