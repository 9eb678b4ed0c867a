"""admission: who may send a body is decided from its headers; what is refused costs nothing, slow ones hurt nobody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvfold_client import Client, errors, wire
from kvfold_client.wire import FRAME, MSGPACK
from kvfold_kernels import backends
from kvfold_service import ingest
from kvfold_service.admission import FIRST_BYTES
from kvfold_service.auth import Tokens
from kvfold_service.execute import Wanted, steps
from kvfold_service.quotas import Quota
from kvfold_service.sending import Held, Sending, Streamed
from kvfold_service.step import parse_step
from tests.http_cases import BACKEND, Api, assert_refused, said, services
from tests.service_cases import (
    CSA,
    HCA,
    INDEXER,
    Gate,
    export,
    feed,
    import_,
    parts_of,
    refused,
    run,
    step_body,
    whole_workers,
)

pytestmark = pytest.mark.anyio
serve = pytest.fixture(services)
STEP, PULL, OTHER = "step-token-000000", "pull-token-000000", "other-token-00000"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def tokens(tmp_path) -> Tokens:
    (tmp_path / "tokens").write_text(f"{STEP} a step,pull queue=1\n{PULL} a pull\n{OTHER} b step,pull\n")
    return Tokens(tmp_path / "tokens")


async def unread() -> AsyncIterator[bytes]:
    raise AssertionError("the body was read")
    yield b""


# -- the order -----------------------------------------------------------------------------------------------------


async def test_of_several_reasons_the_first_is_told(serve, tokens):
    """All is wrong at once; each repair shows what stood behind it, and no byte of the body is read before the last."""
    api = serve(tokens=tokens, max_body_bytes=100_000, staging_bytes=100_000, max_queue=1)
    service, admission = api.service, api.service.admission
    service.not_ready, service.draining = "broken", True
    queued, mine, rest = admission.admit("d", 0), admission.admit("a", 100), admission.admit("c", 90_000)
    queued.enter_queue()
    headers = {"content_type": "text/plain", "content_length": "100001"}

    async def told(code: str, **details: object) -> None:
        assert_refused(await api.post("/v1/step", unread(), **headers), code, **details)

    await told("unauthorized")
    headers["authorization"] = f"Bearer {PULL}"
    await told("forbidden")
    headers["authorization"] = f"Bearer {STEP}"
    await told("not_ready")
    service.not_ready = None
    await told("draining")
    service.draining = False
    await told("unsupported_encoding")
    headers["content_type"] = MSGPACK
    await told("quota_exceeded", quota="queue", limit=1, used=1, needed=1)
    mine.leave()
    await told("body_too_large", limit=100_000)
    headers["content_length"] = "99000"
    await told("queue_full", staging_bytes=service.staging.num_bytes)
    rest.leave()
    await told("queue_full", max_queue=1)
    queued.leave()
    headers["content_length"] = "1"
    assert_refused(await api.post("/v1/step", b"\xc1", **headers), "malformed")


async def test_a_full_queue_refuses_before_the_body_and_then_serves_again(serve):
    gate = Gate()
    api = serve(gate.backend, max_queue=2)
    waiting = [asyncio.create_task(api.step([(f"r{i}", 0, 3)], step_id=f"s{i}")) for i in range(2)]
    await gate.running()
    while api.service.admission.queued < 2:
        await asyncio.sleep(0.001)
    assert_refused(await api.post("/v1/step", unread(), content_length="10"), "queue_full", max_queue=2)
    gate.go.set()
    assert [(await step).status_code for step in waiting] == [200, 200]
    assert (await api.step([("r2", 0, 3)], step_id="s2")).status_code == 200


async def test_a_queue_that_filled_up_while_the_body_came(serve):
    gate, body = Gate(), wire.encode(MSGPACK, step_body([("late", 0, 3)], step_id="late"))
    api = serve(gate.backend, max_queue=1)

    async def slow() -> AsyncIterator[bytes]:
        yield body[:100]
        await gate.running()
        yield body[100:]

    late = asyncio.create_task(api.post("/v1/step", slow()))
    while not api.service.admission.places:
        await asyncio.sleep(0.001)
    first = asyncio.create_task(api.step([("r", 0, 3)]))
    assert_refused(await late, "queue_full", max_queue=1)
    gate.go.set()
    assert (await first).status_code == 200


# -- slow senders --------------------------------------------------------------------------------------------------


async def test_bodies_that_do_not_say_their_size_hold_what_they_have_sent(serve):
    """A staging of one body: three of them are on their way, and a whole one still fits."""
    body = wire.encode(FRAME, step_body([("r", 0, 20)]))
    limit = 3 * FIRST_BYTES + len(body) + 64
    api = serve(max_body_bytes=limit, staging_bytes=limit)
    go_on = asyncio.Event()

    async def slow(i: int) -> AsyncIterator[bytes]:
        yield wire.encode(FRAME, step_body([(f"slow{i}", 0, 3)], step_id=f"slow{i}"))
        await go_on.wait()

    tasks = [asyncio.create_task(api.post("/v1/step", slow(i), FRAME)) for i in range(3)]
    while api.service.admission.places < 3:
        await asyncio.sleep(0.001)
    assert api.service.staging.num_lent == 3 * FIRST_BYTES
    assert (await api.post("/v1/step", body, FRAME)).status_code == 200
    go_on.set()
    assert [(await task).status_code for task in tasks] == [200] * 3


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_that_stops_coming_is_cut_off(serve, announced):
    api = serve(receive_timeout=0.2)

    async def stalls() -> AsyncIterator[bytes]:
        yield bytes(1000)
        await asyncio.sleep(30)

    began = time.monotonic()
    headers = {"content_length": "50000"} if announced else {}
    error = assert_refused(await api.post("/v1/step", stalls(), **headers), "malformed")
    assert "slowly" in error["message"]
    assert time.monotonic() - began < 5
    assert api.service.staging.num_lent == 0


async def test_a_long_body_has_time_for_each_of_its_bytes(serve, monkeypatch):
    monkeypatch.setattr(ingest, "SLOWEST_BYTES", 5_000)
    api = serve(receive_timeout=0.3)
    body = wire.encode(FRAME, step_body([("r", 0, 10)]))

    async def steady() -> AsyncIterator[bytes]:
        for start in range(0, len(body), len(body) // 8):
            await asyncio.sleep(0.08)
            yield body[start : start + len(body) // 8]

    assert (await api.post("/v1/step", steady(), FRAME)).status_code == 200


# -- quotas --------------------------------------------------------------------------------------------------------

start = pytest.fixture(whole_workers)


@pytest.fixture
def backend():
    return backends.load(BACKEND)


def test_a_tenant_s_requests(start):
    worker = start()
    worker.quotas = {"a": Quota(requests=2)}
    run(worker, [("r", 0, 3), ("s", 0, 3)], tenant="a")
    with refused("quota_exceeded", quota="requests", limit=2, used=2, needed=1):
        run(worker, [("r", 3, 3), ("t", 0, 3)], tenant="a")
    run(worker, [("r", 3, 3), ("s", 3, 0), ("unknown", 0, 0)], tenant="a")
    run(worker, [("r", 0, 3), ("s", 0, 3)], tenant="b")
    with refused("pool_exhausted", pool="requests"):
        run(worker, [("t", 0, 3)], tenant="b")
    worker.release("s", "a")
    run(worker, [("t", 0, 3)], tenant="a")


def test_a_tenant_s_pages_of_all_pools(start):
    """A step of 16 tokens needs 1 + 2 + 2 pages; what closes no window needs none and goes on."""
    worker = start(max_requests=8)
    worker.quotas = {"a": Quota(pages=7)}
    run(worker, [("r", 0, 16)], tenant="a")
    with refused("quota_exceeded", quota="pages", limit=7, used=5, needed=5):
        run(worker, [("s", 0, 16)], tenant="a")
    run(worker, [("s", 0, 3), ("r", 16, 3)], tenant="a")
    run(worker, [("r", 19, 1)], [CSA, INDEXER], tenant="a")
    with refused("quota_exceeded", quota="pages", used=6, needed=2):
        run(worker, [("s", 3, 1)], tenant="a")
    run(worker, [("s", 3, 1)], [INDEXER], tenant="a")
    run(worker, [("r", 0, 64)], tenant="b")
    worker.release("r", "a")
    run(worker, [("t", 0, 16)], tenant="a")


def test_quotas_hold_within_a_batch_too(start):
    """Steps of one tenant that run together do not see each other's requests yet, but what they have taken."""
    worker = start()
    worker.quotas = {"a": Quota(requests=2, pages=7)}
    batch = [Wanted(parse_step(step_body([(id, 0, 16)]), worker.rules), "a") for id in "rst"]
    outcomes = steps(worker, batch[:2])
    assert [isinstance(outcome, Exception) for outcome in outcomes] == [False, True]
    assert outcomes[1].details == {"quota": "pages", "limit": 7, "used": 5, "needed": 5}
    worker.release("r", "a")
    worker.quotas = {"a": Quota(requests=2)}
    outcomes = steps(worker, batch)
    assert [getattr(outcome, "code", None) for outcome in outcomes] == [None, None, "quota_exceeded"]


