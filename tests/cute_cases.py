"""The built `cute` libraries without a GPU: a stand-in for the CUDA runtime, and tensors that say they lie on a GPU."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch

from kvfold_kernels import plan as p
from kvfold_kernels.compress import cute
from kvfold_kernels.compress.cute import library
from kvfold_kernels.compress.cute.variants import Variant
from kvfold_kernels.geometry import KINDS, Geometry

KERNEL_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_CUDA = 2
"""kDLCUDA"""
_DEVICE_AT = 8
"""Byte of the device's type in a DLManagedTensor: behind the data pointer."""


def built(architecture: str) -> Path:
    """The library of these sources."""
    path = library.path_of(cute.LIBRARIES, architecture)
    reason = library.misfit(path, architecture)
    assert reason is None, f"{reason}; run `make kernels`"
    return path


class Runtime:
    """A CUDA runtime that counts and launches nothing."""

    def __init__(self, folder: Path) -> None:
        out, source = folder / library.CUDA_RUNTIME, Path(__file__).with_name("fake_cuda_runtime.c")
        options = ["-shared", "-fPIC", f"-Wl,-soname,{library.CUDA_RUNTIME}"]
        subprocess.run(["g++", "-x", "c", *options, "-o", str(out), str(source)], check=True)
        self.loaded = ctypes.CDLL(str(out), mode=ctypes.RTLD_GLOBAL)

    def _numbers(self, name: str, count: int) -> Any:
        return (ctypes.c_uint * count).in_dll(self.loaded, name)

    @property
    def num_loaded(self) -> int:
        return self._numbers("fake_counts", 2)[0]

    @property
    def num_launched(self) -> int:
        return self._numbers("fake_counts", 2)[1]

    @property
    def last(self) -> dict[str, int]:
        names = ("blocks", "threads", "shared_bytes", "cluster", "early")
        return dict(zip(names, self._numbers("fake_launch", 5), strict=True))

    @property
    def asked(self) -> tuple[int, ...]:
        """Blocks, threads, shared bytes and cluster of the last question how many clusters fit."""
        return tuple(self._numbers("fake_asked", 4))

    def answer(self, clusters: int, status: int = 0) -> None:
        ctypes.c_int.in_dll(self.loaded, "fake_clusters").value = clusters
        ctypes.c_int.in_dll(self.loaded, "fake_status").value = status


class _SaysGpu:
    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0

    def __dlpack__(self, **_: object) -> Any:
        capsule = self.tensor.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        ctypes.c_int.from_address(pointer(capsule, b"dltensor") + _DEVICE_AT).value = _CUDA
        return capsule


def on_gpu(tensor: torch.Tensor) -> Any:
    """The tensor as a kernel sees it that is told it lies on device 0."""
    import tvm_ffi

    return tvm_ffi.from_dlpack(_SaysGpu(tensor))


@functools.cache
def _runtime() -> Runtime:
    """One for the process: the first that is loaded is the one that every library finds."""
    with tempfile.TemporaryDirectory() as folder:
        return Runtime(Path(folder))


@pytest.fixture(scope="session")
def runtime() -> Runtime:
    if torch.version.cuda is not None:
        pytest.skip("torch brings the CUDA runtime here: tests/gpu launches the kernels for real")
    return _runtime()


def operands(variant: Variant, windows: int = 20, appends: int = 5, clusters: int = 15) -> list[Any]:
    """What a launcher of the variant takes: CPU tensors and numbers."""
    if variant.shape == "flags":
        rows = torch.zeros(300, variant.geometry.row_width, dtype=KERNEL_DTYPES[variant.input])
        return [rows, 300, torch.zeros(1, dtype=torch.int64)]
    counts, numbers = (windows, appends), (2, 1e-6, 1e-4, 0, 1.0)
    if variant.shape == "layer":
        indexer = Geometry("indexer", KINDS["indexer"].ratio, KINDS["indexer"].head_dim)
        sides = (_tensors(variant, variant.geometry), _tensors(variant, indexer))
        return [operand for side in sides for operand in (*side, *counts, *numbers)]
    return [*_tensors(variant, variant.geometry), *counts, clusters, *numbers]


def _tensors(variant: Variant, geometry: Geometry) -> list[torch.Tensor]:
    return [
        torch.zeros(p.WINDOW_FIELDS, 20, dtype=torch.int32),
        torch.zeros(p.APPEND_FIELDS, 5, dtype=torch.int32),
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(300, geometry.row_width, dtype=KERNEL_DTYPES[variant.input]),
        torch.zeros(3, geometry.ring_rows, geometry.row_width, dtype=KERNEL_DTYPES[variant.ring]),
        torch.zeros(4, 1168, dtype=torch.uint8),
        torch.zeros(geometry.ratio, geometry.half_width),
        torch.zeros(geometry.head_dim),
        torch.zeros(100, geometry.rope_dim),
    ]
