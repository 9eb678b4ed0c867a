"""Where the kernels come from: the library compiled ahead, if it fits, else the compiler, and the reason for it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvfold_kernels.compress.cute import library
from kvfold_kernels.compress.cute.variants import Variant


@dataclass(frozen=True)
class Kernels:
    """`get(variant)` is a launcher; `origin` says in a line where it comes from."""

    get: Callable[[Variant], Any]
    origin: str


class NoKernelsError(RuntimeError):
    """Neither a library that fits nor a compiler: the message says what is missing and what to do."""


def find(folder: Path, architecture: str) -> Kernels:
    """Raises NoKernelsError."""
    path = library.path_of(folder, architecture)
    miss = library.misfit(path, architecture)
    if miss is None:
        try:
            opened = library.open_library(path)
            return Kernels(lambda variant: opened[variant.name], f"kernels compiled ahead, from {path}")
        except (OSError, RuntimeError) as error:
            miss = f"{path.name} cannot be opened: {error}"
    if importlib.util.find_spec("cutlass") is None:
        raise NoKernelsError(
            f"has no kernels for {architecture}: {miss}, and the compiler is not installed; "
            f"run `make kernels`, or pip install 'nvidia-cutlass-dsl[cu13]=={library.CUTLASS_DSL}'"
        )
    return Kernels(_compiler(architecture), f"kernels compiled now, on first use, because {miss}")


def _compiler(architecture: str) -> Callable[[Variant], Any]:
    os.environ["CUTE_DSL_ARCH"] = architecture  # read by cutlass when it is first imported

    def compile_now(variant: Variant) -> Any:
        from kvfold_kernels.compress.cute.compile import compile_variant

        return compile_variant(variant)

    return compile_now
