"""client: one suite over both clients, against a transport that remembers what was sent."""

import asyncio
import http.server
import inspect
import json
import pickle
import random
import subprocess
import sys
import threading

import httpx
import ml_dtypes
import numpy as np
import pytest

from kvfold_client import calls, client, codes, entries, errors, exchange, wire
from kvfold_client.replies import CompressorState, Exported, ExportedCompressor

ENCODINGS = pytest.mark.parametrize("encoding", ["frame", "msgpack"])
STATE = {"committed": 130, "open_tokens": 2, "num_entries": 1, "new_entries": [0, 1], "pages": ["H"]}
PARSED = CompressorState(130, 2, 1, (0, 1), ("H",))


class Worker:
    """Answers with what a test has queued; a queued exception is raised as the network would."""

    def __init__(self):
        self.requests, self.answers, self.waits = [], [], []

    def __call__(self, request):
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        if callable(answer):
            return answer(request)
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    def sent(self, index=-1):
        request = self.requests[index]
        return wire.decode(request.headers["content-type"], request.content)


def reply(message, status=200, encoding=wire.FRAME, **headers):
    content = wire.encode(encoding, message)
    return httpx.Response(status, content=content, headers={"content-type": encoding, **headers})


def refuse(code, retryable=None, details=None, **headers):
    retryable = code in codes.RETRYABLE if retryable is None else retryable
    fields = {"code": code, "message": "no", "retryable": retryable, "details": details or {}}
    return reply(fields, codes.STATUS[code], **headers)


def step_answer(request):
    message = wire.decode(request.headers["content-type"], request.content)
    return reply(
        {
            "version": 1, "step_id": message["step_id"], "epoch": "e", "compat": "c", "launches": 1, "skipped": ["b"],
            "requests": [{"id": r["id"], "compressors": {"a": STATE}} for r in message["requests"]],
            "timings_us": {"kernel": 5},
        },
        encoding=request.headers["accept"],
    )  # fmt: skip


@pytest.fixture
def worker():
    return Worker()


@pytest.fixture(params=["sync", "async"])
def connect(request, worker, monkeypatch):
    """connect(**options) → a client whose calls return results, whichever of the two it is."""
    monkeypatch.setattr(client.time, "sleep", worker.waits.append)

    async def no_wait(seconds):
        worker.waits.append(seconds)

    monkeypatch.setattr(client.asyncio, "sleep", no_wait)
    if request.param == "sync":

        def open_client(**options):
            return client.Client("http://worker", transport=httpx.MockTransport(worker), **options)

        yield open_client
        return

    loop = asyncio.new_event_loop()

    class Blocking:
        def __init__(self, **options):
            self._client = client.AsyncClient("http://worker", transport=httpx.MockTransport(worker), **options)

        def __getattr__(self, name):
            return lambda *args, **kwargs: loop.run_until_complete(getattr(self._client, name)(*args, **kwargs))

    yield Blocking
    loop.close()


def rows(num_tokens=3, width=4):
    return np.arange(num_tokens * width, dtype=np.float32).reshape(num_tokens, width)


@ENCODINGS
def test_step(connect, worker, encoding):
    worker.answers = [step_answer]
    result = connect(encoding=encoding, token="secret").step(
        [("r1", 5, 2), ("r2", 0, 1)], {"a": rows(4)}, step_id="s", draft_tokens=[1, 0], compat="c", pages="all"
    )
    assert result.requests == {"r1": {"a": PARSED}, "r2": {"a": PARSED}}
    assert (result.step_id, result.epoch, result.compat, result.launches) == ("s", "e", "c", 1)
    assert (result.skipped, result.timings_us) == (("b",), {"kernel": 5})
    request, sent = worker.requests[0], worker.sent()
    assert (request.method, request.url.path) == ("POST", "/v1/step")
    assert request.headers["authorization"] == "Bearer secret"
    assert request.headers["accept"] == request.headers["content-type"] == exchange.ENCODINGS[encoding]
    assert int(request.headers["content-length"]) == len(request.content)
    assert "transfer-encoding" not in request.headers
    assert sent["requests"] == [{"id": "r1", "start": 5, "num_tokens": 2}, {"id": "r2", "start": 0, "num_tokens": 1}]
    assert np.frombuffer(sent["query_start_loc"]["data"], np.int64).tolist() == [0, 2, 3]
    assert np.frombuffer(sent["positions"]["data"], np.int64).tolist() == [5, 6, 0, 0]  # the last is padding
    assert {key: sent[key] for key in ("version", "pages", "draft_tokens", "compat")} == {
        "version": 1, "pages": "all", "draft_tokens": [1, 0], "compat": "c",
    }  # fmt: skip
    (tensor,) = sent["tensors"]
    assert (tensor["compressor"], tensor["dtype"], tensor["shape"]) == ("a", "fp32", [4, 4])
    assert tensor["data"] == rows(4).tobytes()


