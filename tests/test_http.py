"""http: the app as a client meets it, in process; and the real process, met by the real clients."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvfold_client import AsyncClient, Client, errors, wire
from kvfold_client.wire import FRAME, MSGPACK, STATUS
from kvfold_kernels import backends
from kvfold_service import app as apps
from kvfold_service.auth import Tokens
from tests.http_cases import BACKEND, Api, assert_refused, said, services
from tests.service_cases import (
    CSA,
    HCA,
    INDEXER,
    NAMES,
    SMALL,
    Gate,
    Process,
    changed,
    entries_of,
    make_worker,
    parts_of,
    run,
    step_body,
    stream,
)

PROCESS_BACKEND = "cpu"
pytestmark = pytest.mark.anyio
encodings = pytest.mark.parametrize("encoding", [MSGPACK, FRAME], ids=["msgpack", "frame"])


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


serve = pytest.fixture(services)


@pytest.fixture
def api(serve) -> Api:
    return serve()


# -- encodings -----------------------------------------------------------------------------------------------------


@encodings
async def test_a_step_and_its_pages(api, encoding):
    response = await api.post("/v1/step", step_body([("r", 0, 30), ("s", 0, 5)], pad=2), encoding)
    assert response.status_code == 200
    assert response.headers["content-type"] == encoding
    reply = said(response)
    alone = make_worker(backends.load(BACKEND))
    expected = run(alone, [("r", 0, 30), ("s", 0, 5)], pad=2)
    assert reply.keys() == expected.keys()
    assert reply["timings_us"].keys() >= {"recv", "queue", "plan", "copy", "kernel"}
    for id, name in itertools.product("rs", NAMES):
        pages = parts_of(reply, id)[name].pop("pages")
        other = parts_of(expected, id)[name].pop("pages")
        got = await api.post("/v1/pages/read", {"version": 1, "handles": pages}, encoding)
        read = [(page["num_entries"], bytes(page["data"])) for page in said(got)["pages"]]
        assert read == [(page["num_entries"], bytes(page["data"])) for page in alone.read_pages(other)["pages"]]
    assert reply["requests"] == expected["requests"]


@pytest.mark.parametrize(
    ("sent", "accept", "replied"),
    [
        (MSGPACK, None, MSGPACK),
        (FRAME, None, FRAME),
        (MSGPACK, "*/*", MSGPACK),
        (FRAME, "*/*", FRAME),
        (MSGPACK, FRAME, FRAME),
        (FRAME, MSGPACK, MSGPACK),
        (FRAME, f"application/json, {MSGPACK};q=0.5, */*;q=0.1", MSGPACK),
        (MSGPACK, f"{MSGPACK};q=0.5, {FRAME};q=0.9", FRAME),
        (FRAME, f"{MSGPACK};q=0.5, */*", FRAME),
        (FRAME, "application/json", FRAME),
        (MSGPACK, FRAME.upper(), FRAME),
        (f"{FRAME}; charset=binary", None, FRAME),
        (MSGPACK.upper(), "*/*", MSGPACK),
    ],
)
async def test_the_reply_s_encoding_follows_accept(api, sent, accept, replied):
    encoding = FRAME if "frame" in sent else MSGPACK
    for id, start, code in (("r", 0, None), ("r", 3, "position_conflict")):
        body = wire.encode(encoding, step_body([(id, start, 9)], step_id=f"s{start}"))
        response = await api.post("/v1/step", body, accept=accept, content_type=sent)
        if code:
            assert_refused(response, code, replied, expected=9)
        else:
            assert (response.status_code, response.headers["content-type"]) == (200, replied)
            assert said(response)["step_id"] == "s0"


@pytest.mark.parametrize(
    ("accept", "replied"), [(None, MSGPACK), ("*/*", MSGPACK), (FRAME, FRAME), ("text/html", MSGPACK)]
)
async def test_a_get_has_no_encoding_of_its_own(api, accept, replied):
    await api.step([("r", 0, 9)])
    response = await api.get("/v1/requests/r", accept=accept)
    assert response.headers["content-type"] == replied
    assert said(response) == api.service.worker.request("r")
    assert_refused(await api.get("/v1/requests/none", accept=accept), "unknown_request", replied)


@pytest.mark.parametrize(
    "headers",
    [
        {"content_type": "application/json"},
        {"content_type": "application/x-www-form-urlencoded"},
        {"content_type": ""},
        {"content_type": "application/msgpack2"},
        {"content_type": f"text/plain, {MSGPACK}"},
        {"content_encoding": "gzip"},
        {"content_encoding": "GZIP"},
        {"content_encoding": "identity, br"},
        {"transfer_encoding": "gzip, chunked"},
    ],
)
async def test_other_types_and_encodings_of_a_body(api, headers):
    body = wire.encode(MSGPACK, step_body([("r", 0, 9)]))
    assert_refused(await api.post("/v1/step", body, **headers), "unsupported_encoding")
    assert not api.service.worker.requests
    assert (await api.post("/v1/step", body, content_encoding="identity")).status_code == 200


# -- bodies --------------------------------------------------------------------------------------------------------


async def chunks(body: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


@encodings
async def test_a_body_in_many_small_chunks(api, encoding):
    body = wire.encode(encoding, step_body([("r", 0, 24)], pad=7))
    assert 90_000 < len(body) < 130_000
    response = await api.post("/v1/step", chunks(body, 1), encoding)
    assert response.status_code == 200
    np.testing.assert_array_equal(
        entries_of(api.service.worker, "r", CSA), entries_of(_ran(("r", 0, 24)), "r", CSA), strict=True
    )


def _ran(*requests: tuple[str, int, int]) -> Any:
    worker = make_worker(backends.load(BACKEND))
    run(worker, requests)
    return worker


@pytest.mark.parametrize("chunked", [False, True], ids=["Content-Length", "chunked"])
async def test_bodies_up_to_the_limit(serve, chunked):
    body = wire.encode(FRAME, step_body([("r", 0, 9)]))
    exact, small = serve(max_body_bytes=len(body)), serve(max_body_bytes=len(body) - 1)

    def send(api: Api):
        return api.post("/v1/step", chunks(body, 1000) if chunked else body, FRAME)

    assert (await send(exact)).status_code == 200
    assert_refused(await send(small), "body_too_large", FRAME, limit=len(body) - 1)
    assert not small.service.worker.requests


async def test_a_body_that_is_announced_too_large_is_not_read(api):
    async def body() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    response = await api.post("/v1/step", body(), content_length="400001")
    assert_refused(response, "body_too_large", limit=400_000)


async def test_an_endless_body_is_refused_at_the_limit(api):
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 10_000
            yield bytes(10_000)

    assert_refused(await api.post("/v1/step", body()), "body_too_large")
    assert sent == 410_000


PICKLE = pickle.dumps({"version": 1, "requests": []})


@pytest.mark.parametrize(
    ("body", "encoding"),
    [
        (b"", MSGPACK),
        (b"", FRAME),
        (b"\xc1", MSGPACK),
        (b"\x93\x01\x02\x03", MSGPACK),
        (b'{"version": 1}', MSGPACK),
        (PICKLE, MSGPACK),
        (PICKLE, FRAME),
        (b"KVF1", FRAME),
        (b"KVF1\x01\x00\x00\x00\xff\xff\xff\xff", FRAME),
        (wire.encode(MSGPACK, step_body([("r", 0, 9)]))[:-1], MSGPACK),
        (wire.encode(MSGPACK, step_body([("r", 0, 9)])) + b"\0", MSGPACK),
        (wire.encode(FRAME, step_body([("r", 0, 9)]))[:-1], FRAME),
        (wire.encode(FRAME, step_body([("r", 0, 9)])) + b"\0", FRAME),
        (wire.encode(FRAME, step_body([("r", 0, 9)])) + bytes(64), FRAME),
        (wire.encode(FRAME, step_body([("r", 0, 9)])) + b"rubbish", FRAME),
        (wire.encode(FRAME, step_body([("r", 0, 9)])), MSGPACK),
        (wire.encode(MSGPACK, step_body([("r", 0, 9)])), FRAME),
    ],
    ids=lambda value: value[:8].hex() if isinstance(value, bytes) else value.rpartition(".")[2],
)
async def test_what_is_no_message(api, body, encoding):
    for path in ("/v1/step", "/v1/pages/read"):
        assert_refused(await api.post(path, body, encoding), "malformed", encoding)
    assert not api.service.worker.requests


async def test_a_frame_of_another_version(api):
    frame = bytearray(wire.encode(FRAME, step_body([("r", 0, 9)])))
    frame[4] = 2
    assert_refused(await api.post("/v1/step", bytes(frame), FRAME), "unsupported_version", FRAME)


async def asgi(api: Api, body: list[dict[str, Any]], **headers: str) -> list[dict[str, Any]]:
    """One POST /v1/step as the server hands it to the app, message by message; what the app sends."""
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/step",
        "raw_path": b"/v1/step",
        "query_string": b"",
        "http_version": "1.1",
        "scheme": "http",
        "headers": [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()],
    }
    sent, left = [], iter(body)

    async def receive() -> dict[str, Any]:
        return next(left)

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await apps.build(api.service)(scope, receive, send)
    return sent


@pytest.mark.parametrize("headers", [{}, {"content_length": "5000"}])
async def test_a_client_that_leaves_amid_its_body(api, headers, caplog):
    """Staging comes back (see `serve`), nothing runs, and it is no fault of the worker's."""
    half = wire.encode(FRAME, step_body([("r", 0, 9)]))[:2000]
    received = [{"type": "http.request", "body": half, "more_body": True}, {"type": "http.disconnect"}]
    await asgi(api, received, content_type=FRAME, **headers)
    assert not api.service.worker.requests
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


