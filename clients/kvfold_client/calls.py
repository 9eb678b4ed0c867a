"""The calls of the contract as values: what to send and how to read the answer. No socket, no clock."""

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from . import replies
from .arrays import to_wire
from .replies import Entries, Exported, Page, PageDigest, Pulled, RequestState, StepReply, WorkerState
from .wire import PROTOCOL_VERSION

T = TypeVar("T")

_ID = re.compile(r"[A-Za-z0-9._:@-]{1,128}")


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One HTTP exchange. `message` is encoded as the client is set, `read` turns the decoded reply into the result."""

    method: str
    path: str
    read: Callable[[Any], T]
    message: Mapping[str, Any] | None = None
    idempotent: bool = True
    """Sending it twice does what sending it once does, so a lost reply may be retried."""
    json: bool = False
    """The reply is JSON."""


def step(
    requests: Sequence[tuple[str, int, int]],
    tensors: Mapping[str, Any],
    *,
    step_id: str | None = None,
    positions: Any = None,
    pages: Literal["new", "all"] = "new",
    draft_tokens: Sequence[int] | None = None,
    compat: str | None = None,
) -> Call[StepReply]:
    """Feeds tokens: `requests` holds (id, start, num_tokens); `tensors` compressor → [T, row_width], kv then score.

    Rows lie request after request; T ≥ Σ num_tokens, and rows behind the sum are padding. Rows are fp32 (numpy, torch)
    or bf16 (ml_dtypes, torch, or the bits as numpy uint16). `positions` [T] default to
    start … start + num_tokens − 1 of each request. Retries carry the same `step_id` (default: a random one), so that
    the step runs at most once.
    """
    boundaries = np.cumsum([0, *(num_tokens for _, _, num_tokens in requests)], dtype=np.int64)
    wired = [to_wire(rows, compressor=name) for name, rows in tensors.items()]
    if positions is None:
        num_rows = max((tensor["shape"][0] for tensor in wired if tensor["shape"]), default=0)
        positions = _consecutive(requests, max(num_rows - int(boundaries[-1]), 0))
    message: dict[str, Any] = {
        "version": PROTOCOL_VERSION,
        "step_id": uuid.uuid4().hex if step_id is None else step_id,
        "requests": [{"id": id, "start": index(start), "num_tokens": index(length)} for id, start, length in requests],
        "query_start_loc": to_wire(boundaries),
        "positions": to_wire(np.asarray(positions, np.int64)),
        "tensors": wired,
        "pages": pages,
    }
    message |= _given(compat=compat, draft_tokens=None if draft_tokens is None else [index(n) for n in draft_tokens])
    return Call("POST", "/v1/step", replies.step_reply, message)


def read_pages(handles: Sequence[str]) -> Call[tuple[Page, ...]]:
    """The bytes of pages, all or none, in the order of the handles."""
    message = {"version": PROTOCOL_VERSION, "handles": list(handles)}
    return Call("POST", "/v1/pages/read", replies.pages, message)


def verify(handles: Sequence[str]) -> Call[tuple[PageDigest, ...]]:
    """Digests of pages over their valid entries as page-free rows: equal where pages hold the same entries."""
    message = {"version": PROTOCOL_VERSION, "handles": list(handles)}
    return Call("POST", "/v1/verify", replies.page_digests, message)


def request(id: str) -> Call[RequestState]:
    """Where a request stands, in all compressors. Raises UnknownRequest."""
    return Call("GET", _path(id), replies.request_state)


def release(id: str) -> Call[None]:
    """Frees a request and its pages; an unknown id is no error."""
    return Call("DELETE", _path(id), lambda _: None)


def truncate(id: str, length: int) -> Call[RequestState]:
    """Withdraws the last step's draft tokens from `length` on. Raises TruncateTooFar."""
    message = {"version": PROTOCOL_VERSION, "length": length}
    return Call("POST", _path(id, "/truncate"), replies.request_state, message, idempotent=False)


def lease(id: str, seconds: float) -> Call[float]:
    """Keeps a request for so long from now on; gives the seconds until it expires."""
    message = {"version": PROTOCOL_VERSION, "seconds": seconds}
    return Call("POST", _path(id, "/lease"), replies.expires_in, message)


def export(
    id: str, compressors: Sequence[str] | None = None, entries: bool = True, from_entry: int | None = None
) -> Call[Exported]:
    """Entries and open rows of a request, for `import_` on another worker; its drafts become final."""
    message: dict[str, Any] = {"version": PROTOCOL_VERSION, "entries": entries}
    message |= _given(compressors=None if compressors is None else list(compressors), from_entry=from_entry)
    return Call("POST", _path(id, "/export"), replies.exported, message)


def import_(id: str, exported: Exported) -> Call[RequestState]:
    """Goes on with an exported request under this id. Raises RequestExists, CompatMismatch."""
    compressors = {
        name: {
            "committed": state.committed,
            "open_rows": to_wire(state.open_rows),
            "open_positions": to_wire(state.open_positions),
            **_given(entries=None if state.entries is None else to_wire(state.entries)),
            **({"first_entry": state.first_entry} if state.first_entry else {}),
        }
        for name, state in exported.compressors.items()
    }
    message = {"version": PROTOCOL_VERSION, "id": id, "compat": exported.compat, "compressors": compressors}
    return Call("POST", "/v1/import", replies.request_state, message, idempotent=False)


def entries(id: str, compressor: str, from_entry: int, to_entry: int) -> Call[Entries]:
    """Entries [from_entry, to_entry) of one compressor, as far as the worker has them."""
    message = {"version": PROTOCOL_VERSION, "compressor": compressor, "from_entry": from_entry, "to_entry": to_entry}
    return Call("POST", _path(id, "/entries"), replies.entries, message)


def pull(id: str, source: str, mover: Literal["auto", "http", "nixl"] = "auto") -> Call[Pulled]:
    """The worker takes the request over from another, the peer `source`, which keeps its copy; its drafts become final.

    Raises UnknownPeer, UnknownRequest (the peer has none), RequestExists, CompatMismatch, PeerFailed; then nothing is
    kept.
    """
    message = {"version": PROTOCOL_VERSION, "id": id, "from": source, "mover": mover}
    return Call("POST", "/v1/pull", replies.pulled, message, idempotent=False)


def worker() -> Call[WorkerState]:
    """Which worker this is, and whether it takes steps."""
    return Call("GET", "/v1/worker", replies.worker_state, json=True)


def manifest() -> Call[dict[str, Any]]:
    """The model that the worker serves."""
    return Call("GET", "/v1/manifest", dict, json=True)


def stats() -> Call[dict[str, Any]]:
    """Counters and gauges for people; programs read /metrics."""
    return Call("GET", "/v1/stats", dict, json=True)


def _consecutive(requests: Sequence[tuple[str, int, int]], num_padding: int) -> np.ndarray:
    """start … start + num_tokens − 1 of each request, then zeros."""
    runs = [np.arange(start, start + num_tokens, dtype=np.int64) for _, start, num_tokens in requests]
    return np.concatenate([*runs, np.zeros(num_padding, np.int64)])


def _given(**fields: Any) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _path(id: str, suffix: str = "") -> str:
    """The path of a request. An id of dots alone would be taken for a folder, hence %2E."""
    if not _ID.fullmatch(id):
        raise ValueError(f"an id has 1 to 128 of A–Z a–z 0–9 . _ : @ -, not {id!r}")
    return f"/v1/requests/{id if id.strip('.') else id.replace('.', '%2E')}{suffix}"