def test_step_defaults(connect, worker):
    worker.answers = [step_answer]
    connected = connect()
    ids = {connected.step([("r", 0, 3)], {"a": rows()}).step_id for _ in range(5)}
    assert len(ids) == 5
    assert worker.sent().keys() == {
        "version", "step_id", "requests", "query_start_loc", "positions", "tensors", "pages"
    }  # fmt: skip
    connected.step([("r", np.int64(7), np.int32(1))], {}, positions=[9])
    assert worker.sent()["requests"] == [{"id": "r", "start": 7, "num_tokens": 1}]
    assert np.frombuffer(worker.sent()["positions"]["data"], np.int64).tolist() == [9]


def inputs():
    torch = pytest.importorskip("torch")
    values = rows()
    bits = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return {
        "float32": (values, "fp32", values),
        "big endian": (values.astype(">f4"), "fp32", values),
        "not contiguous": (np.asfortranarray(values), "fp32", values),
        "strided": (np.repeat(values, 2, axis=0)[::2], "fp32", values),
        "uint16": (bits, "bf16", bits),
        "ml_dtypes": (values.astype(ml_dtypes.bfloat16), "bf16", bits),
        "ml_dtypes, not contiguous": (np.asfortranarray(values.astype(ml_dtypes.bfloat16)), "bf16", bits),
        "torch fp32": (torch.from_numpy(values), "fp32", values),
        "torch bf16": (torch.from_numpy(values).bfloat16(), "bf16", bits),
        "torch, transposed": (torch.from_numpy(values.T.copy()).T, "fp32", values),
        "torch, with gradient": (torch.from_numpy(values).requires_grad_(), "fp32", values),
        "no rows": (values[:0], "fp32", values[:0]),
    }


@ENCODINGS
def test_inputs(connect, worker, encoding):
    worker.answers = [step_answer]
    for name, (array, dtype, expected) in inputs().items():
        connect(encoding=encoding).step([("r", 0, len(expected))], {"a": array})
        (tensor,) = worker.sent()["tensors"]
        assert (tensor["dtype"], tensor["shape"]) == (dtype, list(expected.shape)), name
        assert tensor["data"] == expected.tobytes(), name


def test_inputs_without_a_wire_dtype(connect, worker):
    torch = pytest.importorskip("torch")
    for array in (rows().astype(np.float64), rows().tolist(), torch.from_numpy(rows()).half()):
        with pytest.raises(TypeError):
            connect().step([("r", 0, 3)], {"a": array})
    with pytest.raises(ValueError, match="CPU"):
        connect().step([("r", 0, 3)], {"a": torch.empty(3, 4, device="meta")})
    assert not worker.requests


def test_pages_and_digests(connect, worker):
    data = bytes(range(64))
    page = wire.tensor_map("uint8", [64], data, handle="H", compressor="a", num_entries=1)
    worker.answers = [reply({"pages": [page]}), reply({"pages": [{"handle": "H", "num_entries": 1, "xxh3_64": 2**63}]})]
    connected = connect()
    (read,) = connected.read_pages(("H",))
    assert (read.handle, read.compressor, read.num_entries) == ("H", "a", 1)
    assert read.data.dtype == np.uint8
    assert read.data.tobytes() == data
    assert worker.sent() == {"version": 1, "handles": ["H"]}
    (digest,) = connected.verify(["H"])
    assert (digest.handle, digest.num_entries, digest.xxh3_64) == ("H", 1, 2**63)
    assert [request.url.path for request in worker.requests] == ["/v1/pages/read", "/v1/verify"]