# -- staging -------------------------------------------------------------------------------------------------------


async def test_no_room_for_a_body_is_queue_full(serve):
    """A body that is on its way holds its room until it is refused or done."""
    body = wire.encode(MSGPACK, step_body([("r", 0, 24)]))
    api = serve(max_body_bytes=len(body), staging_bytes=len(body))
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield body[:1000]
        arrived.set()
        await go_on.wait()
        yield body[1000:]

    first = asyncio.create_task(api.post("/v1/step", slow()))
    await arrived.wait()
    second = await api.post("/v1/step", body)
    error = assert_refused(second, "queue_full")
    assert error["retryable"]
    assert (await api.get("/v1/requests/none")).status_code == 404
    go_on.set()
    assert (await first).status_code == 200
    again = await api.post("/v1/step", body)
    assert (again.status_code, again.content) == (200, (await first).content)


async def test_a_step_s_bytes_stay_until_the_kernels_have_read_them(serve):
    gate = Gate()
    api = serve(gate.backend)
    task = asyncio.create_task(api.step([("r", 0, 9)]))
    await gate.running()
    held = api.service.staging.num_lent
    assert held >= len(wire.encode(MSGPACK, step_body([("r", 0, 9)])))
    gate.go.set()
    assert (await task).status_code == 200


