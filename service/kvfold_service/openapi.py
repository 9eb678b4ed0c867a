"""What /openapi.json says of each call: a summary, the encodings, and which codes it may answer."""

from __future__ import annotations

from typing import Any, Final

from fastapi import Response

from kvfold_client import wire
from kvfold_client.wire import STATUS

_TENSOR = {
    "type": "object",
    "properties": {"dtype": {"enum": list(wire.ITEM_BYTES)}, "shape": {"type": "array", "items": {"type": "integer"}}},
    "required": ["dtype", "shape"],
    "description": "with `data` (msgpack bin), or in a frame `offset` and `nbytes`",
}
_INTEGERS = {"oneOf": [{"type": "array", "items": {"type": "integer"}}, _TENSOR]}
_VERSION = {"type": "integer", "const": wire.PROTOCOL_VERSION}
_ERROR = {
    "type": "object",
    "properties": {
        "code": {"enum": list(STATUS)},
        "message": {"type": "string"},
        "retryable": {"type": "boolean"},
        "details": {"type": "object"},
    },
    "required": ["code", "message", "retryable", "details"],
}
_BINARY = (wire.MSGPACK, wire.FRAME)


def _body(properties: dict[str, Any], optional: set[str] | frozenset[str] = frozenset()) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {"version": _VERSION, **properties},
        "required": ["version", *(name for name in properties if name not in optional)],
        "additionalProperties": False,
    }
    return {"requestBody": {"required": True, "content": {media_type: {"schema": schema} for media_type in _BINARY}}}


def _call(
    summary: str,
    *codes: str,
    body: dict[str, Any] | None = None,
    media_types: tuple[str, ...] = _BINARY,
    status: int = 200,
    describe: str = "",
) -> dict[str, Any]:
    by_status: dict[int | str, list[str]] = {}
    for code in codes:
        by_status.setdefault(STATUS[code], []).append(code)
    responses: dict[int | str, dict[str, Any]] = {
        number: {
            "description": ", ".join(names),
            "content": {media_type: {"schema": _ERROR} for media_type in _BINARY},
        }
        for number, names in by_status.items()
    }
    if status == 200:
        responses[200] = {"description": "done", "content": {media_type: {} for media_type in media_types}}
    return {
        "summary": summary,
        "description": describe,
        "status_code": status,
        "response_class": Response,
        "responses": responses,
        "openapi_extra": body or {},
    }


_AUTH = ("unauthorized", "forbidden", "not_ready")
_BODY = ("malformed", "unsupported_version", "unsupported_encoding", "body_too_large", "queue_full", "quota_exceeded")
_NEW = (*_AUTH, "draining", *_BODY)
_STEP = _body(
    {
        "step_id": {"type": "string"},
        "requests": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "id": {"type": "string"},
                    "start": {"type": "integer"},
                    "num_tokens": {"type": "integer", "minimum": 0},
                },
                "required": ["id", "start", "num_tokens"],
            },
        },
        "query_start_loc": _INTEGERS,
        "positions": _INTEGERS,
        "tensors": {
            "type": "array",
            "items": {
                **_TENSOR,
                "properties": {"compressor": {"type": "string"}, **_TENSOR["properties"]},
                "required": ["compressor", *_TENSOR["required"]],
            },
        },
        "compat": {"type": "string"},
        "pages": {"enum": ["new", "all"]},
        "draft_tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    },
    optional={"compat", "pages", "draft_tokens"},
)
_HANDLES = _body({"handles": {"type": "array", "items": {"type": "string"}}})
_EXPORT = _body(
    {
        "compressors": {"type": "array", "items": {"type": "string"}},
        "entries": {"type": "boolean", "default": True},
        "from_entry": {"type": "integer", "minimum": 0},
    },
    optional={"compressors", "entries", "from_entry"},
)
_ENTRIES = _body(
    {
        "compressor": {"type": "string"},
        "from_entry": {"type": "integer", "minimum": 0},
        "to_entry": {"type": "integer", "minimum": 0},
    }
)
_PULL = _body(
    {"id": {"type": "string"}, "from": {"type": "string"}, "mover": {"enum": ["auto", "http", "nixl"]}},
    optional={"mover"},
)
_PULL_CODES = (
    "unknown_peer",
    "unknown_request",
    "request_exists",
    "compat_mismatch",
    "pool_exhausted",
    "non_finite",
    "peer_failed",
)
_IMPORT = _body(
    {
        "id": {"type": "string"},
        "compat": {"type": "string"},
        "compressors": {
            "type": "object",
            "additionalProperties": {
                "type": "object",
                "properties": {
                    "committed": {"type": "integer", "minimum": 0},
                    "entries": _TENSOR,
                    "open_rows": _TENSOR,
                    "open_positions": _INTEGERS,
                },
                "required": ["committed", "open_rows", "open_positions"],
            },
        },
    }
)
_IMPORT_CODES = (
    "bad_shape",
    "bad_dtype",
    "bad_positions",
    "non_finite",
    "unknown_compressor",
    "request_exists",
    "compat_mismatch",
    "pool_exhausted",
)
_STEP_CODES = (
    "bad_shape",
    "bad_dtype",
    "bad_positions",
    "bad_query_start_loc",
    "non_finite",
    "unknown_compressor",
    "position_conflict",
    "position_gap",
    "step_conflict",
    "compat_mismatch",
    "step_too_large",
    "pool_exhausted",
    "step_failed",
)
_JSON = ("application/json",)