def test_an_import_counts_like_a_step(start):
    giver, worker = start(), start()
    feed(giver, "r", [16])
    exported = export(giver, "r")
    worker.quotas = {"a": Quota(requests=1, pages=4)}
    with refused("quota_exceeded", quota="pages", needed=5):
        import_(worker, "r", exported, "a")
    worker.quotas = {"a": Quota(requests=1, pages=5)}
    import_(worker, "r", exported, "a")
    with refused("quota_exceeded", quota="requests"):
        import_(worker, "s", exported, "a")
    import_(worker, "r", exported, "b")


async def test_a_tenant_s_staging(serve, tmp_path):
    """As little as its quota for one body, so much together, and the others have the rest."""
    (tmp_path / "tokens").write_text(f"{STEP} a step staging=100000\n{OTHER} b step\n")
    api = serve(tokens=Tokens(tmp_path / "tokens"))
    place = api.service.admission.admit("a", 60_000)
    auth = {"authorization": f"Bearer {STEP}"}
    for size, code in (("100001", "body_too_large"), ("60000", "quota_exceeded")):
        assert_refused(await api.post("/v1/step", unread(), content_length=size, **auth), code)
    assert_refused(await api.post("/v1/step", bytes_of(200_000), **auth), "quota_exceeded", quota="staging")
    assert_refused(await api.post("/v1/step", bytes(200_000), authorization=f"Bearer {OTHER}"), "malformed")
    place.leave()
    assert_refused(await api.post("/v1/step", bytes(100_000), **auth), "malformed")


