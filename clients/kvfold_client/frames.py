"""The frame codec: offsets instead of bins, so that a tensor is neither copied into a frame nor out of it.

    "KVF1" · u16 version · u16 flags = 0 · u32 header_bytes · header (a msgpack map) · zeros to 64 · tensors

Little endian. A tensor starts at a multiple of 64 from the start of the frame; between tensors there are only zeros,
behind the last there is nothing.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .packing import WireError, lifted, pack, settle, unpack

PROTOCOL_VERSION = 1
FRAME_MAGIC = b"KVF1"
FRAME_ALIGN = 64
MAX_HEADER_BYTES = 4 << 20  # of the msgpack header

_PREFIX = struct.Struct("<4sHHI")


def _aligned(position: int) -> int:
    return -(-position // FRAME_ALIGN) * FRAME_ALIGN


@dataclass(slots=True)
class _Layout:
    """A frame being written: its tensors from `start` on, in the order in which the message names them."""

    start: int
    buffers: list[tuple[int, memoryview]] = field(default_factory=list[tuple[int, memoryview]])

    def place(self, data: memoryview) -> dict[str, Any]:
        offset = self.start
        if self.buffers:
            last, previous = self.buffers[-1]
            offset = _aligned(last + len(previous))
        self.buffers.append((offset, data))
        return {"offset": offset, "nbytes": len(data)}


def write_frame(message: Mapping[str, Any]) -> list[bytes | memoryview]:
    """Message → prefix and header, then paddings and tensors in turn.

    The header holds the offsets and its length moves them, so it is packed until the length stands still: twice,
    rarely three times, since a length never shrinks as the offsets grow.
    """
    start, layout, header = 0, _Layout(0), b""
    while not header or (start != layout.start and layout.buffers):
        layout = _Layout(start)
        header = pack(lifted(message, layout.place))
        start = _aligned(_PREFIX.size + len(header))
    parts: list[bytes | memoryview] = [_prefix(header), header]
    end = _PREFIX.size + len(header)
    for offset, data in layout.buffers:
        parts += [bytes(offset - end), data]
        end = offset + len(data)
    return parts


def write_plain_frame(message: Mapping[str, Any]) -> bytes:
    """A message without tensors → frame, without a look at every node of it."""
    header = pack(message)
    return _prefix(header) + header


def _prefix(header: bytes) -> bytes:
    if len(header) > MAX_HEADER_BYTES:
        raise WireError("malformed", f"the frame's header would exceed {MAX_HEADER_BYTES} bytes")
    return _PREFIX.pack(FRAME_MAGIC, PROTOCOL_VERSION, 0, len(header))


def read_frame(view: memoryview) -> dict[str, Any]:
    """Frame → message whose tensors are views into it. Raises WireError: malformed, unsupported_version."""
    if len(view) < _PREFIX.size:
        raise WireError("malformed", "the frame ends inside its prefix")
    magic, version, flags, header_bytes = _PREFIX.unpack_from(view)
    if magic != FRAME_MAGIC:
        raise WireError("malformed", "the frame does not begin with KVF1")
    if version != PROTOCOL_VERSION:
        raise WireError("unsupported_version", f"the frame has version {version}; this is version {PROTOCOL_VERSION}")
    if flags:
        raise WireError("malformed", "the frame's flags must be 0")
    if header_bytes > MAX_HEADER_BYTES:
        raise WireError("malformed", f"the header has {header_bytes} bytes, at most {MAX_HEADER_BYTES} are read")
    header_end = _PREFIX.size + header_bytes
    if header_end > len(view):
        raise WireError("malformed", "the frame ends inside its header")
    frame = _Frame(view, header_end, [])
    message = settle(unpack(view[_PREFIX.size : header_end]), frame.take)
    frame.check_layout()
    return message


@dataclass(frozen=True, slots=True)
class _Frame:
    """A frame being read: [0, header_end) prefix and header, `spans` the half-open byte ranges of its tensors."""

    view: memoryview
    header_end: int
    spans: list[tuple[int, int]]

    def take(self, offset: object, nbytes: object) -> memoryview:
        if type(offset) is not int or type(nbytes) is not int or nbytes < 0:
            raise WireError("malformed", "a tensor's offset and nbytes must be non-negative integers")
        if offset % FRAME_ALIGN or offset < self.header_end:
            raise WireError("malformed", f"a tensor must start behind the header at a multiple of {FRAME_ALIGN}")
        if offset + nbytes > len(self.view):
            raise WireError("malformed", "a tensor reaches past the end of the frame")
        self.spans.append((offset, offset + nbytes))
        return self.view[offset : offset + nbytes]

    def check_layout(self) -> None:
        """Tensors are disjoint, what lies between them is zero, and nothing follows the last."""
        end = self.header_end
        for start, stop in sorted(self.spans):
            if start < end:
                raise WireError("malformed", "tensors of the frame overlap")
            self._check_zeros(end, start)
            end = stop
        if not self.spans and len(self.view) == _aligned(end):  # the padding may stand without a tensor behind it
            self._check_zeros(end, len(self.view))
            end = len(self.view)
        if end != len(self.view):
            raise WireError("malformed", "the frame has bytes after its last tensor")

    def _check_zeros(self, start: int, stop: int) -> None:
        if self.view[start:stop].tobytes().strip(b"\0"):
            raise WireError("malformed", "the padding of the frame must be zero")