CALLS: Final[dict[tuple[str, str], dict[str, Any]]] = {
    ("POST", "/v1/step"): _call("Run one step; all of it or none.", *_NEW, *_STEP_CODES, body=_STEP),
    ("POST", "/v1/pages/read"): _call(
        "Bytes of pages; all or nothing.", *_AUTH, *_BODY, "unknown_handle", "stale_handle", body=_HANDLES
    ),
    ("POST", "/v1/verify"): _call(
        "Digests of pages; all or nothing.", *_AUTH, *_BODY, "unknown_handle", "stale_handle", body=_HANDLES
    ),
    ("POST", "/v1/requests/{id}/truncate"): _call(
        "Withdraw draft tokens.",
        *_AUTH,
        *_BODY,
        "unknown_request",
        "truncate_too_far",
        body=_body({"length": {"type": "integer", "minimum": 0}}),
    ),
    ("POST", "/v1/requests/{id}/lease"): _call(
        "Renew a lease.", *_AUTH, *_BODY, "unknown_request", body=_body({"seconds": {"type": "number"}})
    ),
    ("POST", "/v1/requests/{id}/export"): _call(
        "Entries and open rows of a request.", *_AUTH, *_BODY, "unknown_request", "unknown_compressor", body=_EXPORT
    ),
    ("POST", "/v1/import"): _call("Go on with an exported request.", *_NEW, *_IMPORT_CODES, body=_IMPORT),
    ("POST", "/v1/pull"): _call(
        "Take a request over from a peer.", *_NEW, *_PULL_CODES, body=_PULL, describe="The peer keeps its copy."
    ),
    ("POST", "/v1/requests/{id}/entries"): _call(
        "Some entries of one compressor.", *_AUTH, *_BODY, "unknown_request", "unknown_compressor", body=_ENTRIES
    ),
    ("GET", "/v1/requests/{id}"): _call("A request in all compressors.", *_AUTH, "unknown_request"),
    ("DELETE", "/v1/requests/{id}"): _call("Release a request; an unknown id is fine.", *_AUTH, status=204),
    ("GET", "/v1/manifest"): _call("What this worker serves.", "unauthorized", media_types=_JSON),
    ("POST", "/v1/pages/locate"): _call(
        "Where pages lie in memory, for NIXL.", *_AUTH, *_BODY, "unknown_handle", "stale_handle", body=_HANDLES
    ),
    ("GET", "/v1/nixl"): _call("How a peer connects to this worker by NIXL; empty without --nixl.", *_AUTH),
    ("GET", "/v1/worker"): _call("Which worker this is.", "unauthorized", media_types=_JSON),
    ("GET", "/v1/stats"): _call("Pools, requests, launches, phases.", "unauthorized", "forbidden", media_types=_JSON),
    ("GET", "/v1/integrity"): _call("Check that nothing is lost or lent twice.", *_AUTH, media_types=_JSON),
    ("GET", "/ui"): _call("A page that shows /v1/stats.", media_types=("text/html",)),
    ("GET", "/livez"): _call("The process answers.", media_types=_JSON),
    ("GET", "/readyz"): _call(
        "Steps are accepted; 503 with a reason if not.", "not_ready", "draining", media_types=_JSON
    ),
    ("GET", "/metrics"): _call("Prometheus metrics.", "unauthorized", "forbidden", media_types=("text/plain",)),
}
