"""wire: both encodings carry the same message, and nothing but WireError comes out of bytes that are none."""

import struct
import time

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfold_client import wire
from kvfold_client.wire import FRAME, FRAME_ALIGN, MSGPACK, WireError

ENCODINGS = pytest.mark.parametrize("encoding", [MSGPACK, FRAME])

scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text()
plain = st.recursive(
    scalars | st.binary(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5).map("x".__add__), inner, max_size=4)
    ),
    max_leaves=8,
)


@st.composite
def tensors(draw):
    dtype = draw(st.sampled_from(sorted(wire.ITEM_BYTES)))
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    num_bytes = int(np.prod(shape, dtype=int)) * wire.ITEM_BYTES[dtype]
    return wire.tensor_map(dtype, shape, draw(st.binary(min_size=num_bytes, max_size=num_bytes)), compressor="a")


messages = st.builds(
    lambda fields, listed, named: {**fields, "tensors": listed, "named": named},
    st.dictionaries(st.text(max_size=5).map("x".__add__), scalars | st.lists(scalars, max_size=4), max_size=4),
    st.lists(tensors(), max_size=4),
    st.dictionaries(st.text(max_size=3), tensors(), max_size=2),
)


def frame(header, tail=b"", *, magic=b"KVF1", version=1, flags=0, header_bytes=None, pad=b"\0"):
    """A frame by hand: `tail` begins at the first multiple of 64 behind the header."""
    packed = header if isinstance(header, bytes) else msgpack.packb(header)
    prefix = struct.pack("<4sHHI", magic, version, flags, len(packed) if header_bytes is None else header_bytes)
    return prefix + packed + (pad * (-(12 + len(packed)) % FRAME_ALIGN) + tail if tail or pad != b"\0" else b"")


def placed(offset, nbytes, **extra):
    return {"dtype": "uint8", "shape": [nbytes], "offset": offset, "nbytes": nbytes, **extra}


def refusal(encoding, body):
    with pytest.raises(WireError) as caught:
        wire.decode(encoding, body)
    assert caught.value.message == str(caught.value)
    return caught.value.code, caught.value.message


@ENCODINGS
@given(message=messages)
def test_round_trip(encoding, message):
    assert wire.decode(encoding, wire.encode(encoding, message)) == message  # a memoryview equals its bytes


