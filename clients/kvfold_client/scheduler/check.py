"""Every entry of a finished request against `reference`, from rows made anew, whatever the request went through.

An entry is equal, or rounded: its bytes differ, and its values lie within one step of its format from the reference's.
Other backends differ from it where the last bit of an exp does; a wrong row anywhere moves many values further.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..client import Client
from ..entries import decode_rows
from ..replies import ExportedCompressor
from .extra import load
from .request import Request
from .rows import RowSource
from .workers import SimulationError

_TOKENS_AT_A_TIME = 4096
_STEP = {"fp8_ds_mla": 2.0**-3, "fp8": 2.0**-3, "indexer_fp8": 2.0**-3, "indexer_mxfp4": 0.5, "bf16": 2.0**-7}
"""Distance of neighbouring values relative to the smaller one."""
_FP32_STEP = 1e-5
_NEAR_ZERO = 2.0**-16
"""Of an entry's largest value: errors that cancellation leaves, and e4m3's smallest steps under a scale of its own."""


class Reference(Protocol):
    """What the worker extra gives: see kvfold_service.expected."""

    compat: str

    def first_row(self, name: str, entry: int) -> int: ...

    def entries(self, name: str, first: int, stop: int, rows: np.ndarray) -> np.ndarray: ...


@dataclass(slots=True)
class Checked:
    requests: int = 0
    entries: int = 0
    rounded: int = 0
    """Of these, those whose bytes differ by a rounding."""


class Checker:
    """Called with each finished request while its worker still has it. Raises SimulationError for a wrong entry."""

    def __init__(self, manifest: Mapping[str, Any], weights: str, source: RowSource) -> None:
        """`manifest` as the worker tells it, `weights` as the worker was given them."""
        compat = manifest.get("compat")
        manifest = {name: value for name, value in manifest.items() if name != "compat"}
        self._parts = {part["name"]: part for part in manifest["compressors"]}
        self._source = source
        try:
            self._reference: Reference = load("reference")(manifest, weights)
        except ValueError as error:
            raise SimulationError(str(error)) from error
        if compat is not None and self._reference.compat != compat:
            raise SimulationError(f"weights {weights!r} are not the worker's: their compat differs")
        self.checked = Checked()

    def __call__(self, request: Request, client: Client | None) -> None:
        if client is None:
            raise SimulationError("there is no entry to check on paper: give --url or --peers")
        for name in self._parts:
            exported = client.export(request.id, [name]).compressors[name]
            if exported.committed != request.arrival.num_rows or exported.first_entry or exported.entries is None:
                raise SimulationError(f"{request.id}, {name}: {_told(exported)}, and should be {_expected(request)}")
            self._check(request, name, exported.entries)
        self.checked.requests += 1

    def _check(self, request: Request, name: str, entries: np.ndarray) -> None:
        ratio = self._parts[name]["ratio"]
        num_entries = request.arrival.num_rows // ratio
        if len(entries) != num_entries:
            raise SimulationError(f"{request.id}, {name}: {len(entries)} entries, and should have {num_entries}")
        step = max(1, _TOKENS_AT_A_TIME // ratio)
        for first in range(0, num_entries, step):
            stop = min(first + step, num_entries)
            rows = self._source.rows(request.idx, name, self._reference.first_row(name, first), stop * ratio)
            expected = self._reference.entries(name, first, stop, rows)
            self._compare(f"{request.id}, {name}", first, entries[first:stop], expected, self._parts[name])
        self.checked.entries += num_entries

    def _compare(
        self, where: str, first: int, actual: np.ndarray, expected: np.ndarray, part: Mapping[str, Any]
    ) -> None:
        """Entries `first` and on of one compressor, page-free rows."""
        different = np.flatnonzero((actual != expected).any(1))
        if not len(different):
            return
        self.checked.rounded += len(different)
        try:
            a, b = (_decode(rows[different], part) for rows in (actual, expected))
        except ValueError as error:  # of a size that no reader knows: then bytes must be equal
            raise SimulationError(f"{where}: entry {first + different[0]} is not the reference's") from error
        wrong = np.flatnonzero(~_near(a, b, part).all(1))
        if len(wrong):
            raise SimulationError(f"{where}: entry {first + different[wrong[0]]} is not the reference's")


def _decode(rows: np.ndarray, part: Mapping[str, Any]) -> np.ndarray:
    return decode_rows(rows, part["cache_format"], part.get("fp8_scale", 1.0), head_dim=part["head_dim"])


def _near(a: np.ndarray, b: np.ndarray, part: Mapping[str, Any]) -> np.ndarray:
    """Whether values `[n, head_dim]` are within a step of each other; boolean, one a value."""
    cache_format = part["cache_format"]
    smallest = _NEAR_ZERO * np.abs(b).max(1, keepdims=True)
    if cache_format == "indexer_mxfp4":  # 0, 0.5, 1 … 6 times a scale that the largest value sets
        smallest = 0.25 * np.abs(b).max(1, keepdims=True)
    elif cache_format == "fp8":  # one scale for all entries, however small they are
        smallest = np.maximum(smallest, 2.0**-9 * part.get("fp8_scale", 1.0))
    return np.abs(a - b) <= _STEP.get(cache_format, _FP32_STEP) * np.minimum(np.abs(a), np.abs(b)) + smallest


def _told(exported: ExportedCompressor) -> str:
    return f"{exported.committed} tokens, entries from {exported.first_entry} on"


def _expected(request: Request) -> str:
    return f"{request.arrival.num_rows} tokens, entries from 0 on"
