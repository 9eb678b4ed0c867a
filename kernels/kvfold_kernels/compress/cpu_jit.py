"""What the CPU kernels are made of: compiling and caching, memory at an address, named fused multiply-adds, bits.

Kernels take addresses, not arrays: one compiled version serves every dtype, and a call costs a microsecond. Their inner
loops run over adjacent columns and call nothing that stays a call, so that LLVM makes vectors of them. No fast-math:
nothing is reordered or contracted that is not written so.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numba
import numba.extending
import numpy as np
from llvmlite import ir
from numba import types

F32, U32 = np.float32, np.uint32
ZERO, ONE = F32(0), F32(1)
SIGN, MAGNITUDE, MANTISSA = U32(0x80000000), U32(0x7FFFFFFF), U32(0x7FFFFF)
BIAS = 127
MANTISSA_BITS = 23

SPEC = np.dtype(
    [(name, np.int64) for name in ("ape_at", "norm_weight_at", "cos_sin_at")]
    + [(name, np.int64) for name in ("ratio", "head_dim", "rope_dim", "halves", "groups", "ring_rows")]
    + [(name, np.int64) for name in ("page_entries", "value_bytes", "scale_bytes", "scale_offset")]
    + [(name, np.int64) for name in ("format", "hadamard", "lowest_exponent")]
    + [(name, np.float32) for name in ("amax_floor", "inverse_scale", "inverse_dim", "rms_eps")]
)
"""What the kernels know of a compressor; `*_at` are addresses."""

_OPTIONS = {"nogil": True, "error_model": "numpy"}


def jit(function: Any) -> Any:
    """A part of a kernel: not callable from Python, which saves a quarter of the compile time."""
    return numba.njit(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)(function)


def kernel(function: Any) -> Any:
    """A kernel that Python calls: kept on disk, unless no cache directory can be written."""
    try:
        return numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError:
        return numba.njit(**_OPTIONS)(function)


def intrinsic(function: Any) -> Any:
    """numba.extending.intrinsic, for type checkers a call of the kernel's arguments."""
    return numba.extending.intrinsic(function)


def source_digest() -> str:
    """Of every file that compiled code depends on. numba's cache watches only the file of the kernel itself, and what
    the kernel closes over: a kernel that names this digest is compiled again when any of the files changes."""
    here = Path(__file__).parent
    files = sorted([*here.glob("cpu*.py"), here.parent / "geometry.py", here.parent / "plan.py"])
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


@intrinsic
def fma(typing, a, b, c):
    """fp32 a·b + c, rounded once."""

    def codegen(context, builder, signature, arguments):
        return builder.fma(*arguments)

    return types.float32(types.float32, types.float32, types.float32), codegen


@intrinsic
def to_bits(typing, x):
    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.uint32(types.float32), codegen


@intrinsic
def from_bits(typing, bits):
    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.uint32), codegen


@intrinsic
def pointer(typing, address, dtype):
    def codegen(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(dtype.dtype)(types.int64, dtype), codegen


@intrinsic
def prefer_wide_vectors(typing):
    """LLVM takes 256 bits on machines with AVX-512 unless told; applies to the function that calls this."""

    def codegen(context, builder, signature, arguments):
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')  # llvmlite's add knows no such attribute
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _prefetch_line(typing, address):
    def codegen(context, builder, signature, arguments):
        byte_pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte_pointer, i32, i32, i32])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [byte_pointer], kind)
        read, into_level_2, data = i32(0), i32(2), i32(1)
        builder.call(prefetch, [builder.inttoptr(arguments[0], byte_pointer), read, into_level_2, data])
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@jit
def prefetch(address, num_bytes):
    """Ask for bytes that will be read soon; harmless wherever the address points."""
    for offset in range(0, num_bytes, 64):
        _prefetch_line(address + offset)


@jit
def f32_at(address, size):
    return numba.carray(pointer(address, np.float32), (size,))


@jit
def u32_at(address, size):
    return numba.carray(pointer(address, np.uint32), (size,))


@jit
def u16_at(address, size):
    return numba.carray(pointer(address, np.uint16), (size,))


@jit
def u8_at(address, size):
    return numba.carray(pointer(address, np.uint8), (size,))


@jit
def plan_at(address, num_fields, stride):
    return numba.carray(pointer(address, np.int32), (num_fields, stride))


@jit
def spec_at(address):
    return numba.carray(pointer(address, SPEC), (1,))[0]


@jit
def aligned(size):
    """fp32 work space on a cache line's boundary."""
    work = np.empty(size + 16, np.float32)
    first = (-work.ctypes.data % 64) // 4
    return work[first : first + size]


@jit
def widen(bf16):
    return from_bits(U32(U32(bf16) << U32(16)))


@jit
def power_of_two(exponent):
    """2^exponent, −126 ≤ exponent ≤ 127."""
    return from_bits(U32((exponent + BIAS) << MANTISSA_BITS))