@given(message=messages)
def test_frame_layout_is_the_contracts(message):
    body = wire.encode(FRAME, message)
    magic, version, flags, header_bytes = struct.unpack_from("<4sHHI", body)
    assert (magic, version, flags) == (b"KVF1", 1, 0)
    header = msgpack.unpackb(body[12 : 12 + header_bytes])
    end = 12 + header_bytes
    for written, given_ in zip(header["tensors"], message["tensors"], strict=True):
        assert "data" not in written
        assert written["offset"] == -(-end // 64) * 64
        assert not any(body[end : written["offset"]])
        end = written["offset"] + written["nbytes"]
        assert body[written["offset"] : end] == given_["data"]


@ENCODINGS
@given(
    message=st.dictionaries(st.text(max_size=5).map("x".__add__), scalars | st.lists(scalars, max_size=4), max_size=4)
)
def test_a_plain_message_is_encoded_the_same(encoding, message):
    assert wire.encode_plain(encoding, message) == wire.encode(encoding, message)


def test_a_plain_header_is_bounded_too():
    with pytest.raises(WireError, match="header"):
        wire.encode_plain(FRAME, {"x": "y" * wire.MAX_HEADER_BYTES})


def test_frame_offsets_settle_around_every_header_length():
    for length in range(400):
        message = {"pad": "x" * length, "tensors": [wire.tensor_map("uint8", [3], b"abc") for _ in range(3)]}
        assert wire.decode(FRAME, wire.encode(FRAME, message)) == message


def test_frame_tensors_are_not_copied():
    rows = np.arange(1000, dtype=np.float32)
    parts = wire.encode_parts(FRAME, {"t": wire.tensor_map("fp32", [1000], rows.data)})
    assert any(np.shares_memory(np.frombuffer(part, np.uint8), rows) for part in parts if len(part) == rows.nbytes)
    body = bytearray(b"".join(parts))
    tensor = wire.tensor_of(wire.decode(FRAME, body)["t"], "t")
    body[-4:] = struct.pack("<f", 7.0)
    assert np.frombuffer(tensor.data, np.float32)[-1] == 7.0


@ENCODINGS
def test_buffers_of_any_kind(encoding):
    rows = np.arange(6, dtype=np.int32).reshape(2, 3)
    for data in (rows.data, bytearray(rows.tobytes()), memoryview(rows.tobytes()), np.ascontiguousarray(rows)):
        decoded = wire.decode(encoding, wire.encode(encoding, {"t": wire.tensor_map("int32", [2, 3], data)}))
        assert wire.tensor_of(decoded["t"], "t").data == rows.tobytes()
    with pytest.raises(WireError, match="C-contiguous"):
        wire.encode(encoding, {"t": wire.tensor_map("int32", [3, 2], rows.T.data)})


def test_prefix_is_checked():
    assert refusal(FRAME, frame({}, magic=b"KVF2"))[0] == "malformed"
    assert refusal(FRAME, frame({}, version=2))[0] == "unsupported_version"
    assert refusal(FRAME, frame({}, flags=1))[1] == "the frame's flags must be 0"
    assert "at most" in refusal(FRAME, frame({}, header_bytes=wire.MAX_HEADER_BYTES + 1))[1]
    assert "ends inside its header" in refusal(FRAME, frame({}, header_bytes=100))[1]
    assert "ends inside its prefix" in refusal(FRAME, b"KVF1\1\0\0\0\0\0\0")[1]


def test_every_truncation_is_refused():
    body = wire.encode(FRAME, {"a": 1, "t": wire.tensor_map("uint8", [70], bytes(range(70)))})
    for length in range(len(body)):
        assert refusal(FRAME, body[:length])[0] == "malformed"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (frame({"t": placed(65, 4)}, bytes(5)), "multiple of 64"),
        (frame({"t": placed(0, 4)}, bytes(4)), "behind the header"),
        (frame({"t": placed(-64, 4)}, bytes(4)), "behind the header"),
        (frame({"t": placed(64, 5)}, bytes(4)), "past the end"),
        (frame({"t": placed(2**63, 2**63)}, bytes(4)), "past the end"),
        (frame({"t": placed(64, 3)}, bytes(4)), "after its last tensor"),
        (frame({}, bytes(64)), "after its last tensor"),
        (frame({"a": placed(64, 4), "b": placed(128, 4)}, bytes(4)), "behind the header"),
        (frame({"a": placed(128, 4), "b": placed(128, 4)}, bytes(4)), "overlap"),
        (frame({"a": placed(128, 65), "b": placed(192, 4)}, bytes(68)), "overlap"),
        (frame({"t": placed(64, 4)}, bytes(4), pad=b"\1"), "must be zero"),
        (frame({}, pad=b"\1"), "must be zero"),
        (frame({"a": placed(128, 4), "b": placed(192, 4)}, bytes(4) + b"\1" + bytes(63)), "must be zero"),
        (frame({"t": placed(64, 4, data=b"abcd")}, bytes(4)), "either data or offset"),
        (frame({"t": placed(64, 4.0)}, bytes(4)), "non-negative integers"),
        (frame({"t": placed(64, True)}, bytes(1)), "non-negative integers"),
        (frame({"t": {"dtype": "uint8", "shape": [4], "offset": 64}}, bytes(4)), "non-negative integers"),
        (frame({"t": {"dtype": "uint8", "shape": [4], "data": "abcd"}}), "must be binary"),
        (frame([]), "must be a map"),
        (frame(b""), "ends early"),
        (frame(b"\x80\x80"), "extra data"),
    ],
)
def test_bad_frames(body, sentence):
    code, message = refusal(FRAME, body)
    assert code == "malformed"
    assert sentence in message


def test_frame_may_be_padded_without_tensors():
    assert wire.decode(FRAME, frame({"a": 1})) == {"a": 1}
    assert wire.decode(FRAME, wire.encode(FRAME, {"a": 1}) + bytes(64 - 16)) == {"a": 1}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "ends early"),
        (b"\xc1", "not msgpack"),
        (b"\x90", "must be a map"),
        (b"\x82\xa1a\x01\xa1a\x02", "a key twice"),
        (b"\x81\x01\x01", "map key"),
        (b"\x81\xc4\x01a\x01", "must be strings"),
        (b"\x81\xa1a\xa1\xff", "not UTF-8"),
        (b"\x81\xa1a\xd4\x01z", "max_ext_len"),
        (b"\x81\xa1a\xc7\x00\x01", "extension type"),
        (msgpack.packb({"a": msgpack.Timestamp(1)}), "max_ext_len"),
        (msgpack.packb({"t": {"dtype": "uint8", "shape": [1], "data": "a"}}), "must be binary"),
        (msgpack.packb({"t": placed(64, 4)}), "not offset"),
    ],
)
def test_bad_msgpack(body, sentence):
    code, message = refusal(MSGPACK, body)
    assert code == "malformed"
    assert sentence in message