async def test_every_refusal_gives_its_staging_back(serve):
    """One after another in a staging of one body: any that kept its room would make the next queue_full."""
    good = wire.encode(MSGPACK, step_body([("r", 0, 9)], step_id="good"))
    limit = len(wire.encode(MSGPACK, step_body([("r", 0, 24)])))
    api = serve(max_requests=1, max_step_tokens=24, max_body_bytes=limit, staging_bytes=limit)
    nan = step_body([("r", 9, 1)], step_id="nan")
    nan["tensors"][0] |= {"data": b"\xff" * len(nan["tensors"][0]["data"])}
    assert (await api.post("/v1/step", good)).status_code == 200
    refused = {
        "malformed": {"version": 1},
        "unsupported_version": step_body([("r", 9, 1)], version=2),
        "compat_mismatch": step_body([("r", 9, 1)], compat="other"),
        "unknown_compressor": step_body([("r", 9, 1)]) | {"tensors": [nan["tensors"][0] | {"compressor": "none"}]},
        "bad_shape": step_body([("r", 9, 1)], positions=[9, 9]),
        "bad_query_start_loc": step_body([("r", 9, 1)], query_start_loc=[0, 2]),
        "bad_positions": step_body([("r", 9, 1)], positions=[8]),
        "step_too_large": step_body([("r", 9, 1)], [], pad=24) | {"tensors": nan["tensors"]},
        "step_conflict": step_body([("r", 9, 1)], step_id="good"),
        "position_conflict": step_body([("r", 8, 1)]),
        "position_gap": step_body([("r", 10, 1)]),
        "pool_exhausted": step_body([("new", 0, 1)]),
        "non_finite": nan,
    }
    for code, message in refused.items():
        assert_refused(await api.post("/v1/step", message), code)
        assert api.service.staging.num_lent == 0, code
    for code, handles in {"unknown_handle": ["none"], "malformed": [1]}.items():
        assert_refused(await api.post("/v1/pages/read", {"version": 1, "handles": handles}), code)
    assert (await api.post("/v1/step", good)).status_code == 200


