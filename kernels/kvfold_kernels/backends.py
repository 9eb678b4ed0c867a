"""Which kernels can run here: a literal table, in the order `auto` prefers. A backend is imported when asked for."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kvfold_kernels.compress import CompressFn, CompressLayerFn, FindNonFiniteFn, FlagNonFiniteFn


@dataclass(frozen=True, slots=True)
class DeviceFlags:
    """How a device says that a value is not finite: `raise_for` lowers a flag of `dtype` from `no_flag`."""

    raise_for: FlagNonFiniteFn
    no_flag: int

    @property
    def dtype(self) -> torch.dtype:
        return torch.int32 if self.no_flag < 2**31 else torch.int64


@dataclass(frozen=True, slots=True)
class Backend:
    """A loaded backend: its name, the torch device its tensors live on, and its ops."""

    name: str
    device: str
    compress: CompressFn
    find_non_finite: FindNonFiniteFn
    flags: DeviceFlags | None = None
    """Devices only."""
    reserve_scratch: Callable[[torch.device, int, int], object] | None = None
    """Take now what steps of up to (device, num_windows, head_dim) will need; None: nothing."""
    takes_counts: bool = False
    """compress takes counts as its last argument, so that its launches can be captured in a graph."""
    compress_layer: CompressLayerFn | None = None
    """compress_layer(main, indexer), the operands of `compress` each: a csa layer in one launch → launches."""


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    module: str
    needs: tuple[str, ...]
    device: str
    automatic: bool


_TABLE = (
    _Row("cute", "kvfold_kernels.compress.cute", ("torch", "tvm_ffi"), "cuda", automatic=True),
    _Row("triton", "kvfold_kernels.compress.triton", ("torch", "triton"), "cuda", automatic=True),
    _Row("cpu", "kvfold_kernels.compress.cpu", ("torch", "numba"), "cpu", automatic=True),
    _Row("reference", "kvfold_kernels.compress.reference", ("torch",), "cpu", automatic=False),
)

NAMES = tuple(row.name for row in _TABLE)


class BackendUnavailableError(RuntimeError):
    """No such backend can run here; the message says why."""


def why_not(name: str) -> str | None:
    """Why backend `name` cannot run here, in one sentence, or None if it can."""
    row = next((row for row in _TABLE if row.name == name), None)
    if row is None:
        return f"there is no backend {name!r}; choose one of auto, {', '.join(NAMES)}"
    for module in row.needs:
        if importlib.util.find_spec(module) is None:
            return f"backend {name} needs the package {module}, which is not installed"
    if row.device == "cuda" and not torch.cuda.is_available():
        return f"backend {name} needs a CUDA or ROCm device, and torch {torch.__version__} finds none"
    if name == "cute" and (reason := importlib.import_module(row.module).why_not()):
        return f"backend cute {reason}"
    return None


def load(name: str = "auto") -> Backend:
    """Import a backend; `auto` takes the first that can run here and may be picked by itself (never `reference`).

    Raises BackendUnavailableError.
    """
    if name == "auto":
        refused = []
        for row in _TABLE:
            reason = why_not(row.name)
            if row.automatic and reason is None:
                return _load(row)
            refused.append(reason)
        raise BackendUnavailableError("no backend can run here: " + "; ".join(filter(None, refused)))
    if reason := why_not(name):
        raise BackendUnavailableError(reason)
    return _load(next(row for row in _TABLE if row.name == name))


def _load(row: _Row) -> Backend:
    module = importlib.import_module(row.module)
    flags = DeviceFlags(module.flag_non_finite, module.NO_FLAG) if row.device == "cuda" else None
    if start := getattr(module, "start", None):
        start()  # what would else delay the first step
    return Backend(
        row.name,
        row.device,
        module.compress,
        module.find_non_finite,
        flags,
        reserve_scratch=getattr(module, "reserve_scratch", None),
        takes_counts=row.device == "cuda",
        compress_layer=getattr(module, "compress_layer", None),
    )