@ENCODINGS
def test_depth_is_bounded(encoding):
    def nested(depth):
        return {"a": nested(depth - 1)} if depth % 2 and depth > 1 else [nested(depth - 1)] if depth > 1 else {}

    deep = {"a": nested(wire.MAX_DEPTH - 1)}
    assert wire.decode(encoding, wire.encode(encoding, deep)) == deep
    assert "deep" in refusal(encoding, wire.encode(encoding, {"a": nested(wire.MAX_DEPTH)}))[1]


@pytest.mark.parametrize(
    "body",
    [
        b"\xdf\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff" * 1000,
        (b"\xdd" + struct.pack(">I", 1 << 20)) * 1000 + bytes(1 << 20),
        (b"\xde\x10\x00\xa1a") * 900,
        b"\x91" * 1_000_000,
        b"\x81\xa1a" * 300_000,
        b"\xc6\xff\xff\xff\xff",
        b"\x81\xa1a\xdd" + struct.pack(">I", 1_500_000) + b"\x90" * 1_500_000,
    ],
)
def test_bombs_are_refused_cheaply(body):
    start = time.process_time()
    assert refusal(MSGPACK, body)[0] == "malformed"
    assert time.process_time() - start < 2.0


@ENCODINGS
def test_long_lists_pass(encoding):
    message = {"positions": list(range(100_000)), "requests": [{"id": str(i)} for i in range(20_000)]}
    start = time.process_time()
    assert wire.decode(encoding, wire.encode(encoding, message)) == message
    assert time.process_time() - start < 5.0


def test_another_encoding():
    assert refusal("application/json", b"{}")[0] == "unsupported_encoding"
    with pytest.raises(WireError):
        wire.encode("application/json", {})


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ([1], "malformed"),
        ({"dtype": "uint8", "shape": [1]}, "malformed"),
        ({"dtype": 1, "shape": [1], "data": b"a"}, "malformed"),
        ({"dtype": "fp64", "shape": [1], "data": bytes(8)}, "bad_dtype"),
        ({"dtype": "uint8", "shape": 1, "data": b"a"}, "malformed"),
        ({"dtype": "uint8", "shape": [True], "data": b"a"}, "malformed"),
        ({"dtype": "uint8", "shape": [1.0], "data": b"a"}, "malformed"),
        ({"dtype": "uint8", "shape": [-1], "data": b"a"}, "malformed"),
        ({"dtype": "uint8", "shape": [1] * 5, "data": b"a"}, "malformed"),
        ({"dtype": "uint8", "shape": [2], "data": b"a"}, "bad_shape"),
        ({"dtype": "bf16", "shape": [1], "data": b"a"}, "bad_shape"),
        ({"dtype": "int64", "shape": [2**62, 2**62], "data": b""}, "bad_shape"),
        ({"dtype": "uint8", "shape": [1], "data": 7}, "malformed"),
    ],
)
def test_tensor_of_refuses(value, code):
    with pytest.raises(WireError, match="the rows") as caught:
        wire.tensor_of(value, "the rows")
    assert caught.value.code == code


def test_tensor_of():
    tensor = wire.tensor_of(wire.tensor_map("bf16", (2, 3), bytes(range(12)), compressor="a"), "the rows")
    assert (tensor.dtype, tensor.shape, tensor.data) == ("bf16", (2, 3), bytes(range(12)))
    assert wire.tensor_of(wire.tensor_map("fp32", [], bytes(4)), "a scalar").shape == ()


def decode_or_refuse(encoding, body):
    """The code of the refusal; "malformed" too for a message, which must then survive a round trip."""
    try:
        message = wire.decode(encoding, body)
    except WireError as error:
        return error.code
    assert wire.decode(encoding, wire.encode(encoding, message)).keys() == message.keys()
    return "malformed"


@settings(max_examples=2000)
@given(body=st.binary(max_size=200), encoding=st.sampled_from([MSGPACK, FRAME]))
def test_fuzz_bytes(body, encoding):
    assert decode_or_refuse(encoding, body) == "malformed"


@settings(max_examples=1000)
@given(header=st.binary(max_size=100) | plain.map(msgpack.packb), tail=st.binary(max_size=100))
def test_fuzz_headers(header, tail):
    assert decode_or_refuse(FRAME, frame(header, tail)) == "malformed"
    assert decode_or_refuse(MSGPACK, header) == "malformed"


@settings(max_examples=2000)
@given(
    message=messages,
    encoding=st.sampled_from([MSGPACK, FRAME]),
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4),
    cut=st.none() | st.integers(0, 10**6),
)
def test_fuzz_mutations(message, encoding, changes, cut):
    body = bytearray(wire.encode(encoding, message))
    for position, byte in changes:
        body[position % len(body)] = byte
    code = decode_or_refuse(encoding, body if cut is None else body[: cut % len(body)])
    assert code in {"malformed", "unsupported_version"}