async def test_a_failed_kernel_is_step_failed_and_may_be_sent_again(serve):
    fails = [True]

    def compress(real: Callable[..., int], *arguments: Any) -> int:
        if fails:
            raise RuntimeError("injected")
        return real(*arguments)

    api = serve(changed(backends.load(BACKEND), compress))
    error = assert_refused(await api.step([("r", 0, 9)]), "step_failed")
    assert "injected" not in str(error)
    fails.clear()
    assert (await api.step([("r", 0, 9)])).status_code == 200


# -- the same step twice -------------------------------------------------------------------------------------------


@encodings
async def test_a_step_sent_twice_runs_once(api, encoding):
    body = step_body([("r", 0, 9)])
    first = await api.post("/v1/step", body, encoding)
    second = await api.post("/v1/step", body, encoding)
    assert second.content == first.content
    other = FRAME if encoding == MSGPACK else MSGPACK
    third = await api.post("/v1/step", body, encoding, accept=other)
    assert third.headers["content-type"] == other
    assert said(third) == said(first)
    assert api.service.worker.totals["steps"] == 1
    assert_refused(await api.post("/v1/step", body | {"pages": "all"}, encoding), "step_conflict", encoding)


async def test_a_step_sent_twice_while_it_runs(serve):
    gate = Gate()
    api = serve(gate.backend)
    first, second = (asyncio.create_task(api.step([("r", 0, 9)])) for _ in range(2))
    await gate.running()
    assert_refused(await api.step([("other", 0, 9)]), "step_conflict")
    assert not second.done()
    gate.go.set()
    replies = [await first, await second]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert replies[0].content == replies[1].content
    assert api.service.worker.totals["steps"] == 1


async def test_who_waits_for_a_step_that_is_refused_is_refused_too(serve):
    gate = Gate()
    api = serve(gate.backend, max_requests=1)
    running = asyncio.create_task(api.step([("r", 0, 9)], step_id="first"))
    await gate.running()
    both = [asyncio.create_task(api.step([("new", 0, 9)], step_id="second")) for _ in range(2)]
    while api.service.engine.depth < 2:
        await asyncio.sleep(0.001)
    gate.go.set()
    for task in both:
        assert_refused(await task, "pool_exhausted", pool="requests")
    assert (await running).status_code == 200
    assert (await api.http.delete("/v1/requests/r")).status_code == 204
    assert (await api.step([("new", 0, 9)], step_id="second")).status_code == 200


async def test_a_refused_step_leaves_its_id_free(api):
    assert_refused(await api.step([("r", 5, 4)]), "position_gap", expected=0)
    assert (await api.step([("r", 0, 4)])).status_code == 200


