"""A decoded message → a validated Step: everything that can be said about a step without the worker's state.

Checks run in the contract's order, so that of several errors the same one always wins: malformed, unsupported_version,
compat_mismatch, unknown_compressor, shapes and dtypes, bad_query_start_loc, bad_positions. What depends on state (step
id, requests, capacity, non-finite values) follows in the worker.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvfold_client import wire
from kvfold_service.errors import ServiceError
from kvfold_service.manifest import CompressorPart

I64 = NDArray[np.int64]

ID: Final = re.compile(r"[A-Za-z0-9_.:@-]{1,128}")
_LARGEST: Final = 2**63 - 1
_REQUEST_FIELDS: Final = frozenset({"id", "start", "num_tokens"})
_INT_DTYPES: Final = {"int32": np.dtype("<i4"), "int64": np.dtype("<i8")}
_INPUT_DTYPES: Final = {"bf16": ("bf16",), "fp32": ("fp32",), "any": ("bf16", "fp32")}


class StepRequest(NamedTuple):
    id: str
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """One scheduler step.

    query_start_loc  int64 `[num_requests + 1]`; rows [query_start_loc[i], query_start_loc[i + 1]) are request i's
    num_rows         rows of every tensor; those from query_start_loc[-1] on are padding
    tensors          by compressor, bf16 or fp32 `[num_rows, row_width]`
    draft_tokens     int64 `[num_requests]`, how many last tokens may be withdrawn later
    """

    step_id: str
    requests: tuple[StepRequest, ...]
    query_start_loc: I64
    num_rows: int
    tensors: dict[str, wire.Tensor]
    draft_tokens: I64
    all_pages: bool

    @property
    def num_tokens(self) -> int:
        return int(self.query_start_loc[-1])


@dataclass(frozen=True, slots=True)
class StepRules:
    """What a worker accepts."""

    compat: str
    parts: Mapping[str, CompressorPart]
    row_widths: Mapping[str, int]
    max_position: int
    max_step_tokens: int
    draft_slack: int


def malformed(message: str, **details: Any) -> ServiceError:
    return ServiceError("malformed", message, **details)


def expect_fields(body: Mapping[str, Any], what: str, required: Set[str], optional: Set[str] = frozenset()) -> None:
    """Raises malformed for a field that is missing or unknown."""
    if missing := required - body.keys():
        raise malformed(f"{what} lacks {', '.join(sorted(missing))}")
    if unknown := body.keys() - required - optional:
        raise malformed(f"{what} has unknown fields: {', '.join(sorted(unknown))[:200]}")


def expect_id(value: object, what: str) -> str:
    if not isinstance(value, str) or not ID.fullmatch(value):
        raise malformed(f"{what} must be 1 to 128 characters of A–Z a–z 0–9 . _ : @ -")
    return value


def expect_int(value: object, what: str, least: int | None = None) -> int:
    if type(value) is not int or (least is not None and value < least):
        raise malformed(f"{what} must be a whole number" + (f" of at least {least}" if least is not None else ""))
    return value


def expect_version(body: Mapping[str, Any]) -> None:
    version = expect_int(body["version"], "version")
    if version != wire.PROTOCOL_VERSION:
        raise ServiceError(
            "unsupported_version", f"this worker speaks version {wire.PROTOCOL_VERSION}", version=version
        )


def parse_step(body: Mapping[str, Any], rules: StepRules) -> Step:
    """Raises ServiceError, in the order above."""
    required = {"version", "step_id", "requests", "query_start_loc", "positions", "tensors"}
    expect_fields(body, "the step", required, {"compat", "pages", "draft_tokens"})
    version = expect_int(body["version"], "version")
    step_id = expect_id(body["step_id"], "step_id")
    requests = _requests(body["requests"])
    drafts = _drafts(body.get("draft_tokens"), requests, rules.draft_slack)
    pages = body.get("pages", "new")
    if pages not in ("new", "all"):
        raise malformed('pages must be "new" or "all"')
    compat = body.get("compat")
    if compat is not None and not isinstance(compat, str):
        raise malformed("compat must be a string")
    tensor_maps = _tensor_maps(body["tensors"])
    query_start_loc, positions = (_integers(body[name], name) for name in ("query_start_loc", "positions"))

    if version != wire.PROTOCOL_VERSION:
        expect_version(body)
    if compat is not None and compat != rules.compat:
        raise compat_mismatch(rules.compat)
    for name in tensor_maps:
        if name not in rules.parts:
            shown = name[:128]
            raise ServiceError("unknown_compressor", f"this worker serves no compressor {shown}", compressor=shown)
    positions, query_start_loc = _vector(positions, "positions"), _vector(query_start_loc, "query_start_loc")
    num_rows = len(positions)
    if num_rows > rules.max_step_tokens:
        raise ServiceError(
            "step_too_large",
            f"the step has {num_rows} rows; this worker takes {rules.max_step_tokens}",
            rows=num_rows,
            limit=rules.max_step_tokens,
        )
    tensors = {name: input_tensor(name, value, num_rows, rules) for name, value in tensor_maps.items()}
    loc = _as_int64(query_start_loc, "query_start_loc", "bad_query_start_loc")
    starts = _check_query_start_loc(loc, requests, num_rows)
    _check_ranges(requests, rules.max_position)
    _check_positions(_as_int64(positions[: loc[-1]], "positions", "bad_positions"), loc, starts, requests)
    return Step(step_id, requests, loc, num_rows, tensors, drafts, pages == "all")


def compat_mismatch(ours: str) -> ServiceError:
    return ServiceError(
        "compat_mismatch", "the worker's compressors or weights are not the ones you expect", compat=ours
    )


def _requests(value: object) -> tuple[StepRequest, ...]:
    if not isinstance(value, list) or not value:
        raise malformed("requests must be a list of at least one request")
    requests = []
    for item in value:
        if not isinstance(item, dict):
            raise malformed("a request must be a map of id, start and num_tokens")
        if item.keys() != _REQUEST_FIELDS:
            expect_fields(item, "a request", _REQUEST_FIELDS)
        request = StepRequest(item["id"], item["start"], item["num_tokens"])
        expect_id(request.id, "a request's id")
        if type(request.start) is not int or type(request.num_tokens) is not int or request.num_tokens < 0:
            expect_int(request.start, "a request's start")
            expect_int(request.num_tokens, "a request's num_tokens", 0)
        requests.append(request)
    if len({request.id for request in requests}) != len(requests):
        raise malformed("a step may name a request once")
    return tuple(requests)


def _drafts(value: object, requests: tuple[StepRequest, ...], slack: int) -> I64:
    if value is None:
        return np.zeros(len(requests), np.int64)
    if not isinstance(value, list) or len(value) != len(requests):
        raise malformed("draft_tokens must be a list of one number a request")
    for drafts, request in zip(value, requests, strict=True):
        most = min(request.num_tokens, slack)
        if expect_int(drafts, "a number in draft_tokens", 0) > most:
            raise malformed(f"request {request.id} may have at most {most} draft tokens in this step", slack=slack)
    return np.array(value, np.int64)


def _tensor_maps(value: object) -> dict[str, dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise malformed("tensors must be a list of at least one tensor")
    tensors: dict[str, dict[str, Any]] = {}
    for item in value:
        if not isinstance(item, dict):
            raise malformed("a tensor must be a map of compressor, dtype, shape and data")
        expect_fields(item, "a tensor", {"compressor", "dtype", "shape", "data"})
        name = item["compressor"]
        if not isinstance(name, str):
            raise malformed("a tensor's compressor must be a string")
        if name in tensors:
            raise malformed(f"the step has two tensors for compressor {name[:128]}")
        expect_tensor(item, f"the tensor of {name[:128]}")
        tensors[name] = item
    return tensors


def expect_tensor(value: object, what: str) -> None:
    """Raises malformed for what is no tensor at all; that its dtype or shape is wrong is said in its turn."""
    try:
        wire.tensor_of(value, what)
    except wire.WireError as error:
        if error.code == "malformed":
            raise ServiceError.of_wire(error) from None


def _integers(value: object, what: str) -> list[int] | dict[str, Any]:
    """A plain list of integers, or a tensor; anything else is malformed."""
    if isinstance(value, dict):
        expect_fields(value, what, {"dtype", "shape", "data"})
        expect_tensor(value, what)
        return value
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise malformed(f"{what} must be a list of whole numbers, or an int32 or int64 tensor")
    return value


def integers(value: object, what: str, out_of_range: str) -> I64:
    """A plain list or an int32 or int64 tensor `[n]` → int64. Raises malformed, bad_dtype, bad_shape, out_of_range."""
    return _as_int64(_vector(_integers(value, what), what), what, out_of_range)


def _as_int64(values: list[int] | I64, what: str, out_of_range: str) -> I64:
    try:
        return np.array(values, np.int64)
    except OverflowError:
        raise ServiceError(out_of_range, f"{what} has a number past {_LARGEST}") from None


def _vector(value: list[int] | dict[str, Any], what: str) -> list[int] | I64:
    """A list's numbers, of any size, or a tensor's. Raises bad_dtype, bad_shape."""
    if isinstance(value, list):
        return value
    tensor = wire_tensor(value, what)
    if tensor.dtype not in _INT_DTYPES:
        raise ServiceError("bad_dtype", f"{what} must be int32 or int64, not {tensor.dtype}")
    if len(tensor.shape) != 1:
        raise ServiceError("bad_shape", f"{what} must have one dimension, not {len(tensor.shape)}")
    return np.frombuffer(tensor.data, _INT_DTYPES[tensor.dtype]).astype(np.int64)


def wire_tensor(value: object, what: str) -> wire.Tensor:
    try:
        return wire.tensor_of(value, what)
    except wire.WireError as error:
        raise ServiceError.of_wire(error) from None


def input_tensor(name: str, value: object, num_rows: int, rules: StepRules) -> wire.Tensor:
    tensor = wire_tensor(value, f"the tensor of {name}")
    allowed = _INPUT_DTYPES[rules.parts[name].input_dtype]
    if tensor.dtype not in allowed:
        raise ServiceError(
            "bad_dtype", f"compressor {name} takes {' or '.join(allowed)}, not {tensor.dtype}", compressor=name
        )
    expected = (num_rows, rules.row_widths[name])
    if tensor.shape != expected:
        raise ServiceError(
            "bad_shape",
            f"the tensor of {name} must have shape {list(expected)}, one row a position, not {list(tensor.shape)}",
            compressor=name,
            expected=list(expected),
        )
    return tensor


def _check_query_start_loc(loc: I64, requests: tuple[StepRequest, ...], num_rows: int) -> list[int]:
    problem = None
    if len(loc) != len(requests) + 1:
        problem = f"query_start_loc must have {len(requests) + 1} numbers, one more than requests, not {len(loc)}"
    elif loc[0] != 0:
        problem = "query_start_loc must start at 0"
    elif loc.tolist() != list(accumulate((request.num_tokens for request in requests), initial=0)):
        problem = "query_start_loc must be the running sum of the requests' num_tokens"
    elif loc[-1] > num_rows:
        problem = f"query_start_loc ends at {loc[-1]}, but there are {num_rows} positions"
    if problem:
        raise ServiceError("bad_query_start_loc", problem)
    return [request.start for request in requests]


def _check_ranges(requests: tuple[StepRequest, ...], max_position: int) -> None:
    for request in requests:
        if request.start < 0 or request.start + request.num_tokens > max_position:
            raise ServiceError(
                "bad_positions",
                f"request {request.id} would cover positions {request.start} to "
                f"{request.start + request.num_tokens - 1}; this worker takes 0 to {max_position - 1}",
                request=request.id,
            )


def _check_positions(positions: I64, loc: I64, starts: list[int], requests: tuple[StepRequest, ...]) -> None:
    """positions int64 `[loc[-1]]`: padding is not looked at."""
    lengths = np.diff(loc)
    expected = np.arange(loc[-1]) + np.repeat(np.array(starts, np.int64) - loc[:-1], lengths)
    wrong = np.flatnonzero(positions != expected)
    if wrong.size:
        row = int(wrong[0])
        request = requests[int(np.searchsorted(loc, row, "right")) - 1]
        raise ServiceError(
            "bad_positions",
            f"positions of request {request.id} must count up from its start {request.start}; "
            f"row {row} has {int(positions[row])}, not {int(expected[row])}",
            request=request.id,
            row=row,
        )