def test_request_calls(connect, worker):
    state = {"id": "r", "compressors": {"a": {key: STATE[key] for key in STATE if key != "new_entries"}}}
    worker.answers = [reply(state), httpx.Response(204), reply(state), reply({"expires_in": 12})]
    connected = connect()
    without_step = {"a": CompressorState(130, 2, 1, None, ("H",))}
    assert connected.request("r:1") == without_step
    assert connected.release("r") is None
    assert connected.truncate("r", 128) == without_step
    assert worker.sent() == {"version": 1, "length": 128}
    assert connected.lease("r", 12.5) == 12.0
    assert worker.sent() == {"version": 1, "seconds": 12.5}
    assert [(request.method, request.url.path) for request in worker.requests] == [
        ("GET", "/v1/requests/r:1"),
        ("DELETE", "/v1/requests/r"),
        ("POST", "/v1/requests/r/truncate"),
        ("POST", "/v1/requests/r/lease"),
    ]


def test_ids_stay_inside_their_path(connect, worker):
    worker.answers = [httpx.Response(204)]
    for id in (".", "..", "a..", "A-z_0.9:@"):
        connect().release(id)
        assert worker.requests[-1].url.path == f"/v1/requests/{id}"
        assert worker.requests[-1].url.raw_path.decode().count("/") == 3
    for id in ("", "a/b", "a?b", "ä", "a\n", "x" * 129):
        with pytest.raises(ValueError, match="an id has"):
            connect().release(id)
    assert len(worker.requests) == 4


@ENCODINGS
@pytest.mark.parametrize("with_entries", [True, False])
def test_export_and_import(connect, worker, encoding, with_entries):
    open_rows = rows(2).astype(ml_dtypes.bfloat16).view(np.uint16)
    entry_rows = np.arange(2 * 584, dtype=np.uint32).astype(np.uint8).reshape(2, 584)
    part = {
        "committed": 130,
        "open_rows": wire.tensor_map("bf16", [2, 4], open_rows.tobytes()),
        "open_positions": [128, 129],
    }
    if with_entries:
        part["entries"] = wire.tensor_map("uint8", [2, 584], entry_rows.tobytes())
    answer = reply({"compat": "c", "compressors": {"a": part}})
    worker.answers = [answer, reply({"id": "s", "compressors": {"a": STATE}})]
    connected = connect(encoding=encoding)
    exported = connected.export("r", ["a"], entries=with_entries, from_entry=0)
    assert worker.sent() == {"version": 1, "entries": with_entries, "compressors": ["a"], "from_entry": 0}
    state = exported.compressors["a"]
    assert state.committed == 130
    np.testing.assert_array_equal(state.open_rows, open_rows)
    np.testing.assert_array_equal(state.open_positions, [128, 129])
    assert (state.entries is not None) == with_entries
    assert connected.import_("s", exported) == {"a": PARSED}
    sent = worker.sent()
    assert (sent["id"], sent["compat"], sent["version"]) == ("s", "c", 1)
    sent_part = sent["compressors"]["a"]
    assert sent_part["open_rows"] == part["open_rows"]
    assert sent_part.get("entries") == part.get("entries")
    assert np.frombuffer(sent_part["open_positions"]["data"], np.int64).tolist() == [128, 129]


def test_export_of_nothing(connect, worker):
    empty = {
        "committed": 0,
        "entries": wire.tensor_map("uint8", [0, 584], b""),
        "open_rows": wire.tensor_map("fp32", [0, 1024], b""),
        "open_positions": wire.tensor_map("int64", [0], b""),
    }
    worker.answers = [reply({"compat": "c", "compressors": {"a": empty}})]
    state = connect().export("r").compressors["a"]
    assert (state.entries.shape, state.open_rows.shape, state.open_positions.shape) == ((0, 584), (0, 1024), (0,))


def test_json_calls(connect, worker):
    worker.answers = [httpx.Response(200, json={"model": "tiny"}), httpx.Response(200, json={"used": 1})]
    connected = connect()
    assert connected.manifest() == {"model": "tiny"}
    assert connected.stats() == {"used": 1}
    assert [request.url.path for request in worker.requests] == ["/v1/manifest", "/v1/stats"]
    assert {request.headers["accept"] for request in worker.requests} == {"application/json"}


def test_probes(connect, worker):
    worker.answers = [
        httpx.Response(200, json={}),
        httpx.Response(503, json={"code": "not_ready", "message": "", "retryable": True, "details": {}}),
        httpx.ConnectError("refused"),
        refuse("unauthorized"),
    ]
    connected = connect()
    assert connected.live() is True
    assert connected.ready() is False
    assert connected.ready() is False
    with pytest.raises(errors.Unauthorized):
        connected.ready()
    assert [request.url.path for request in worker.requests] == ["/livez", "/readyz", "/readyz", "/readyz"]
    assert not worker.waits