async def test_a_client_that_gave_up_finds_its_step_done(serve):
    """It runs to its end though nobody waits; the same step again is told how it went."""
    gate = Gate()
    api = serve(gate.backend)
    gone = asyncio.create_task(api.step([("r", 0, 9)]))
    await gate.running()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert api.service.staging.num_lent > 0
    waiting = asyncio.create_task(api.step([("r", 0, 9)]))
    gate.go.set()
    assert (await waiting).status_code == 200
    assert api.service.worker.totals["steps"] == 1


async def test_steps_of_one_request_run_in_the_order_they_came(serve):
    gate = Gate()
    api = serve(gate.backend)
    steps = []
    for i in range(6):
        steps.append(asyncio.create_task(api.step([("r", 5 * i, 5)], step_id=f"s{i}")))
        await asyncio.sleep(0)
    gate.go.set()
    assert [(await step).status_code for step in steps] == [200] * 6


# -- the other calls -----------------------------------------------------------------------------------------------


async def test_release(api):
    await api.step([("r", 0, 9)])
    for _ in range(2):
        response = await api.http.delete("/v1/requests/r")
        assert (response.status_code, response.content) == (204, b"")
    assert_refused(await api.get("/v1/requests/r"), "unknown_request")


async def test_handles_of_released_pages_are_gone(api):
    reply = said(await api.step([("r", 0, 9)]))
    handles = parts_of(reply, "r")[HCA]["pages"]
    await api.http.delete("/v1/requests/r")
    assert_refused(await api.post("/v1/pages/read", {"version": 1, "handles": handles}), "stale_handle")


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ({"version": 1}, "malformed"),
        ({"version": 1, "handles": [], "all": True}, "malformed"),
        ({"version": 1, "handles": "one"}, "malformed"),
        ({"version": 1, "handles": [b"bytes"]}, "malformed"),
        ({"version": 1, "handles": [None]}, "malformed"),
        ({"version": 1, "handles": [""] * 65537}, "malformed"),
        ({"version": True, "handles": []}, "malformed"),
        ({"version": 2, "handles": []}, "unsupported_version"),
        ({"version": 2, "handles": [1]}, "malformed"),
        ({"version": 1, "handles": ["é" * 52]}, "unknown_handle"),
        ({"version": 1, "handles": ["A" * 100_000]}, "unknown_handle"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_reading_pages_with_a_wrong_body(api, message, code):
    assert_refused(await api.post("/v1/pages/read", message), code)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/v1", 404),
        ("POST", "/v2/step", 404),
        ("POST", "/v1/step/", 404),
        ("GET", "/v1/requests/a/b", 404),
        ("GET", "/docs", 404),
        ("GET", "/v1/step", 405),
        ("PUT", "/v1/step", 405),
        ("POST", "/v1/manifest", 405),
    ],
)
async def test_calls_that_do_not_exist(api, method, path, status):
    response = await api.http.request(method, path)
    assert response.status_code == status
    error = said(response)
    assert error.keys() == {"code", "message", "retryable", "details"}
    assert not error["retryable"]


async def test_a_method_that_does_not_exist_is_told_which_do(api):
    for path, methods in (("/v1/step", "POST"), ("/v1/requests/r", "DELETE, GET"), ("/livez", "GET")):
        assert (await api.http.request("PUT", path)).headers["allow"] == methods


async def test_health(api):
    assert (await api.get("/livez")).json() == {"status": "ok"}
    assert (await api.get("/readyz")).json() == {"status": "ok"}
    api.service.not_ready = "starting"
    assert (await api.get("/livez")).status_code == 200
    ready = await api.get("/readyz")
    assert (ready.status_code, ready.json()["reason"]) == (503, "starting")
    for response in (await api.step([("r", 0, 9)]), await api.get("/v1/requests/r")):
        assert_refused(response, "not_ready")
        assert int(response.headers["retry-after"]) >= 1
    api.service.not_ready = None
    assert (await api.step([("r", 0, 9)])).status_code == 200


