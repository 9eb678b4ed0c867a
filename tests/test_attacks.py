"""attacks: what a stranger may send to a real worker. Each is refused, costs little, and leaves nothing behind."""

from __future__ import annotations

import base64
import contextlib
import itertools
import socket
import statistics
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgpack
import numpy as np
import pytest

from kvfold_client import Client, errors, wire
from kvfold_client.wire import FRAME, MSGPACK
from kvfold_kernels import backends
from tests.http_cases import assert_refused, said
from tests.service_cases import CSA, HCA, RATIO, Process, make_worker, run, step_body, stream

A, B, ADMIN = "token-of-a-0000000", "token-of-b-0000000", "token-of-admin-000"
MIB = 1 << 20
PATIENCE = 1.5
STEP_IDS = (f"n{i}" for i in itertools.count())


class Target(Process):
    def post(self, path: str, body: dict[str, Any] | bytes, encoding: str = MSGPACK, token: str = A) -> httpx.Response:
        content = wire.encode(encoding, body) if isinstance(body, dict) else body
        headers = {"content-type": encoding, "authorization": f"Bearer {token}"}
        return self.http.post(path, content=content, headers=headers)

    def step(self, id: str, start: int, num_tokens: int) -> dict[str, Any]:
        response = self.post("/v1/step", step_body([(id, start, num_tokens)], step_id=next(STEP_IDS)))
        assert response.status_code == 200, said(response)
        return said(response)["requests"][0]["compressors"]

    def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.settimeout(20)
        return connection

    def rss(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) << 10

    def whole(self) -> bool:
        told = self.http.get("/v1/integrity", headers={"authorization": f"Bearer {ADMIN}"}).raise_for_status().json()
        return told == {"status": "ok", "bodies": 0, "staging_bytes": 0, "replies": 0}


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("worker")
    (folder / "tokens").write_text(f"{A} a step,pull\n{B} b step,pull\n{ADMIN} c admin\n")
    flags = [f"--token-file={folder / 'tokens'}", f"--receive-timeout={PATIENCE}", f"--max-body-bytes={16 * MIB}"]
    process = Target(folder, *flags, "--max-step-tokens=128", "--max-requests=8", "--pages=16")
    with httpx.Client(base_url=process.url, timeout=30) as process.http:
        yield process
        assert process.end() == 0


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(target):
    """Whatever a test sent: no body and no reply is held any more, every book agrees, and a step is right."""
    yield
    until = time.monotonic() + 10
    while not target.whole():
        assert time.monotonic() < until
        time.sleep(0.02)
    parts = target.step("proof", 0, 24)
    expected = make_worker(backends.load("cpu"))
    run(expected, [("proof", 0, 24)])
    for name, part in parts.items():
        read = said(target.post("/v1/pages/read", {"version": 1, "handles": part["pages"]}))["pages"]
        pages = expected.read_pages(expected.request("proof")["compressors"][name]["pages"])["pages"]
        assert [bytes(page["data"]) for page in read] == [bytes(page["data"]) for page in pages]
    headers = {"authorization": f"Bearer {A}"}
    assert target.http.delete("/v1/requests/proof", headers=headers).status_code == 204
    stats = target.http.get("/v1/stats", headers={"authorization": f"Bearer {ADMIN}"}).json()
    assert stats["requests"]["live"] == 0
    assert {pool["used"] for pool in stats["pools"].values()} == {0}


@pytest.fixture
def handle(target) -> Iterator[str]:
    yield target.step("r", 0, 8)[HCA]["pages"][0]
    target.http.delete("/v1/requests/r", headers={"authorization": f"Bearer {A}"})


def read(target: Target, handle: str, token: str = A, call: str = "pages/read") -> httpx.Response:
    return target.post(f"/v1/{call}", {"version": 1, "handles": [handle]}, token=token)


# -- handles -------------------------------------------------------------------------------------------------------


