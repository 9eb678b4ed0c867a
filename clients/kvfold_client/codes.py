"""The codes of the contract: which HTTP status each has, and which calls may be sent again as they are."""

from collections.abc import Mapping
from types import MappingProxyType

STATUS: Mapping[str, int] = MappingProxyType(
    {
        "malformed": 400,
        "bad_shape": 400,
        "bad_dtype": 400,
        "bad_positions": 400,
        "bad_query_start_loc": 400,
        "non_finite": 400,
        "unknown_compressor": 400,
        "unsupported_version": 400,
        "unauthorized": 401,
        "forbidden": 403,
        "unknown_request": 404,
        "unknown_handle": 404,
        "unknown_peer": 404,
        "request_exists": 409,
        "position_conflict": 409,
        "position_gap": 409,
        "step_conflict": 409,
        "compat_mismatch": 409,
        "truncate_too_far": 409,
        "stale_handle": 410,
        "body_too_large": 413,
        "step_too_large": 413,
        "unsupported_encoding": 415,
        "pool_exhausted": 429,
        "queue_full": 429,
        "quota_exceeded": 429,
        "step_failed": 500,
        "peer_failed": 502,
        "not_ready": 503,
        "draining": 503,
    }
)
RETRYABLE = frozenset({"pool_exhausted", "queue_full", "quota_exceeded", "not_ready", "draining", "step_failed"})
