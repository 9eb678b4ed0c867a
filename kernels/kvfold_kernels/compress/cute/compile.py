"""Compile a variant, with or without a GPU. Needs cutlass; `CUTE_DSL_ARCH` must be set before it is first imported."""

from __future__ import annotations

import cutlass
from cutlass import Float32, Int32, Int64, Uint8, cute
from cutlass.cute.runtime import make_fake_compact_tensor, make_fake_stream, make_fake_tensor

from kvfold_kernels import plan as p
from kvfold_kernels.compress.cute.variants import Variant, compile_time
from kvfold_kernels.geometry import KINDS, Geometry

_DTYPES = {"bf16": cutlass.BFloat16, "fp32": Float32}
_VECTOR = 16


def _compact(dtype, *shape, align: int = _VECTOR):
    order = tuple(reversed(range(len(shape))))
    return make_fake_compact_tensor(dtype, shape, stride_order=order, assumed_align=align)


def _tensors(variant: Variant, geometry: Geometry) -> list:
    many = cute.sym_int
    return [
        _compact(Int32, p.WINDOW_FIELDS, many(), align=4),
        _compact(Int32, p.APPEND_FIELDS, many(), align=4),
        _compact(Int32, 2, align=4),
        _compact(_DTYPES[variant.input], many(), geometry.row_width),
        _compact(_DTYPES[variant.ring], many(), many(), geometry.row_width),
        make_fake_tensor(Uint8, (many(), many()), (cute.sym_int64(divisibility=4), 1), assumed_align=_VECTOR),
        _compact(Float32, geometry.ratio, geometry.half_width),
        _compact(Float32, geometry.head_dim),
        _compact(Float32, many(), geometry.rope_dim),
    ]


def fake_operands(variant: Variant) -> list:
    """Shapes and dtypes of the call, without memory: the argument contract that the compiled kernel checks."""
    geometry, stream = variant.geometry, make_fake_stream(use_tvm_ffi_env_stream=True)
    counts, numbers = [Int32(1)] * 2, [Int32(1), Float32(1e-6), Float32(1e-4), Int32(0), Float32(1.0)]
    if variant.shape == "flags":
        rows = _compact(_DTYPES[variant.input], cute.sym_int(), geometry.row_width)
        return [rows, Int32(1), _compact(Int64, 1, align=8), stream]
    if variant.shape == "layer":
        indexer = Geometry("indexer", KINDS["indexer"].ratio, KINDS["indexer"].head_dim)
        sides = (_tensors(variant, geometry), _tensors(variant, indexer))
        return [operand for side in sides for operand in (*side, *counts, *numbers)] + [stream]
    return [*_tensors(variant, geometry), *counts, Int32(1), *numbers, stream]


def compile_variant(variant: Variant, options: str = ""):
    return cute.compile(compile_time(variant), *fake_operands(variant), options=f"--enable-tvm-ffi {options}")
