"""movers: entries come from a peer whole and verified, or not at all, and a peer that fails is told within a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import numpy as np
import pytest

from kvfold_client import Client, wire
from kvfold_client.errors import ApiError, PeerFailed, PoolExhausted, QueueFull, RequestExists, UnknownRequest
from kvfold_kernels import backends
from tests.fleet_cases import Local, Town, feed, other_pages, several_servers, towns
from tests.service_cases import CSA, HCA, NAMES, RATIO, SMALL, alone, stream

pytestmark = several_servers
town = pytest.fixture(towns)

Spoil = Callable[[str, bytes], bytes | None]
"""(path, body of the reply) → what is sent instead; None: the connection is cut in the middle of it."""


def _renews(path: str, sent: bytes) -> bool:
    """A call for no entries."""
    if not path.endswith("/entries"):
        return False
    message = wire.decode(wire.MSGPACK, sent)
    return message["from_entry"] == message["to_entry"]


class Between:
    """A peer that passes everything on to another, but for what a test spoils, which no renewal of a lease is."""

    def __init__(self, url: str) -> None:
        self.spoil: Spoil = lambda path, body: body
        self.renewals: list[float] = []
        """When they came."""
        self.in_chunks = ""
        """Replies to calls with this end do not say how long they are."""
        self.silent, self.livez_answers = threading.Event(), True
        between, http = self, httpx.Client(base_url=url)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.pass_on()

            do_POST = do_GET  # noqa: N815

            def pass_on(self) -> None:
                sent = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if between.silent.is_set() and not (self.path == "/livez" and between.livez_answers):
                    time.sleep(3)
                    self.close_connection = True
                    return
                wanted = {name: self.headers[name] for name in ("Accept", "Content-Type") if name in self.headers}
                reply = http.request(self.command, self.path, content=sent, headers=wanted)
                body = reply.content
                if _renews(self.path, sent):
                    between.renewals.append(time.monotonic())
                else:
                    body = between.spoil(self.path, body)
                self.send_response(reply.status_code)
                is_json = body is not None and body[:1] in (b"[", b"{")
                self.send_header("Content-Type", "application/json" if is_json else reply.headers["Content-Type"])
                if between.in_chunks and self.path.endswith(between.in_chunks):
                    self.send_header("Transfer-Encoding", "chunked")
                    body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(reply.content), reply.content)
                else:
                    self.send_header("Content-Length", str(len(reply.content if body is None else body)))
                self.end_headers()
                self.wfile.write(reply.content[: len(reply.content) // 2] if body is None else body)
                self.close_connection = body is None

            def log_message(self, format: str, *args: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads, request_queue_size = True, 128

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self._http = http

    def end(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()
        self._http.close()


class Case:
    """A giver with request `r` of 45 tokens, a taker that knows it as `p`, and something in between."""

    def __init__(self, town: Town, manifests: tuple[Any, Any] = (SMALL, other_pages()), **options: Any) -> None:
        self.giver: Local = town.add("giver", manifest=manifests[0])
        self.taker: Local = town.add("taker", manifest=manifests[1], **options)
        self.between = Between(self.giver.url)
        town.file.write_text(f"p {self.between.url}\n")
        self.give, self.take = Client(self.giver.url), Client(self.taker.url, retries=0)
        feed(self.give, "r", 0, 45)

    def fails(self, reason: str, spoil: Spoil, **details: str) -> PeerFailed:
        """The pull fails for this reason, keeps nothing, and the next one is whole."""
        self.between.spoil = spoil
        before = _held(self.taker)
        with pytest.raises(PeerFailed) as caught:
            self.take.pull("r", "p")
        assert caught.value.details == {"peer": "p", "reason": reason} | details, caught.value
        assert _held(self.taker) == before
        self.taker.check()
        self.between.spoil = lambda path, body: body
        return caught.value

    def end(self) -> None:
        self.give.close()
        self.take.close()
        self.between.end()


def _held(taker: Local) -> tuple[Any, ...]:
    pools = [group.pool.num_used for group in taker.worker.caches.groups]
    return sorted(taker.worker.requests), sorted(taker.worker.free_slots), pools


@pytest.fixture
def case(town: Town) -> Iterator[Case]:
    made = Case(town)
    yield made
    made.end()


def on(suffix: str, change: Callable[[dict[str, Any]], Any]) -> Spoil:
    """Changes the message of the replies to one call."""

    def spoil(path: str, body: bytes) -> bytes:
        if not path.endswith(suffix):
            return body
        encoding = wire.FRAME if body[:4] == wire.FRAME_MAGIC else wire.MSGPACK
        if body[:1] == b"{":
            encoding, message = "json", httpx.Response(200, content=body).json()
        else:
            message = wire.decode(encoding, body)
        change(message)
        return httpx.Response(200, json=message).content if encoding == "json" else wire.encode(encoding, message)

    return spoil


def test_it_arrives_whole(case: Case):
    moved = case.take.pull("r", "p")
    assert (moved.mover, moved.num_entries) == ("http", 45 // 8 + 2 * (45 // 4))
    theirs, ours = case.give.export("r"), case.take.export("r")
    for name in NAMES:
        np.testing.assert_array_equal(ours.compressors[name].entries, theirs.compressors[name].entries, strict=True)
    counted = case.taker.service.pulls._bytes.labels("http")._value.get()
    assert counted == moved.entry_bytes + moved.open_row_bytes
    with pytest.raises(RequestExists):
        case.take.pull("r", "p")
    with pytest.raises(UnknownRequest) as caught:
        case.take.pull("s", "p")
    assert caught.value.details == {"peer": "p"}


# -- bytes that are not the peer's ---------------------------------------------------------------------------------


def _flip(message: dict[str, Any]) -> None:
    data = bytearray(message["entries"]["data"])
    data[len(data) // 2] ^= 1
    message["entries"]["data"] = bytes(data)


def test_one_bit_on_the_way(case: Case):
    error = case.fails("corrupt", on("/entries", _flip))
    assert "did not arrive as they are" in str(error)
    case.take.pull("r", "p")


def _digest(message: dict[str, Any]) -> None:
    message["pages"][-1]["xxh3_64"] = "0" * 16


def _part(call: str, **fields: Any) -> Spoil:
    """Other fields in one compressor."""
    return on(call, lambda message: message["compressors"][CSA].update(fields))


GET = "/v1/requests/r"
CHANGED: dict[str, tuple[str, Spoil]] = {
    "a digest": ("corrupt", on("/v1/verify", _digest)),
    "digests of fewer pages": ("changed", on("/v1/verify", lambda m: m["pages"].pop())),
    "no digests": ("changed", on("/v1/verify", lambda m: m.update(pages=[]))),
    "digests of another form": ("refused", on("/v1/verify", lambda m: m.update(pages=[1] * len(m["pages"])))),
    "digests of a number": ("refused", on("/v1/verify", lambda m: m.update(pages=5))),
    "digests of half an entry": ("refused", on("/v1/verify", lambda m: m["pages"][0].update(num_entries=1.5))),
    "an entry too far": ("changed", on("/v1/verify", lambda m: m["pages"][0].update(num_entries=9))),
    "entries of another place": ("changed", on("/entries", lambda m: m.update(first_entry=1))),
    "no entries": ("refused", on("/entries", lambda m: m.pop("entries"))),
    "entries of another dtype": ("changed", on("/entries", lambda m: m["entries"].update(dtype="fp8_e4m3"))),
    "entries of another size": ("refused", on("/entries", lambda m: m["entries"].update(shape=[3, 136]))),
    "no size": ("refused", on("/v1/worker", lambda m: m.pop("max_body_bytes"))),
    "a size below nothing": ("refused", on("/v1/worker", lambda m: m.update(max_body_bytes=-5))),
    "no mover of ours": ("refused", on("/v1/worker", lambda m: m.update(movers=["pigeon"]))),
    "a number of movers": ("refused", on("/v1/worker", lambda m: m.update(movers=5))),
    "another committed": ("changed", _part(GET, committed=44)),
    "a compressor less": ("changed", on(GET, lambda m: m["compressors"].pop(CSA))),
    "a compressor that only the pages are of": ("changed", on("/export", lambda m: m["compressors"].pop(CSA))),
    "no compressors": ("refused", on(GET, lambda m: m.update(compressors=None))),
    "a number for a compressor": ("refused", on(GET, lambda m: m["compressors"].update({CSA: 5}))),
    "no pages": ("refused", _part(GET, pages=None)),
    "fewer pages": ("changed", on(GET, lambda m: m["compressors"][CSA]["pages"].pop())),
    "no page": ("changed", _part(GET, pages=[])),
    "entries from later on": ("changed", _part(GET, first_entry=1)),
    "entries from nowhere on": ("refused", _part(GET, first_entry=99)),
    "no message": ("refused", lambda path, body: b"\xc1" if path.endswith("/export") else body),
    "no JSON": ("refused", lambda path, body: b"{" if path == "/v1/worker" else body),
    "half a character": ("refused", lambda path, body: b'{"\\ud800": 1}' if path.endswith("/export") else body),
    "too deep": ("refused", lambda path, body: b"[" * 99999 if path == "/v1/worker" else body),
    "too much": ("refused", lambda path, body: body + bytes(5000) if path.endswith("/entries") else body),
    "cut off": ("died", lambda path, body: None if path.endswith("/entries") else body),
}


def test_a_peer_that_answers_wrongly(case: Case):
    """Each of these keeps nothing, and after all of them the request still moves."""
    for what, (reason, spoil) in CHANGED.items():
        print(what)
        case.fails(reason, spoil)
    for call in ("/v1/worker", GET, "/export", "/entries", "/v1/verify"):
        print("a list from", call)
        error = case.fails("refused", lambda path, body, call=call: b"[]" if path.endswith(call) else body)
        assert "cannot be read" in str(error)
    case.between.in_chunks = "/export"
    assert "does not say its length" in str(case.fails("refused", lambda path, body: body))
    case.between.in_chunks = ""
    case.fails("refused", _part("/export", committed=46), refusal="bad_shape")
    stranger = on("/export", lambda m: m["compressors"].update(x=m["compressors"][CSA]))
    case.fails("refused", stranger, refusal="unknown_compressor")
    case.between.spoil = on("/export", lambda m: m.update(id="s"))  # what it is called is ours to say
    case.take.pull("r", "p")
    assert [id for _, id in case.taker.worker.requests] == ["r"]


@pytest.mark.parametrize("behind", [GET, "/export", "/entries"])
def test_a_request_that_is_another_by_now(case: Case, behind):
    """Released and fed anew under its id, as long as before: only the handles tell, and they do."""

    def spoil(path: str, body: bytes) -> bytes:
        if path.endswith(behind):
            case.give.release("r")
            rows = {name: stream(name, "another")[:45] for name in NAMES}
            case.give.step([("r", 0, 45)], rows)
        return body

    error = case.fails("changed", spoil, refusal="stale_handle")
    assert "stale_handle" in str(error)


def test_a_request_that_goes_on_meanwhile(case: Case):
    """Pages and tail are of one moment: a step in between is seen, and both are asked for again, but not for ever."""
    sent = iter(range(45, 60))

    def spoil(path: str, body: bytes) -> bytes:
        if path == GET:
            at = next(sent)
            feed(case.give, "r", at, at + 1)
        return body

    error = case.fails("changed", spoil)
    assert "goes on too fast" in str(error)
    assert next(sent) == 48
    sent = iter([48])
    case.between.spoil = lambda path, body: (
        spoil(path, body) if not case.give.request("r")[CSA].committed > 48 else body
    )
    case.take.pull("r", "p")
    assert_as_of(case.take, 49)


def assert_as_of(taker: Client, num_tokens: int) -> None:
    """What the taker has of `r` is what a worker alone would have at so many tokens."""
    exported = taker.export("r")
    for name, part in exported.compressors.items():
        assert part.committed == num_tokens
        expected = alone(backends.load("cpu"), "r", name)[: num_tokens // RATIO[name]]
        np.testing.assert_array_equal(part.entries, expected, strict=True)
        np.testing.assert_array_equal(part.open_rows, stream(name, "r")[part.open_positions])


@pytest.mark.parametrize("giver_pages", ["small", "other"])
def test_a_giver_that_decodes_meanwhile(town: Town, giver_pages):
    """Steps close entries in the last page, and in new ones, at any moment behind the export: its state comes."""
    manifests = (SMALL, other_pages()) if giver_pages == "small" else (other_pages(), SMALL)
    case = Case(town, manifests)
    try:
        for num_tokens in (3, 12, 44, 45, 47):
            for moments in (("/export",), ("/entries",), ("/v1/verify",), ("/export", "/entries", "/v1/verify")):
                case.give.release("r")
                feed(case.give, "r", 0, num_tokens)
                at = [num_tokens]

                def spoil(path: str, body: bytes, moments=moments, at=at) -> bytes:
                    if path.endswith(moments) and at[0] < 92:
                        feed(case.give, "r", at[0], at[0] + 4)
                        at[0] += 4
                    return body

                case.between.spoil = spoil
                case.take.pull("r", "p")
                assert at[0] > num_tokens or num_tokens < 4
                assert_as_of(case.take, num_tokens)
                feed(case.take, "r", num_tokens, 96)
                assert_as_of(case.take, 96)
                case.take.release("r")
    finally:
        case.end()


def test_a_page_that_filled_up_and_did_not_arrive_as_it_is(case: Case):
    """Its digest is of more than what we have: ours are compared as bytes, and whose they were is asked for again."""
    at = [45]

    def grow() -> None:
        feed(case.give, "r", at[0], at[0] + 4)
        at[0] += 4

    def flipped(path: str, body: bytes) -> bytes:
        if path.endswith("/export"):
            grow()
        elif path.endswith("/entries") and len(asked) < 3:
            asked.append(path)
            message = wire.decode(wire.FRAME, body)
            data = bytearray(message["entries"]["data"])
            data[-1] ^= 1  # of the last entry
            return wire.encode(wire.FRAME, message | {"entries": message["entries"] | {"data": bytes(data)}})
        return body

    def another(path: str, body: bytes) -> bytes:
        if path.endswith("/export"):
            grow()
        elif path.endswith("/v1/verify") and not asked:
            asked.append(path)
            case.give.release("r")
            case.give.step([("r", 0, 60)], {name: stream(name, "another")[:60] for name in NAMES})
        return body

    asked: list[str] = []
    case.fails("corrupt", flipped)
    asked.clear()
    case.fails("changed", another, refusal="stale_handle")


# -- silence -------------------------------------------------------------------------------------------------------


def test_a_peer_that_hangs(case: Case):
    """A worker that answers nothing any more is dead within a second, at whatever call."""
    case.between.livez_answers = False
    for path in ("/v1/worker", "/export", "/entries", "/v1/verify"):
        case.between.silent.clear()

        def spoil(its: str, body: bytes, path=path) -> bytes:
            if its.endswith(path):
                case.between.silent.set()
                time.sleep(3)
            return body

        began = time.monotonic()
        case.fails("died", spoil)
        assert time.monotonic() - began < 1.5  # a second, and what leads to the call
    case.between.silent.clear()
    case.take.pull("r", "p")


def test_a_peer_that_is_only_slow(town: Town):
    """As long as it says that it lives, it may take its time: --receive-timeout."""
    case = Case(town, receive_timeout=1.5)
    try:

        def spoil(path: str, body: bytes, seconds: float = 1.2) -> bytes:
            if path.endswith("/entries"):
                time.sleep(seconds)
            return body

        case.between.spoil = lambda path, body: spoil(path, body, 1.1) if path.endswith("/export") else body
        case.take.pull("r", "p")
        case.take.release("r")
        began = time.monotonic()
        case.fails("died", lambda path, body: spoil(path, body, 3.0))
        assert 1.4 < time.monotonic() - began < 2.9
    finally:
        case.end()


def test_the_giver_s_lease_is_shorter_than_an_answer(case: Case):
    """It is renewed beside each answer that is slow to come, the first one too, three or four times a second."""
    case.giver.worker.lease_seconds = 1.0
    slow = ["/v1/worker", "/export", "/entries", "/v1/verify"]

    def spoil(path: str, body: bytes) -> bytes:
        for call in slow:
            if path.endswith(call):
                slow.remove(call)
                time.sleep(1.5)
                break
        return body

    case.between.spoil = spoil
    case.give.lease("r", 1.0)
    began = time.monotonic()
    case.take.pull("r", "p")
    took = time.monotonic() - began
    assert took > 6
    assert_as_of(case.take, 45)
    assert 2.5 * took < len(case.between.renewals) < 3.5 * took + 1
    num_renewals = len(case.between.renewals)
    time.sleep(0.5)
    assert len(case.between.renewals) == num_renewals  # it is over


def test_a_lease_is_never_shortened(case: Case):
    case.give.lease("r", 500)
    case.take.pull("r", "p")
    assert case.giver.worker.requests["", "r"].expires > case.giver.worker.clock() + 400


@pytest.mark.parametrize("during", ["/v1/worker", "/entries", "/v1/verify"])
def test_a_giver_that_has_the_request_no_more(case: Case, during):
    """Told by the renewals, long before the answer comes."""

    def spoil(path: str, body: bytes) -> bytes:
        if path.endswith(during):
            case.give.release("r")
            time.sleep(2.5)
        return body

    case.between.spoil = spoil
    began = time.monotonic()
    with pytest.raises(UnknownRequest) as caught:
        case.take.pull("r", "p")
    assert time.monotonic() - began < 1.5
    assert caught.value.details == {"peer": "p"}
    case.taker.check()
    assert not case.taker.worker.requests


def test_a_connection_that_was_closed_for_idleness(case: Case):
    """Between two questions; a new one is made."""

    def spoil(path: str, body: bytes) -> bytes:
        return body

    case.between.spoil = spoil
    handler = case.between.server.RequestHandlerClass
    handler.timeout = 0.05  # type: ignore[attr-defined]
    engine = case.taker.service.engine
    real = engine.call_for

    async def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.1)
        return await real(*args, **kwargs)

    engine.call_for = slow  # type: ignore[method-assign]
    case.take.pull("r", "p")


def test_no_such_host(town: Town):
    taker = town.add("taker")
    town.file.write_text("p http://a..b:1\n")
    with Client(taker.url) as client, pytest.raises(PeerFailed) as caught:
        client.pull("r", "p")
    assert caught.value.details == {"peer": "p", "reason": "unreachable"}


def test_nobody_there(town: Town):
    taker = town.add("taker")
    gone = town.add("gone")
    gone.kill()
    with Client(taker.url) as client:
        began = time.monotonic()
        with pytest.raises(PeerFailed) as caught:
            client.pull("r", "gone")
        assert time.monotonic() - began < 1
        assert caught.value.details == {"peer": "gone", "reason": "unreachable"}


# -- ranges and room -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounded", ["a range", "our bodies", "the peer's replies"])
def test_many_small_ranges(case: Case, bounded, monkeypatch):
    """As large as whatever is smallest allows, and the last one shorter."""
    fewest = 2048
    if bounded == "a range":
        monkeypatch.setattr("kvfold_service.movers.http.RANGE_BYTES", fewest)
    elif bounded == "our bodies":
        case.taker.service.admission.max_body_bytes = 2 * fewest
    asked: list[str] = []

    def spoil(path: str, body: bytes) -> bytes:
        asked.append(path)
        return on("/v1/worker", lambda m: m.update(max_body_bytes=fewest))(path, body) if bounded[0] == "t" else body

    case.between.spoil = spoil
    case.take.pull("r", "p")
    bytes_of = case.giver.worker.entry_bytes
    ranges = [-(-(45 // ratio) // ((fewest - 1024) // bytes_of[name])) for name, ratio in RATIO.items()]
    assert asked.count("/v1/requests/r/entries") == sum(ranges) > 4
    theirs, ours = case.give.export("r"), case.take.export("r")
    for name in NAMES:
        np.testing.assert_array_equal(ours.compressors[name].entries, theirs.compressors[name].entries, strict=True)


def test_an_entry_that_is_too_large_for_a_body(town: Town):
    giver, taker = town.add("giver"), town.add("taker")
    with Client(giver.url) as give, Client(taker.url) as take:
        feed(give, "r", 0, 45)
        taker.service.admission.max_body_bytes = 2100
        with pytest.raises(ApiError, match="body_too_large"):
            take.pull("r", "giver")
        assert not taker.worker.requests
        assert not taker.worker.incoming


def test_room_is_taken_before_anything_moves(town: Town):
    giver, taker = town.add("giver"), town.add("taker", pages=4, max_requests=2)
    with Client(giver.url) as give, Client(taker.url, retries=0) as take:
        feed(give, "r", 0, 90)
        with pytest.raises(PoolExhausted) as caught:
            take.pull("r", "giver")
        assert caught.value.details["needed"] > caught.value.details["free"]
        feed(give, "s", 0, 8)
        assert take.pull("s", "giver").state[HCA].num_entries == 1
        feed(take, "t", 0, 3)
        feed(give, "u", 0, 8)
        with pytest.raises(PoolExhausted, match="requests"):
            take.pull("u", "giver")


def test_a_request_on_its_way_in_is_nobody_s(case: Case):
    """It cannot be seen, and has its slot and pages; a step under its id is a request of its own, and wins."""

    def spoil(path: str, body: bytes) -> bytes:
        if path.endswith("/entries"):
            with pytest.raises(UnknownRequest):
                case.take.request("r")
            assert case.taker.worker.incoming
            case.taker.worker.check_integrity()
            with pytest.raises(RequestExists):
                case.take.pull("r", "p")
        return body

    case.between.spoil = spoil
    case.take.pull("r", "p")
    case.take.release("r")

    def faster(path: str, body: bytes) -> bytes:
        if path.endswith("/v1/verify"):
            feed(case.take, "r", 0, 9) if not case.taker.worker.requests else None
            case.taker.worker.check_integrity()
        return body

    case.between.spoil = faster
    with pytest.raises(RequestExists):
        case.take.pull("r", "p")
    assert case.take.request("r")[CSA].committed == 9
    case.taker.check()


def test_pulls_at_a_time_are_bounded(case: Case):
    """Eight wait for the peer, the ninth is told to come later; all of them are whole in the end."""
    for i in range(9):
        feed(case.give, f"r{i}", 0, 20)
    begun, go_on = threading.Semaphore(0), threading.Event()

    def spoil(path: str, body: bytes) -> bytes:
        if path.endswith("/export"):
            begun.release()
            assert go_on.wait(30)
        return body

    case.between.spoil = spoil
    threads = [threading.Thread(target=case.take.pull, args=(f"r{i}", "p")) for i in range(8)]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            assert begun.acquire(timeout=30)
        with pytest.raises(QueueFull):
            case.take.pull("r8", "p")
    finally:
        go_on.set()
        for thread in threads:
            thread.join()
    assert len(case.taker.worker.requests) == 8
    case.take.pull("r8", "p")


def test_drafts_are_final_and_the_lease_runs(case: Case):
    """The peer's lease covers the transfer; a pull that fails leaves the request there as it was, but for drafts."""
    feed(case.give, "r", 45, 48, draft_tokens=[3])
    assert case.give.lease("r", 0.5) == 0.5
    case.between.spoil = lambda path, body: time.sleep(0.7) or body if path.endswith("/entries") else body
    assert case.take.pull("r", "p").state[CSA].committed == 48
    for client in (case.give, case.take):
        with pytest.raises(ApiError, match="truncate_too_far"):
            client.truncate("r", 46)
        feed(client, "r", 48, 60)