@pytest.mark.parametrize("code", sorted(codes.STATUS))
def test_codes(connect, worker, code):
    worker.answers = [refuse(code, details={"expected": 3})]
    with pytest.raises(errors.error_for(code)) as caught:
        connect(retries=0).request("r")
    error = caught.value
    assert type(error).__name__.lower() == code.replace("_", "")
    assert (error.code, error.message, error.details) == (code, "no", {"expected": 3})
    assert (error.status, error.retryable) == (codes.STATUS[code], code in codes.RETRYABLE)
    copied = pickle.loads(pickle.dumps(error))
    assert (type(copied), vars(copied), str(copied)) == (type(error), vars(error), str(error))


def test_error_tree_is_the_docstrings():
    drawn = errors.__doc__
    classes = [value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)]
    assert len(classes) > len(codes.STATUS)
    assert all(cls.__name__ in drawn for cls in classes)
    assert all(issubclass(cls, errors.KvfoldError) for cls in classes)
    assert codes.RETRYABLE.issubset(codes.STATUS)


def test_unknown_code(connect, worker):
    worker.answers = [reply({"code": "later", "message": "m", "retryable": False, "details": {}}, 418)]
    with pytest.raises(errors.ApiError) as caught:
        connect().request("r")
    assert (type(caught.value), caught.value.code, caught.value.status) == (errors.ApiError, "later", 418)


@ENCODINGS
@pytest.mark.parametrize("failure", [refuse("queue_full"), httpx.ReadError("cut"), httpx.ReadTimeout("slow")])
def test_a_retried_step_is_the_same_bytes(connect, worker, encoding, failure):
    worker.answers = [failure, failure, step_answer]
    result = connect(encoding=encoding).step([("r", 0, 3)], {"a": rows()})
    assert len(worker.requests) == 3
    assert len({request.content for request in worker.requests}) == 1
    assert {worker.sent(i)["step_id"] for i in range(3)} == {result.step_id}
    first, second = worker.waits
    assert exchange.FIRST_WAIT_S <= first <= 1.5 * exchange.FIRST_WAIT_S
    assert 2 * exchange.FIRST_WAIT_S <= second <= 3 * exchange.FIRST_WAIT_S


def test_retries_end(connect, worker):
    worker.answers = [refuse("pool_exhausted")]
    with pytest.raises(errors.PoolExhausted):
        connect(retries=2).request("r")
    assert (len(worker.requests), len(worker.waits)) == (3, 2)


@pytest.mark.parametrize(
    "answer",
    [
        refuse("position_gap"),
        refuse("queue_full", retryable=False),
        httpx.Response(500, text="oops"),
        httpx.Response(302, headers={"location": "http://elsewhere"}),
        httpx.Response(200, text="hello"),
        httpx.Response(200, content=b"KVF1", headers={"content-type": wire.FRAME}),
        httpx.Response(200, content=b"{", headers={"content-type": "application/json"}),
        reply({"compressors": {"a": {}}}),
        reply({"compressors": 3}),
        httpx.Response(204),
    ],
)
def test_not_retried(connect, worker, answer):
    worker.answers = [answer]
    with pytest.raises(errors.KvfoldError) as caught:
        connect().request("r")
    assert len(worker.requests) == 1
    assert caught.value.retryable is False
    refused = answer.headers.get("content-type") == wire.FRAME and not answer.is_success
    assert isinstance(caught.value, errors.ApiError if refused else errors.ReplyError)


def test_a_lost_reply_is_retried_only_where_repeating_is_harmless(connect, worker):
    exported = Exported("c", {"a": ExportedCompressor(0, None, rows(0), np.zeros(0, np.int64))})
    for name, args in {"truncate": ("r", 1), "import_": ("r", exported)}.items():
        worker.answers = [httpx.ReadError("cut")]
        worker.requests.clear()
        with pytest.raises(errors.TransportError, match="cut"):
            getattr(connect(), name)(*args)
        assert len(worker.requests) == 1
        worker.answers = [httpx.ConnectError("refused"), reply({"compressors": {}})]
        assert getattr(connect(), name)(*args) == {}  # nothing had been sent
    worker.answers = [httpx.Response(502), httpx.ReadError("cut"), httpx.Response(204)]
    worker.requests.clear()
    assert connect().release("r") is None
    assert len(worker.requests) == 3


