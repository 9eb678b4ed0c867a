"""Which kernels can run here: a literal table, in the order `auto` prefers. A backend is imported when asked for."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass

from kvfold_kernels.compress import CompressFn, FindNonFiniteFn, FlagNonFiniteFn


@dataclass(frozen=True, slots=True)
class Backend:
    """A loaded backend: its name, the torch device its tensors live on, and its ops."""

    name: str
    device: str
    compress: CompressFn
    find_non_finite: FindNonFiniteFn
    flag_non_finite: FlagNonFiniteFn | None = None
    """Devices only."""


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    module: str
    needs: tuple[str, ...]
    device: str
    automatic: bool


_TABLE = (
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
    flag = getattr(module, "flag_non_finite", None)
    return Backend(row.name, row.device, module.compress, module.find_non_finite, flag)
