"""The contract's bytes: one message, two encodings; whatever a stranger sends, nothing but WireError is raised.

    application/msgpack             one msgpack map; tensor = {"dtype", "shape", "data": bin}
    application/vnd.kvfold.frame    "KVF1" · u16 version · u16 flags · u32 header_bytes · header (a msgpack map) ·
                                    zeros to 64 · tensors, each at a multiple of 64 from the start of the frame;
                                    tensor = {"dtype", "shape", "offset", "nbytes"}

`decode` gives both the same form: a tensor's `data` is a memoryview, for a frame into the body itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Any, cast

from .codes import RETRYABLE, STATUS
from .frames import (
    FRAME_ALIGN,
    FRAME_MAGIC,
    MAX_HEADER_BYTES,
    PROTOCOL_VERSION,
    read_frame,
    write_frame,
    write_plain_frame,
)
from .packing import MAX_DEPTH, MAX_ITEMS, Buffer, WireError, byte_view, pack, settle, unpack
from .peers import Peer, PeersError, parse_peers

__all__ = [
    "FRAME",
    "FRAME_ALIGN",
    "FRAME_MAGIC",
    "ITEM_BYTES",
    "MAX_DEPTH",
    "MAX_HEADER_BYTES",
    "MAX_ITEMS",
    "MAX_RANK",
    "MSGPACK",
    "PROTOCOL_VERSION",
    "RETRYABLE",
    "STATUS",
    "Buffer",
    "Peer",
    "PeersError",
    "Tensor",
    "WireError",
    "decode",
    "encode",
    "encode_parts",
    "encode_plain",
    "parse_peers",
    "tensor_map",
    "tensor_of",
]

MSGPACK = "application/msgpack"
FRAME = "application/vnd.kvfold.frame"
ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {"bf16": 2, "fp32": 4, "fp8_e4m3": 1, "uint8": 1, "int32": 4, "int64": 8}
)
MAX_RANK = 4


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor's bytes, little endian, C order: len(data) = prod(shape)·ITEM_BYTES[dtype]."""

    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def decode(content_type: str, body: Buffer) -> dict[str, Any]:
    """Bytes → message; every map with dtype, shape and bytes has them as the memoryview `data`.

    Raises WireError: malformed, unsupported_version (a frame's prefix), unsupported_encoding (another content type).
    """
    view = byte_view(body)
    if content_type == MSGPACK:
        return settle(unpack(view), _no_frame)
    if content_type == FRAME:
        return read_frame(view)
    raise WireError("unsupported_encoding", f"the body must be {MSGPACK} or {FRAME}")


def encode(content_type: str, message: Mapping[str, Any]) -> bytes:
    """Message → bytes; the inverse of `decode`."""
    return b"".join(encode_parts(content_type, message))


def encode_parts(content_type: str, message: Mapping[str, Any]) -> list[bytes | memoryview]:
    """Message → the buffers whose concatenation is its encoding; a frame's tensors are the caller's own memory."""
    if content_type == MSGPACK:
        return [pack(message)]
    if content_type != FRAME:
        raise WireError("unsupported_encoding", f"a message is encoded as {MSGPACK} or {FRAME}")
    return write_frame(message)


def encode_plain(content_type: str, message: Mapping[str, Any]) -> bytes:
    """`encode` for a message that has no tensors, faster."""
    return write_plain_frame(message) if content_type == FRAME else encode(content_type, message)


def tensor_map(dtype: str, shape: Sequence[int], data: Buffer, **extra: Any) -> dict[str, Any]:
    """{"dtype", "shape", "data", **extra}: a tensor as `encode` takes it."""
    return {"dtype": dtype, "shape": list(shape), "data": data, **extra}


def tensor_of(value: object, what: str) -> Tensor:
    """A decoded tensor map → Tensor. Raises WireError: malformed, bad_dtype, bad_shape, about `what`."""
    if not isinstance(value, Mapping):
        raise WireError("malformed", f"{what} must be a tensor: a map with dtype, shape and data")
    tensor = cast("Mapping[str, Any]", value)
    dtype, shape, data = tensor.get("dtype"), tensor.get("shape"), tensor.get("data")
    if type(dtype) is not str or not isinstance(shape, list) or not isinstance(data, Buffer):
        raise WireError("malformed", f"{what} must have a dtype string, a shape list and its bytes")
    if dtype not in ITEM_BYTES:
        raise WireError("bad_dtype", f"{what} has an unknown dtype; use one of {', '.join(ITEM_BYTES)}")
    sizes = cast("list[Any]", shape)
    if len(sizes) > MAX_RANK or any(type(size) is not int or size < 0 for size in sizes):
        raise WireError("malformed", f"{what} must have a shape of at most {MAX_RANK} non-negative integers")
    view = byte_view(data)
    if prod(sizes) * ITEM_BYTES[dtype] != len(view):
        raise WireError("bad_shape", f"{what} has {len(view)} bytes, its shape needs {prod(sizes) * ITEM_BYTES[dtype]}")
    return Tensor(dtype, tuple(sizes), view)


def _no_frame(offset: object, nbytes: object) -> memoryview:
    raise WireError("malformed", "a tensor of a msgpack message carries data, not offset and nbytes")