@pytest.mark.parametrize(
    ("header", "least", "most"), [("2", 2, 3), ("0", 0.05, 0.075), ("soon", 0.05, 0.075), ("nan", 0.05, 0.075)]
)
def test_retry_after(connect, worker, header, least, most):
    worker.answers = [refuse("queue_full", **{"retry-after": header}), httpx.Response(204)]
    connect().release("r")
    (wait,) = worker.waits
    assert least <= wait <= most


@pytest.mark.parametrize("header", ["3600", "inf"])
def test_too_long_a_wait_is_left_to_the_caller(connect, worker, header):
    worker.answers = [refuse("queue_full", **{"retry-after": header})]
    with pytest.raises(errors.QueueFull):
        connect().release("r")
    assert (len(worker.requests), worker.waits) == (1, [])


def test_waits_do_not_grow_without_bound(connect, worker):
    worker.answers = [refuse("not_ready")]
    with pytest.raises(errors.NotReady):
        connect(retries=12).release("r")
    assert len(worker.waits) == 12
    assert max(worker.waits) <= 1.5 * exchange.LONGEST_WAIT_S


def test_options_are_checked():
    with pytest.raises(ValueError, match="encoding"):
        client.Client("http://worker", encoding="json")
    with pytest.raises(ValueError, match="retries"):
        client.AsyncClient("http://worker", retries=-1)


def test_both_clients_have_every_call():
    names = [
        name
        for name, value in vars(calls).items()
        if inspect.isfunction(value) and value.__module__ == calls.__name__ and not name.startswith("_")
    ]
    assert len(names) == 14
    for name in names:
        sync, awaited = getattr(client.Client, name), getattr(client.AsyncClient, name)
        assert sync.__doc__ == awaited.__doc__
        assert sync.__doc__
        parameters = list(inspect.signature(getattr(calls, name)).parameters)
        for method in (sync, awaited):
            assert list(inspect.signature(method).parameters) == ["self", *parameters]


def test_over_a_socket():
    """A body of several chunks arrives whole, with its length announced, from both clients."""
    received = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(body)
            answer = step_answer(httpx.Request("POST", "http://worker", headers=dict(self.headers), content=body))
            self.send_response(200)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.content)

        def log_message(self, format, *args): ...

    num_rows = 3 * exchange.CHUNK_BYTES // 4096 + 1
    values = np.random.default_rng(0).random((num_rows, 1024), np.float32)

    async def awaited(url):
        async with client.AsyncClient(url) as connected:
            return await connected.step([("r", 0, num_rows)], {"a": values}, step_id="s")

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            with client.Client(url) as connected:
                first = connected.step([("r", 0, num_rows)], {"a": values}, step_id="s")
            assert asyncio.run(awaited(url)) == first
        finally:
            server.shutdown()
            thread.join()
    assert received[0] == received[1]
    (tensor,) = wire.decode(wire.FRAME, received[0])["tensors"]
    assert tensor["data"] == values.tobytes()