async def bytes_of(size: int) -> AsyncIterator[bytes]:
    for _ in range(0, size, 1000):
        yield bytes(1000)


# -- replies -------------------------------------------------------------------------------------------------------


async def test_a_read_is_bounded_and_says_how_much_it_may_ask_for(serve):
    api = serve(max_body_bytes=20_000)
    handles = []
    for id in ("r", "s"):
        reply = said(await api.step([(id, 0, 3)], [HCA], step_id=id, dtype="bf16"))
        for at in (3, 6, 9, 12, 15):
            reply = said(await api.step([(id, at, 3)], [HCA], step_id=f"{id}{at}", dtype="bf16", pages="all"))
        handles += parts_of(reply, id)[HCA]["pages"]
    largest = max(group.layout.page_bytes for group in api.service.worker.caches.groups)
    most = 20_000 // largest
    body = {"version": 1, "handles": (handles * most)[: most + 1]}
    error = assert_refused(await api.post("/v1/pages/read", body), "body_too_large", limit=20_000)
    assert f"at most {most} pages" in error["message"]
    body["handles"].pop()
    assert len(said(await api.post("/v1/pages/read", body))["pages"]) == most
    with refused("queue_full"):
        api.service.sending.begin(20_000, "")
        api.service.sending.begin(20_000, "")
        api.service.sending.begin(1, "")
    assert_refused(await api.post("/v1/pages/read", body), "queue_full")
    api.service.sending.num_bytes = api.service.sending.num_replies = 0


