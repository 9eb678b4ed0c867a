"""Typed replies, and the functions that read them from decoded messages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .arrays import from_wire
from .wire import tensor_of


@dataclass(frozen=True, slots=True)
class CompressorState:
    """One compressor of one request after a call."""

    committed: int
    """Tokens seen."""
    open_tokens: int
    """Tokens behind the last closed window."""
    num_entries: int
    new_entries: tuple[int, int] | None
    """Half-open; [n, n) when the step closed no window, None where the call was no step."""
    pages: tuple[str, ...]
    """Handles, in the order of the entries."""
    first_entry: int = 0
    """Entries before it are not held by this worker: the request was imported without them."""


RequestState = dict[str, CompressorState]
"""Compressor name → state."""


@dataclass(frozen=True, slots=True)
class StepReply:
    step_id: str
    epoch: str
    compat: str
    launches: int
    """Device launches of the batch in which the step ran."""
    skipped: tuple[str, ...]
    """Compressors in which no window closed."""
    requests: dict[str, RequestState]
    timings_us: dict[str, float]


@dataclass(frozen=True, slots=True)
class Page:
    handle: str
    compressor: str
    num_entries: int
    data: np.ndarray
    """uint8 [page_bytes]; `entries.decode_page` turns it into rows."""
    first_entry: int = 0
    """Entries of the page before it are not held by this worker; their bytes are zero."""


@dataclass(frozen=True, slots=True)
class PageDigest:
    handle: str
    num_entries: int
    xxh3_64: int | str
    """Over the valid entries as page-free rows."""


@dataclass(frozen=True, slots=True)
class ExportedCompressor:
    committed: int
    entries: np.ndarray | None
    """uint8 [num_entries, entry_bytes], values then scales; None when not asked for."""
    open_rows: np.ndarray
    """float32, or uint16 with bf16's bits: [num_rows, row_width], what later windows still need."""
    open_positions: np.ndarray
    """int64 [num_rows]."""
    first_entry: int = 0
    """The entry that the first row of `entries` is."""


@dataclass(frozen=True, slots=True)
class Exported:
    """All that another worker of the same `compat` needs to go on with a request."""

    compat: str
    compressors: dict[str, ExportedCompressor]


@dataclass(frozen=True, slots=True)
class Entries:
    """Some entries of one compressor."""

    first_entry: int
    entries: np.ndarray
    """uint8 [n, entry_bytes]."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """What a worker took over from a peer, and verified."""

    state: RequestState
    mover: str
    num_entries: int
    entry_bytes: int
    num_open_rows: int
    open_row_bytes: int
    timings_us: dict[str, float]
    """ask: questions, slot and pages; move: the entries; verify: digests, until the request was known."""


@dataclass(frozen=True, slots=True)
class WorkerState:
    epoch: str
    compat: str
    status: str
    """ok, or why no step is taken."""
    movers: tuple[str, ...]


def step_reply(message: Mapping[str, Any]) -> StepReply:
    return StepReply(
        step_id=message["step_id"],
        epoch=message["epoch"],
        compat=message["compat"],
        launches=message["launches"],
        skipped=tuple(message["skipped"]),
        requests={request["id"]: request_state(request) for request in message["requests"]},
        timings_us=dict(message["timings_us"]),
    )


def request_state(message: Mapping[str, Any]) -> RequestState:
    return {name: _compressor_state(state) for name, state in message["compressors"].items()}


def _compressor_state(state: Mapping[str, Any]) -> CompressorState:
    new_entries = state.get("new_entries")
    if new_entries is not None:
        first, end = new_entries
        new_entries = (first, end)
    return CompressorState(
        state["committed"],
        state["open_tokens"],
        state["num_entries"],
        new_entries,
        tuple(state["pages"]),
        state.get("first_entry", 0),
    )


def pages(message: Mapping[str, Any]) -> tuple[Page, ...]:
    return tuple(
        Page(
            page["handle"],
            page["compressor"],
            page["num_entries"],
            from_wire(tensor_of(page, "a page")),
            page.get("first_entry", 0),
        )
        for page in message["pages"]
    )


def page_digests(message: Mapping[str, Any]) -> tuple[PageDigest, ...]:
    return tuple(PageDigest(page["handle"], page["num_entries"], page["xxh3_64"]) for page in message["pages"])


def expires_in(message: Mapping[str, Any]) -> float:
    return float(message["expires_in"])


def entries(message: Mapping[str, Any]) -> Entries:
    return Entries(message["first_entry"], from_wire(tensor_of(message["entries"], "the entries")))


def pulled(message: Mapping[str, Any]) -> Pulled:
    moved = message["moved"]
    return Pulled(
        state=request_state(message),
        mover=moved["mover"],
        num_entries=moved["num_entries"],
        entry_bytes=moved["entry_bytes"],
        num_open_rows=moved["num_open_rows"],
        open_row_bytes=moved["open_row_bytes"],
        timings_us=dict(moved["timings_us"]),
    )


def worker_state(message: Mapping[str, Any]) -> WorkerState:
    return WorkerState(message["epoch"], message["compat"], message["status"], tuple(message["movers"]))


def exported(message: Mapping[str, Any]) -> Exported:
    compressors = {name: _exported_compressor(name, state) for name, state in message["compressors"].items()}
    return Exported(message["compat"], compressors)


def _exported_compressor(name: str, state: Mapping[str, Any]) -> ExportedCompressor:
    entries, positions = state.get("entries"), state["open_positions"]
    return ExportedCompressor(
        committed=state["committed"],
        entries=None if entries is None else from_wire(tensor_of(entries, f"the entries of {name}")),
        open_rows=from_wire(tensor_of(state["open_rows"], f"the open rows of {name}")),
        open_positions=_integers(positions, f"the open positions of {name}"),
        first_entry=state.get("first_entry", 0),
    )


def _integers(value: Any, what: str) -> np.ndarray:
    """A plain list or an integer tensor → int64 [n]."""
    return np.array(from_wire(tensor_of(value, what)) if isinstance(value, Mapping) else value, np.int64)