def test_torch_is_not_needed():
    """With torch and ml_dtypes out of reach, the package imports and sends a numpy step."""
    program = """
import sys
sys.modules.update(torch=None, ml_dtypes=None)
import httpx, numpy, kvfold_client
from kvfold_client import wire
seen = []
def answer(request):
    seen.append(wire.decode(wire.FRAME, request.read()))
    return httpx.Response(429, json={"code": "queue_full", "message": "m", "retryable": False, "details": {}})
client = kvfold_client.Client("http://worker", transport=httpx.MockTransport(answer))
try:
    client.step([("r", 0, 2)], {"a": numpy.zeros((2, 4), numpy.uint16)})
except kvfold_client.ApiError as error:
    print(error.code, seen[0]["tensors"][0]["dtype"], *(name for name in sys.modules if name.startswith("kvfold_")
          and name.split(".")[0] != "kvfold_client"))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("queue_full bf16\n", "")


def test_torch_is_not_imported():
    program = (
        "import sys, kvfold_client, kvfold_client.cli; print(sorted({'torch', 'ml_dtypes', 'triton'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# Entries

_E4M3 = np.arange(256, dtype=np.uint8)


def shuffled(num_bytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def assert_same(found, expected):
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, expected)  # NaN equals NaN


def packed_row(values, scales):
    scale = np.repeat(scales[:7].view(ml_dtypes.float8_e8m0fnu).astype(np.float32), 64)
    with np.errstate(over="ignore", invalid="ignore"):
        nope = values[:448].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scale
    return np.concatenate([nope, values[448:].view(ml_dtypes.bfloat16).astype(np.float32)])


def indexer_row(values, scales):
    with np.errstate(over="ignore", invalid="ignore"):
        return values.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales.view(np.float32)


def mxfp4_row(values, scales):
    nibbles = np.array([half for byte in values for half in (byte & 15, byte >> 4)], np.uint8)
    scale = np.repeat(scales.view(ml_dtypes.float8_e8m0fnu).astype(np.float32), 32)
    with np.errstate(over="ignore", invalid="ignore"):
        return nibbles.view(ml_dtypes.float4_e2m1fn).astype(np.float32) * scale


@pytest.mark.parametrize(
    ("cache_format", "value_bytes", "scale_bytes", "row"),
    [
        ("fp8_ds_mla", 576, 8, packed_row),
        ("indexer_fp8", 128, 4, indexer_row),
        ("indexer_mxfp4", 64, 4, mxfp4_row),
        ("bf16", 1024, 0, lambda values, _: values.view(ml_dtypes.bfloat16).astype(np.float32)),
        ("fp32", 2048, 0, lambda values, _: values.view(np.float32)),
        ("fp8", 512, 0, lambda values, _: values.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.3)),
    ],
)
@pytest.mark.parametrize(("page_entries", "num_entries"), [(64, 64), (64, 5), (2, 1), (1, 0), (3, 3)])
@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
def test_decode_page(cache_format, value_bytes, scale_bytes, row, page_entries, num_entries):
    page = shuffled(page_entries * (value_bytes + scale_bytes) + 100)
    at = page_entries * value_bytes
    values = [page[i * value_bytes : (i + 1) * value_bytes] for i in range(num_entries)]
    scales = [page[at + i * scale_bytes : at + (i + 1) * scale_bytes] for i in range(num_entries)]
    found = entries.decode_page(page, cache_format, page_entries, num_entries, 0.3)
    assert found.shape[0] == num_entries
    for i in range(num_entries):
        assert_same(found[i], row(values[i], scales[i]))
    if num_entries:
        free = np.stack([np.concatenate(pair) for pair in zip(values, scales, strict=True)])
        assert_same(entries.decode_rows(free, cache_format, 0.3), found)


def test_every_e4m3_byte():
    page = np.tile(_E4M3, 2)
    assert_same(entries.decode_page(page, "fp8", 1, 1)[0], page.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_every_scale_byte():
    """Exponent −127 is a subnormal in float32, and byte 255 is NaN."""
    for start in range(0, 256, 7):
        block = np.minimum(np.arange(start, start + 7), 255).astype(np.uint8)
        page = np.concatenate([np.full(448, 0x38, np.uint8), np.zeros(128, np.uint8), block, np.zeros(1, np.uint8)])
        found = entries.decode_page(page, "fp8_ds_mla", 1, 1)[0, :448:64]
        assert_same(found, block.view(ml_dtypes.float8_e8m0fnu).astype(np.float32))


def test_plain_indexer_rows():
    values = random.Random(0).choices(range(1000), k=128)
    page = np.array(values, np.float32).view(np.uint8)
    assert entries.decode_page(page, "fp32", 1, 1, head_dim=128).tolist() == [values]


def test_decode_refuses():
    page = np.zeros(584, np.uint8)
    for arguments in (
        (page, "fp8_e4m3", 1, 1),
        (page, "fp8_ds_mla", 1, 2),
        (page, "fp8_ds_mla", 1, -1),
        (page[:-1], "fp8_ds_mla", 1, 1),
        (page.view(np.int8), "fp8_ds_mla", 1, 1),
        (page[None], "fp8_ds_mla", 1, 1),
    ):
        with pytest.raises(ValueError, match=r"cache_format|num_entries|a page of"):
            entries.decode_page(*arguments)
    with pytest.raises(ValueError, match="rows of"):
        entries.decode_rows(page[None, :-1], "fp8_ds_mla")


def test_errors_in_json(connect, worker):
    fields = {"code": "forbidden", "message": "m", "retryable": False, "details": None}
    worker.answers = [
        httpx.Response(403, content=json.dumps(fields), headers={"content-type": "application/json; x=y"})
    ]
    with pytest.raises(errors.Forbidden) as caught:
        connect().stats()
    assert caught.value.details == {}