async def test_manifest_and_stats(api):
    manifest = (await api.get("/v1/manifest")).json()
    assert manifest.pop("compat") == api.service.worker.compat
    assert [part["name"] for part in manifest["compressors"]] == list(NAMES)
    assert manifest["max_position"] == SMALL["max_position"]
    await api.step([("r", 0, 16)])
    stats = (await api.get("/v1/stats")).json()
    assert (stats["backend"], stats["compat"]) == (BACKEND, api.service.worker.compat)
    assert stats["requests"]["live"] == 1
    assert {pool: numbers["used"] for pool, numbers in stats["pools"].items()} == {
        "fp8_ds_mla.128x2": 3,
        "indexer_fp8.64x3": 2,
    }
    assert stats["totals"]["tokens"] == 16
    assert stats["totals"]["entries"] == 2 + 4 + 4
    assert stats["mean_us"].keys() >= {"plan", "kernel"}


async def test_metrics(api):
    await api.step([("r", 0, 16)])
    await api.step([("r", 3, 16)], step_id="s2")
    response = await api.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    samples = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }
    assert all(name.startswith("kvfold_") for name, *_ in samples)
    assert samples["kvfold_steps_total",] == 1
    assert samples["kvfold_tokens_total",] == 16
    assert samples["kvfold_entries_total",] == 10
    assert samples["kvfold_rejections_total", "position_conflict"] == 1
    assert samples["kvfold_pool_pages", "indexer_fp8.64x3", "used"] == 2
    assert samples["kvfold_requests_live",] == 1
    assert samples["kvfold_step_seconds_count", "kernel"] == 1
    assert samples["kvfold_received_bytes_total",] > 2 * 16 * 4 * 1024


async def test_openapi_names_every_call_and_its_codes(api):
    described = (await api.get("/openapi.json")).json()
    assert {(method.upper(), path) for path, calls in described["paths"].items() for method in calls} >= {
        ("POST", "/v1/step"),
        ("POST", "/v1/pages/read"),
        ("GET", "/v1/requests/{id}"),
        ("DELETE", "/v1/requests/{id}"),
        ("GET", "/v1/manifest"),
        ("GET", "/v1/stats"),
        ("GET", "/livez"),
        ("GET", "/readyz"),
        ("GET", "/metrics"),
    }
    step = described["paths"]["/v1/step"]["post"]
    assert set(step["requestBody"]["content"]) == {MSGPACK, FRAME}
    codes = {code for response in step["responses"].values() for code in response["description"].split(", ")}
    assert {"position_conflict", "pool_exhausted", "non_finite", "step_conflict", "queue_full"} <= codes
    for status, response in step["responses"].items():
        named = [code for code in response["description"].split(", ") if code in STATUS]
        assert {STATUS[code] for code in named} <= {int(status)}


# -- tokens --------------------------------------------------------------------------------------------------------

STEP, PULL, ADMIN, OTHER = "step-token-000000", "pull-token-000000", "admin-token-00000", "other-token-00000"


@pytest.fixture
def guarded(serve, tmp_path) -> Api:
    file = tmp_path / "tokens"
    file.write_text(f"{STEP} a step\n{PULL} a pull\n{ADMIN} a admin\n{OTHER} b step,pull\n")
    return serve(tokens=Tokens(file))


CALLS: dict[tuple[str, str], set[str]] = {
    ("POST", "/v1/step"): {STEP, OTHER},
    ("POST", "/v1/pages/read"): {PULL, OTHER},
    ("GET", "/v1/requests/r"): {STEP, PULL, OTHER},
    ("DELETE", "/v1/requests/r"): {STEP, OTHER},
    ("GET", "/v1/manifest"): {STEP, PULL, ADMIN, OTHER},
    ("GET", "/v1/stats"): {ADMIN},
    ("GET", "/metrics"): {ADMIN},
}
"""Whose token is good for what."""


