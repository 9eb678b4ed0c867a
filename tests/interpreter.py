"""Triton's interpreter with right arithmetic: import this, with TRITON_INTERPRET=1 set, before any kernel is defined.

As shipped (3.6 to 3.9) it truncates fp32 → bf16, casts fp32 → e4m3 wrongly on carry, overflow and NaN, rounds a fused
multiply-add twice, and takes numpy's exp of fp32. Here casts are torch's, and fma and exp are the reference's.
"""
# ruff: noqa: E402

from __future__ import annotations

import os

assert os.environ.get("TRITON_INTERPRET") == "1", "the interpreter is chosen when a kernel is defined"

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from kvfold_kernels.compress import reference

_TORCH = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}


def _convert_float(data, input_dtype, output_dtype, rounding_mode):
    del rounding_mode  # all casts of ours are to nearest even
    source = torch.from_numpy(np.array(data, order="C").reshape(-1)).view(_TORCH[input_dtype])
    target = source.to(_TORCH[output_dtype])
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[target.element_size()]
    unsigned = f"uint{output_dtype.primitive_bitwidth}"
    return target.view(bits).numpy().view(unsigned).reshape(data.shape)


def _fma(self, x, y, z):
    return interpreter.TensorHandle(reference.fma(x.data, y.data, z.data), z.dtype.scalar)


def _exp(self, x):
    return interpreter.TensorHandle(reference.exp(x.data), x.dtype.scalar)


interpreter._convert_float = _convert_float
interpreter.InterpreterBuilder.create_fma = _fma
interpreter.InterpreterBuilder.create_exp = _exp