def test_a_handle_with_any_bit_flipped(target, handle):
    raw = bytearray(base64.urlsafe_b64decode(handle))
    unknown = read(target, "A" * 52)
    assert_refused(unknown, "unknown_handle")
    for bit in range(0, 8 * len(raw), 3):
        forged = raw.copy()
        forged[bit // 8] ^= 1 << bit % 8
        assert read(target, base64.urlsafe_b64encode(forged).decode()).content == unknown.content
    assert read(target, handle).status_code == 200


@pytest.mark.parametrize("call", ["pages/read", "verify"])
def test_what_is_no_handle(target, handle, call):
    wrongs = ["", " ", handle + "=", handle + " ", " " + handle, handle[:-1], handle + "A", handle * 2, handle[::-1]]
    wrongs += [handle.swapcase(), "../../etc/passwd", "%00", "\0" * 52, "é" * 52, "٣" * 52, "A" * 100_000, "=" * 52]
    told = {read(target, wrong, call=call).content for wrong in wrongs}
    assert len(told) == 1
    assert wire.decode(MSGPACK, told.pop())["code"] == "unknown_handle"


def test_another_tenant_is_told_the_same_in_the_same_time(target, handle):
    """Foreign, forged and unknown; body, status and, as far as it can be seen from here, time."""
    kinds = {"foreign": (handle, B), "forged": (handle[:-4] + "AAAA", A), "unknown": ("A" * 52, A)}
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    bodies = set()
    for _, (kind, (name, token)) in itertools.product(range(60), kinds.items()):
        began = time.perf_counter()
        bodies.add(read(target, name, token).content)
        times[kind].append(time.perf_counter() - began)
    assert len(bodies) == 1
    medians = [statistics.median(measured) for measured in times.values()]
    assert max(medians) < 2 * min(medians), times
    gets = [target.http.get(f"/v1/requests/{id}", headers={"authorization": f"Bearer {B}"}) for id in ("r", "none")]
    assert gets[0].content == gets[1].content


def test_a_handle_that_is_replayed_after_its_page_was_given_to_another(target, handle):
    target.http.delete("/v1/requests/r", headers={"authorization": f"Bearer {A}"})
    taken = target.step("s", 0, 8)[HCA]["pages"]
    assert handle not in taken
    assert_refused(read(target, handle), "stale_handle")
    both = target.post("/v1/pages/read", {"version": 1, "handles": [*taken, handle]})
    assert_refused(both, "stale_handle")
    target.http.delete("/v1/requests/s", headers={"authorization": f"Bearer {A}"})


# -- messages ------------------------------------------------------------------------------------------------------

BOMBS = {
    "arrays in arrays": b"\x91" * 200_000 + b"\xc0",
    "maps in maps": b"\x81\xa1a" * 100_000 + b"\xc0",
    "an array of 2^32 − 1": b"\xdd\xff\xff\xff\xff",
    "a map of 2^32 − 1": b"\xdf\xff\xff\xff\xff",
    "a text of 2^32 − 1": b"\xdb\xff\xff\xff\xff",
    "bytes of 2^32 − 1": b"\xc6\xff\xff\xff\xff",
    "long arrays in an array": b"\x81\xa1a\xdd\x00\x00\x08\x00" + b"\xdd\x00\x1f\xff\xff" * 2048,
    "too many elements": b"\x81\xa1a\xdd\x00\x20\x00\x01" + b"\xc0" * ((1 << 21) + 1),
    "an extension": msgpack.packb({"version": msgpack.ExtType(5, b"x")}),
    "an extension of 2^32 − 1": b"\x81\xa1a\xc9\xff\xff\xff\xff\x05",
    "a timestamp": msgpack.packb({"version": msgpack.Timestamp(1, 2)}),
    "a key twice": b"\x82\xa7version\x01\xa7version\x01",
    "a key that is no text": b"\x81\x01\x02",
    "a key that is an array": b"\x81\x91\x01\x02",
    "text that is no UTF-8": b"\x81\xa1\xff\x01",
    "the reserved byte": b"\x81\xa1a\xc1",
    "two messages": msgpack.packb({"version": 1}) * 2,
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs(target, name):
    bomb, before = BOMBS[name], target.rss()
    header = b"KVF1" + struct.pack("<HHI", 1, 0, len(bomb)) + bomb
    for body, encoding in ((bomb, MSGPACK), (header + bytes(-len(header) % 64), FRAME)):
        for path in ("/v1/step", "/v1/pages/read", "/v1/import", "/v1/requests/r/export"):
            began = time.monotonic()
            assert_refused(target.post(path, body, encoding), "malformed", encoding)
            assert time.monotonic() - began < 5
    assert target.rss() - before < 64 * MIB


def test_a_frame_s_header_of_10_mib(target):
    text = msgpack.packb({"version": 1, "handles": ["x" * (10 * MIB)]})
    frame = b"KVF1" + struct.pack("<HHI", 1, 0, len(text)) + text
    assert_refused(target.post("/v1/pages/read", frame + bytes(-len(frame) % 64), FRAME), "malformed", FRAME)
    assert_refused(target.post("/v1/pages/read", text), "unknown_handle")


def framed(**changes: Any) -> bytes:
    """A step of one tensor as a frame, with fields of the tensor's map changed; `at`: lines of zeros behind it."""
    body = step_body([("r", 0, 8)], [HCA])
    rows = bytes(body["tensors"][0].pop("data"))
    body["tensors"][0] |= {"offset": 512, "nbytes": len(rows)} | changes
    more = body["tensors"][0].pop("second", None)
    if more is not None:
        body["tensors"].append(body["tensors"][0] | {"compressor": CSA} | more)
    header = msgpack.packb(body)
    assert 12 + len(header) <= 512
    return (b"KVF1" + struct.pack("<HHI", 1, 0, len(header)) + header).ljust(512, b"\0") + rows


@pytest.mark.parametrize(
    ("changes", "codes"),
    [
        ({"offset": 0}, {"malformed"}),
        ({"offset": 448}, {"malformed"}),
        ({"offset": 513}, {"malformed"}),
        ({"offset": -64}, {"malformed"}),
        ({"offset": 1 << 62}, {"malformed"}),
        ({"offset": (1 << 64) - 64}, {"malformed"}),
        ({"offset": 512.0}, {"malformed"}),
        ({"nbytes": 1 << 63}, {"malformed"}),
        ({"nbytes": -1}, {"malformed"}),
        ({"nbytes": 64}, {"malformed", "bad_shape"}),
        ({"shape": [1 << 62, 1 << 62]}, {"bad_shape"}),
        ({"shape": [8, (1 << 64) - 1]}, {"bad_shape"}),
        ({"shape": [0, 1 << 62]}, {"bad_shape"}),
        ({"shape": [-8, -256]}, {"malformed", "bad_shape"}),
        ({"shape": [8, 256, 1, 1, 1]}, {"malformed", "bad_shape"}),
        ({"shape": [[8, 256]]}, {"malformed"}),
        ({"dtype": "fp64"}, {"bad_dtype"}),
        ({"dtype": "object"}, {"bad_dtype"}),
        ({"data": b"x"}, {"malformed"}),
        ({"second": {}}, {"malformed"}),
        ({"second": {"offset": 576}}, {"malformed"}),
        ({"second": {"nbytes": 0, "shape": [0, 512]}}, {"malformed", "bad_shape"}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_tensors_that_overlap_or_reach_out(target, changes, codes):
    response = target.post("/v1/step", framed(**changes), FRAME)
    assert said(response)["code"] in codes, said(response)
    assert 400 <= response.status_code < 500


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"positions": [(1 << 64) - 8 + i for i in range(8)]}, "bad_positions"),
        ({"positions": [-1, *range(7)]}, "bad_positions"),
        ({"positions": {"dtype": "uint64", "shape": [8], "data": bytes(64)}}, "bad_dtype"),
        ({"positions": {"dtype": "int64", "shape": [8], "data": b"\xff" * 64}}, "bad_positions"),
        ({"positions": [float(i) for i in range(8)]}, "malformed"),
        ({"positions": [False, True, *range(2, 8)]}, "malformed"),
        ({"query_start_loc": [0, 1 << 63]}, "bad_query_start_loc"),
        ({"query_start_loc": [0, -8]}, "bad_query_start_loc"),
        ({"requests": [{"id": "r", "start": 1 << 63, "num_tokens": 8}]}, "bad_positions"),
        ({"requests": [{"id": "r", "start": (1 << 63) - 1, "num_tokens": 8}]}, "bad_positions"),
        ({"requests": [{"id": "r", "start": 0, "num_tokens": 1 << 63}]}, "bad_query_start_loc"),
        ({"requests": [{"id": "r", "start": -1, "num_tokens": 8}]}, "bad_positions"),
        ({"draft_tokens": [1 << 63]}, "malformed"),
        ({"tensors": []}, "malformed"),
        ({"tenant": "b"}, "malformed"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)
def test_numbers_that_do_not_fit(target, changes, code):
    assert_refused(target.post("/v1/step", step_body([("r", 0, 8)]) | changes), code)


@pytest.mark.parametrize(
    ("value", "column", "code"),
    [
        (np.nan, 0, "non_finite"),
        (np.nan, -1, "non_finite"),
        (np.inf, 0, "non_finite"),
        (-np.inf, 0, "non_finite"),
        (np.inf, -1, "non_finite"),
        (-np.inf, -1, None),
        (-0.0, 0, None),
        (-0.0, -1, None),
        (np.finfo(np.float32).max, 0, None),
        (np.float32(1e-45), 0, None),
    ],
)
def test_values(target, value, column, code):
    """At the last row of an otherwise good step; whatever is taken leaves no NaN byte in what is read."""
    body = step_body([("r", 0, 8)], [CSA], step_id=next(STEP_IDS))
    rows = stream(CSA, "r")[:8].copy()
    rows[7, column] = value
    body["tensors"][0]["data"] = rows.tobytes()
    response = target.post("/v1/step", body)
    if code:
        assert_refused(response, code, row=7, column=column % rows.shape[1])
        assert_refused(target.http.get("/v1/requests/r", headers={"authorization": f"Bearer {A}"}), "unknown_request")
        return
    part = said(response)["requests"][0]["compressors"][CSA]
    assert part["num_entries"] == 8 // RATIO[CSA]
    for page in said(target.post("/v1/pages/read", {"version": 1, "handles": part["pages"]}))["pages"]:
        values = np.frombuffer(page["data"], np.uint8)[:64]  # the first block of fp8 values
        assert not np.isin(values, [0x7F, 0xFF]).any()
    target.http.delete("/v1/requests/r", headers={"authorization": f"Bearer {A}"})


WRONG_IDS = [
    "",
    "é",
    "日本",
    "a b",
    "a/b",
    "../../etc/passwd",
    "..\\x",
    "\0",
    "a\n",
    "a" * 129,
    "%2e%2e",
    "٣",
    "a\u202e",
]


@pytest.mark.parametrize("id", WRONG_IDS, ids=ascii)
def test_ids_that_are_none(target, id):
    good = step_body([("r", 0, 8)])
    for body in (
        good | {"step_id": id},
        good | {"requests": [{"id": id, "start": 0, "num_tokens": 8}]},
    ):
        error = assert_refused(target.post("/v1/step", body), "malformed")
        assert len(error["message"]) < 300
    path = "/v1/requests/" + "".join(f"%{byte:02X}" for byte in id.encode())
    response = target.http.get(path, headers={"authorization": f"Bearer {A}"})
    assert response.status_code in (404, 405)


@pytest.mark.parametrize("id", [".", "..", "...", "-", "@:._-", "a" * 128, "None", "__proto__"])
def test_ids_that_look_odd_and_are_good(target, id):
    with Client(target.url, A) as client:
        client.step([(id, 0, 8)], {HCA: stream(HCA, "r")[:8]})
        assert client.request(id)[HCA].committed == 8
        client.release(id)
        with pytest.raises(errors.UnknownRequest):
            client.request(id)


# -- HTTP itself ---------------------------------------------------------------------------------------------------

HEAD = f"POST /v1/step HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {A}\r\nContent-Type: {FRAME}\r\n"


def flood(connection: socket.socket, piece: bytes, num_bytes: int) -> int:
    """Send until the worker has had enough; how many bytes it took."""
    sent = 0
    with contextlib.suppress(ConnectionError):
        while sent < num_bytes:
            connection.sendall(piece)
            sent += len(piece)
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(65536):
            pass
    return sent


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        ("GET /livez HTTP/1.1\r\nX: ", b"a" * 65536),
        ("GET /livez HTTP/1.1\r\n", b"X-a: b\r\n" * 8192),
        ("GET /", b"a" * 65536),
        (f"{HEAD}Transfer-Encoding: chunked\r\n\r\n1;", b"a" * 65536),
        (f"{HEAD}Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nX: ", b"a" * 65536),
        (f"{HEAD}Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n", b"X-a: b\r\n" * 8192),
    ],
    ids=["a header", "headers", "a path", "a chunk extension", "a trailer", "trailers"],
)
def test_10_mib_around_a_body(target, head, piece):
    before = target.rss()
    with target.connect() as connection:
        connection.sendall(head.encode())
        assert flood(connection, piece, 10 * MIB) < 10 * MIB
    assert target.rss() - before < 8 * MIB


@pytest.mark.parametrize(
    "length",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: -1",
        "Content-Length: 1e3",
        "Content-Length: 0x10",
        f"Content-Length: {1 << 64}",
        f"Content-Length: {'9' * 5000}",
        "Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n",
        "Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        "Transfer-Encoding: gzip",
    ],
)
def test_lengths_that_can_be_read_in_two_ways(target, length):
    with target.connect() as connection:
        connection.sendall(f"{HEAD}{length}\r\n\r\nabcdefGET /livez HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        with contextlib.suppress(ConnectionError):
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
            assert answer.startswith(b"HTTP/1.1 4")
            assert b"200 OK" not in answer


@pytest.mark.parametrize("start", ["", "GET /livez HT", f"{HEAD}Content-Length: 1000\r\n\r\nKVF1", f"{HEAD}Content-Le"])
def test_who_says_nothing_more_is_shown_out(target, start):
    """Before, amid and behind the head; with a word if there is somebody to tell."""
    began = time.monotonic()
    with target.connect() as connection:
        connection.sendall(start.encode())
        with contextlib.suppress(ConnectionError):
            while connection.recv(65536):
                pass
    assert time.monotonic() - began < 4 * PATIENCE + 5


def test_clients_that_die_amid_their_bodies(target):
    for size in itertools.islice(itertools.cycle((0, 1, 4096, 70_000)), 40):
        with target.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, not closed
            length = "Transfer-Encoding: chunked\r\n\r\n40000\r\n" if size % 2 else "Content-Length: 262144\r\n\r\n"
            connection.sendall(f"{HEAD}{length}".encode() + bytes(size))