@pytest.mark.parametrize(("call", "allowed"), CALLS.items(), ids=lambda value: " ".join(sorted(value)))
async def test_roles(guarded, call, allowed):
    async def ask(**headers: str) -> httpx.Response:
        return await guarded.http.request(*call, headers=headers)

    for header in ({}, {"authorization": "Bearer wrong-token-00000"}, {"authorization": f"Basic {STEP}"}):
        response = await ask(**header)
        assert_refused(response, "unauthorized")
        assert response.headers["www-authenticate"] == "Bearer"
    twice = [("authorization", f"Bearer {token}") for token in (STEP, ADMIN)]
    assert_refused(await guarded.http.request(*call, headers=twice), "unauthorized")
    for token in (STEP, PULL, ADMIN, OTHER):
        response = await ask(authorization=f"Bearer {token}")
        if token in allowed:
            assert response.status_code not in (401, 403)
        else:
            assert_refused(response, "forbidden")


async def test_health_needs_no_token_and_metrics_do(guarded):
    assert (await guarded.get("/livez")).status_code == 200
    assert (await guarded.get("/readyz")).status_code == 200
    assert_refused(await guarded.get("/metrics"), "unauthorized")


async def test_a_body_is_not_read_for_a_stranger(guarded):
    async def body() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    assert_refused(await guarded.post("/v1/step", body()), "unauthorized")
    assert_refused(await guarded.post("/v1/step", body(), authorization=f"Bearer {PULL}"), "forbidden")


async def test_another_tenant_s_things_look_unknown(guarded):
    reply = said(await guarded.step([("r", 0, 9)], token=STEP))
    handles = {"version": 1, "handles": parts_of(reply, "r")[HCA]["pages"]}
    mine, theirs = ({"authorization": f"Bearer {token}"} for token in (PULL, OTHER))
    assert (await guarded.get("/v1/requests/r", **mine)).status_code == 200
    foreign, unknown = [await guarded.get(f"/v1/requests/{id}", **theirs) for id in ("r", "none")]
    assert_refused(foreign, "unknown_request")
    assert foreign.content == unknown.content
    foreign = await guarded.post("/v1/pages/read", handles, **theirs)
    assert_refused(foreign, "unknown_handle")
    forged = await guarded.post("/v1/pages/read", {"version": 1, "handles": ["A" * 52]}, **theirs)
    assert foreign.content == forged.content
    assert (await guarded.http.delete("/v1/requests/r", headers=theirs)).status_code == 204
    assert (await guarded.post("/v1/pages/read", handles, **mine)).status_code == 200


async def test_step_ids_are_each_tenant_s_own(guarded):
    replies = [await guarded.step([("r", 0, 9)], token=token) for token in (STEP, OTHER)]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert guarded.service.worker.totals["steps"] == 2


# -- the process ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def process(tmp_path_factory) -> Iterator[Process]:
    process = Process(tmp_path_factory.mktemp("worker"), "--max-body-bytes=400000", "--staging-bytes=400000")
    yield process
    process.end()


def test_the_ready_line_is_true(process):
    assert process.backend == PROCESS_BACKEND
    assert process.compat == make_worker(backends.load(BACKEND)).compat
    with Client(process.url) as client:
        assert client.live()
        assert client.ready()
        assert client.manifest()["compat"] == process.compat