async def test_an_export_is_bounded_too(serve):
    api = serve(max_body_bytes=60_000)
    for at in range(0, 96, 4):
        await api.step([("r", at, 4)], [CSA, INDEXER], step_id=f"s{at}", dtype="bf16")
    whole = {"version": 1}
    api.service.sending.limit = 15_000
    assert "from_entry" in assert_refused(await api.post("/v1/requests/r/export", whole), "body_too_large")["message"]
    less = {"version": 1, "compressors": [INDEXER], "from_entry": 20}
    assert (await api.post("/v1/requests/r/export", less)).status_code == 200
    assert_refused(await api.post("/v1/requests/none/export", whole), "unknown_request")


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "stalls"])
async def test_a_reply_that_nobody_takes(leaves):
    """Whether its client leaves or only stops reading, its bytes are counted no longer."""
    sending, patience = Sending(1 << 20, 1 << 20), 30 if leaves else 0.05
    message = {"version": 1, "data": {"dtype": "uint8", "shape": [3000], "data": bytes(3000)}}
    reply = Streamed(message, FRAME, Held(sending, 3000), patience)

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0 if leaves else 30)
        return {"type": "http.disconnect"}

    async def send(message: object) -> None:
        await asyncio.sleep(30)

    await asyncio.wait_for(reply({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send), 5)
    assert sending.num_bytes == sending.num_replies == 0


# -- what is told of it --------------------------------------------------------------------------------------------


def samples(response: httpx.Response) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


async def test_metrics(serve):
    api: Api = serve(max_queue=1)
    reply = said(await api.step([("r", 0, 16)]))
    await api.step([("r", 16, 3)], step_id="s2")
    told = samples(await api.get("/metrics"))
    packed, other = "fp8_ds_mla.128x2", "indexer_fp8.64x3"
    assert (told["kvfold_pool_pages_unread", packed], told["kvfold_pool_pages_unread", other]) == (3, 2)
    assert (told["kvfold_ring_slots", "used"], told["kvfold_ring_slots", "free"]) == (1, 63)
    for kind in ("hca", "csa", "indexer"):
        assert told["kvfold_launches_total", kind] >= 1
        assert told["kvfold_skipped_total", kind] == 1
    assert told["kvfold_rejections_total", "queue_full"] == 0
    assert told["kvfold_staging_bytes", "used"] == told["kvfold_queue_depth",] == 0
    sent = told["kvfold_sent_bytes_total",]
    await api.post("/v1/pages/read", {"version": 1, "handles": parts_of(reply, "r")[HCA]["pages"]})
    await api.post("/v1/requests/r/export", {"version": 1, "compressors": [INDEXER]})
    told = samples(await api.get("/metrics"))
    assert (told["kvfold_pool_pages_unread", packed], told["kvfold_pool_pages_unread", other]) == (2, 0)
    assert told["kvfold_sent_bytes_total",] > sent + 1000
    await api.http.delete("/v1/requests/r")
    told = samples(await api.get("/metrics"))
    assert told["kvfold_pool_pages_unread", packed] == told["kvfold_pool_pages", packed, "used"] == 0


async def test_integrity_is_for_admins(serve, tokens):
    api = serve(tokens=tokens)
    assert_refused(await api.get("/v1/integrity"), "unauthorized")
    assert_refused(await api.get("/v1/integrity", authorization=f"Bearer {STEP}"), "forbidden")


# -- heartbeat -----------------------------------------------------------------------------------------------------


def test_the_client_keeps_requests_alive_and_says_what_is_lost():
    beats: list[str] = []
    known = {"r1", "r2"}

    def answer(request: httpx.Request) -> httpx.Response:
        id = request.url.path.split("/")[3]
        beats.append(id)
        if id == "flaky" and beats.count("flaky") == 1:
            raise httpx.ConnectError("down")
        if id not in known | {"flaky"}:
            body = {"code": "unknown_request", "message": "", "retryable": False, "details": {}}
            return httpx.Response(404, json=body)
        return httpx.Response(
            200, content=wire.encode(MSGPACK, {"version": 1, "expires_in": 0.06}), headers={"content-type": MSGPACK}
        )

    with Client("http://kvfold", transport=httpx.MockTransport(answer), retries=0) as client:
        with client.heartbeat("r1", "gone", "flaky", seconds=0.06) as heart:
            heart.add("r2")
            time.sleep(0.3)
            heart.discard("r2")
            assert heart.lost == {"gone"}
        with pytest.raises(errors.UnknownRequest):
            client.lease("gone", 1)
        counts = {id: beats.count(id) for id in ("r1", "r2", "flaky")}
        assert all(count >= 3 for count in counts.values()), counts
        time.sleep(0.1)
        assert counts == {id: beats.count(id) for id in counts}
        with pytest.raises(ValueError, match="above 0"):
            client.heartbeat("r1", seconds=0)
