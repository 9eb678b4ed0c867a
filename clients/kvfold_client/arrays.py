"""Arrays ↔ wire tensors. bf16 is carried by numpy as uint16; torch is used where it is loaded already, never imported.

numpy float32, torch.float32                            fp32
numpy uint16, ml_dtypes.bfloat16, torch.bfloat16        bf16
numpy uint8, int32, int64                               themselves
"""

import sys
from typing import Any

import numpy as np

from .wire import Tensor, tensor_map

_WIRE_OF_NUMPY = {
    "float32": ("fp32", "<f4"),
    "uint16": ("bf16", "<u2"),
    "bfloat16": ("bf16", "<u2"),
    "uint8": ("uint8", "u1"),
    "int32": ("int32", "<i4"),
    "int64": ("int64", "<i8"),
}
_NUMPY_OF_WIRE = {"fp32": "<f4", "bf16": "<u2", "fp8_e4m3": "u1", "uint8": "u1", "int32": "<i4", "int64": "<i8"}


def to_wire(value: Any, **extra: Any) -> dict[str, Any]:
    """Array → tensor map over the array's own memory, copied only where it is not contiguous or not little endian.

    Raises TypeError for anything but an array of a dtype above, ValueError for a tensor that is not on the CPU.
    """
    torch = sys.modules.get("torch")
    array = _from_torch(torch, value) if torch is not None and isinstance(value, torch.Tensor) else value
    if not isinstance(array, np.ndarray):
        raise TypeError(f"a tensor must be a numpy array or a torch tensor, not {type(value).__name__}")
    if array.dtype.name not in _WIRE_OF_NUMPY:
        raise TypeError(f"no wire dtype for {array.dtype.name}; use float32, bfloat16 or its bits as uint16")
    dtype, stored = _WIRE_OF_NUMPY[array.dtype.name]
    array = np.ascontiguousarray(array).reshape(array.shape)
    array = array.view(stored) if array.dtype.name == "bfloat16" else array.astype(stored, copy=False)
    return tensor_map(dtype, array.shape, array.data, **extra)


def from_wire(tensor: Tensor) -> np.ndarray:
    """Tensor → read-only array over its bytes; bf16 as uint16, fp8_e4m3 as uint8."""
    array = np.frombuffer(tensor.data, _NUMPY_OF_WIRE[tensor.dtype]).reshape(tensor.shape)
    array.flags.writeable = False
    return array


def _from_torch(torch: Any, value: Any) -> np.ndarray:
    if value.device.type != "cpu":
        raise ValueError(f"a tensor must be on the CPU, not on {value.device}; call .cpu() first")
    if value.dtype not in (torch.bfloat16, torch.float32):
        raise TypeError(f"no wire dtype for {value.dtype}; use torch.float32 or torch.bfloat16")
    value = value.detach().contiguous()
    return value.view(torch.int16).numpy().view(np.uint16) if value.dtype == torch.bfloat16 else value.numpy()