@pytest.mark.parametrize("encoding", ["msgpack", "frame"])
def test_the_typed_client_end_to_end(process, encoding):
    id = f"sync-{encoding}"
    rows = {name: stream(name, "r") for name in NAMES}
    with Client(process.url, encoding=encoding) as client:
        at = 0
        for length in (5, 12, 7):
            step = client.step([(id, at, length)], {name: rows[name][at : at + length] for name in NAMES})
            at += length
        assert (step.compat, step.skipped) == (process.compat, ())
        state = client.request(id)
        alone = make_worker(backends.load(PROCESS_BACKEND))
        run(alone, [("r", 0, 24)])
        expected = alone.request("r")["compressors"]
        for name in NAMES:
            assert state[name].committed == 24
            pages = client.read_pages(state[name].pages)
            assert [page.num_entries for page in pages] == [
                page["num_entries"] for page in alone.read_pages(expected[name]["pages"])["pages"]
            ]
            got = b"".join(page.data.tobytes() for page in pages)
            assert got == b"".join(bytes(p["data"]) for p in alone.read_pages(expected[name]["pages"])["pages"])
        with pytest.raises(errors.PositionConflict) as conflict:
            client.step([(id, 3, 1)], {HCA: rows[HCA][3:4]})
        assert conflict.value.details["expected"] == 24
        with pytest.raises(errors.BadShape):
            client.step([(id, 24, 1)], {HCA: rows[CSA][:1]})
        handles = state[HCA].pages
        client.release(id)
        client.release(id)
        with pytest.raises(errors.StaleHandle):
            client.read_pages(handles)
        with pytest.raises(errors.UnknownRequest):
            client.request(id)


@pytest.mark.parametrize("encoding", ["msgpack", "frame"])
async def test_the_async_client_end_to_end(process, encoding):
    rows = {INDEXER: stream(INDEXER, "r")[:8]}
    ids = [f"async-{encoding}-{i}" for i in range(4)]
    async with AsyncClient(process.url, encoding=encoding) as client:
        steps = await asyncio.gather(*(client.step([(id, 0, 8)], rows, step_id=f"{id}-s") for id in ids))
        again = await asyncio.gather(*(client.step([(id, 0, 8)], rows, step_id=f"{id}-s") for id in ids))
        assert again == steps
        pages = await client.read_pages(
            [step.requests[id][INDEXER].pages[0] for id, step in zip(ids, steps, strict=True)]
        )
        assert len({page.data.tobytes() for page in pages}) == 1
        assert {page.num_entries for page in pages} == {2}
        with pytest.raises(errors.StepConflict):
            await client.step([(ids[0], 0, 8)], {INDEXER: rows[INDEXER] + 1}, step_id=f"{ids[0]}-s")
        stats = await client.stats()
        assert stats["requests"]["live"] == 4
        for id in ids:
            await client.release(id)
        assert (await client.stats())["requests"]["live"] == 0


def test_bodies_that_break_off_do_not_use_up_a_worker(process):
    """Its staging holds one body; each of these had all of it."""
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", process.port)) as connection:
            head = f"POST /v1/step HTTP/1.1\r\nHost: x\r\nContent-Type: {FRAME}\r\nContent-Length: 400000\r\n\r\n"
            connection.sendall(head.encode() + b"KVF1" + bytes(10_000))
    with Client(process.url, retries=5) as client:
        client.step([("after", 0, 1)], {HCA: stream(HCA, "r")[:1]})
        client.release("after")


def test_what_is_not_http_does_not_hurt(process):
    with socket.create_connection(("127.0.0.1", process.port)) as connection:
        connection.sendall(b"\x16\x03\x01 no http at all\r\n\r\n")
        assert b"400" in connection.recv(1000)
    with Client(process.url) as client:
        assert client.ready()


def test_sigterm_finishes_what_runs_and_exits_with_0(tmp_path):
    """A body that was on its way when the signal came is still answered."""
    process = Process(tmp_path)
    body = wire.encode(FRAME, step_body([("r", 0, 9)]))
    head = f"POST /v1/step HTTP/1.1\r\nHost: x\r\nContent-Type: {FRAME}\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", process.port)) as connection:
        connection.settimeout(30)
        connection.sendall(head.encode() + body[:100])
        with Client(process.url) as client:
            assert client.ready()
        process.signal()
        connection.sendall(body[100:])
        assert connection.recv(100).startswith(b"HTTP/1.1 200 ")
    assert process.wait() == 0


def test_a_bad_option_is_one_sentence_and_exit_code_2():
    command = [sys.executable, "-m", "kvfold_service", "--manifest", "tiny", "--weights", "random:x", "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "kvfold serve: weights 'random:x': the seed after random: must be a whole number\n"
