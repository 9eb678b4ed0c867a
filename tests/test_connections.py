"""connections: those that only wait make room; when all are busy the newcomer is told, and health is still served."""

from __future__ import annotations

import contextlib
import re
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvfold_client import Client, errors, wire
from kvfold_client.wire import FRAME
from kvfold_service import connection as connections
from tests.http_cases import assert_refused
from tests.service_cases import HCA, Process, step_body, stream

MOST = 8
HEAD = f"POST /v1/step HTTP/1.1\r\nHost: x\r\nContent-Type: {FRAME}\r\n"
BODY = wire.encode(FRAME, step_body([("busy", 0, 4)], [HCA]))


@pytest.fixture(scope="module")
def process(tmp_path_factory) -> Iterator[Process]:
    """Its patience is long: whatever is shown out here is shown out for another's sake."""
    flags = (f"--max-connections={MOST}", "--receive-timeout=300")
    with Process(tmp_path_factory.mktemp("worker"), *flags) as process:
        yield process
        assert process.end() == 0


@pytest.fixture
def connect(process) -> Iterator:
    """Connections that have sent so much, open until the end of the test."""
    with contextlib.ExitStack() as stack:

        def connect(*sent: str) -> list[socket.socket]:
            made = [stack.enter_context(socket.create_connection(("127.0.0.1", process.port))) for _ in sent]
            for one, text in zip(made, sent, strict=True):
                one.settimeout(30)
                one.sendall(text.encode())
            return made

        yield connect
    with Client(process.url) as client:  # those of the test are gone, but for this one
        while client.stats()["connections"]["open"] > 1:
            time.sleep(0.01)


def is_open(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        while connection.recv(4096):
            continue
        return False
    except BlockingIOError:
        return True
    except ConnectionError:
        return False


def run_step(process: Process, id: str) -> None:
    with Client(process.url, retries=0) as client:
        client.step([(id, 0, 4)], {HCA: stream(HCA, id)[:4]})
        client.release(id)


@pytest.mark.parametrize("sent", ["", "GET /livez HT", f"{HEAD}Content-Le"], ids=["idle", "a word", "slow heads"])
def test_those_that_wait_make_room_oldest_first(process, connect, sent):
    made = connect(*[sent] * (3 * MOST))
    run_step(process, "r")
    assert [is_open(one) for one in made[: 2 * MOST]] == [False] * (2 * MOST)
    assert [is_open(one) for one in made[2 * MOST + 1 :]] == [True] * (MOST - 1)
    with Client(process.url) as client:
        assert client.stats()["connections"] == {"open": MOST, "max": MOST}


def test_kept_connections_wait_too(process, connect):
    """Who was served and keeps its connection is no better than who has not asked yet."""
    answered = connect(*["GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"] * MOST)
    for one in answered:
        assert one.recv(4096).startswith(b"HTTP/1.1 200")
    connect("", "")
    run_step(process, "r")
    kept = [is_open(one) for one in answered]
    assert kept == sorted(kept)
    assert 2 <= kept.count(False) <= 3  # one less if a connection of the test before was still there


def test_when_all_are_busy_the_newcomer_is_told(process, connect):
    """Bodies on their way are not shown out. Health and metrics are served; and once one has ended, so is the rest."""
    head = f"{HEAD}Content-Length: {len(BODY)}\r\n\r\n"
    busy = connect(*[head + "KVF1"] * MOST)
    with httpx.Client(base_url=process.url) as http:
        while http.get("/v1/stats").json()["connections"]["open"] < MOST + 1:
            time.sleep(0.01)
        refused = http.get("/v1/requests/r")
        assert_refused(refused, "queue_full", max_connections=MOST)
        assert refused.headers["retry-after"] == "1"
        with pytest.raises(errors.QueueFull):
            run_step(process, "r")
        assert [http.get(path).status_code for path in ("/livez", "/readyz", "/metrics")] == [200] * 3
        assert all(is_open(one) for one in busy)
        busy[0].setblocking(True)
        busy[0].sendall(BODY[4:])
        assert busy[0].recv(4096).startswith(b"HTTP/1.1 200")
        busy[0].close()
        while (served := http.get("/v1/requests/busy")).status_code == 429:
            time.sleep(0.01)
        assert served.status_code == 200
        http.delete("/v1/requests/busy")


def test_calls_that_follow_each_other_on_one_connection(process, connect):
    """Three heads in one piece: it does not wait before the last is answered."""
    (one,) = connect("GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
    answer = b""
    while answer.count(b"HTTP/1.1 200") < 3:
        answer += one.recv(4096)
    run_step(process, "r")
    assert is_open(one)


# -- what one connection may do ------------------------------------------------------------------------------------


def resident_kib(process: Process) -> int:
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1])


@pytest.mark.parametrize("more", ["", "Connection: Upgrade\r\nUpgrade: h2c\r\n"], ids=["", "upgrade"])
def test_a_flood_of_calls_on_one_connection_costs_that_connection(process, more):
    """Nobody reads the replies of some hundred thousand calls."""
    before, sent = resident_kib(process), f"GET /v1/x HTTP/1.1\r\n{more}\r\n".encode() * 2000
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", process.port)) as flood, contextlib.suppress(ConnectionError):
            for _ in range(200):
                flood.sendall(sent)
            pytest.fail("it was not shown out")
    assert httpx.get(f"{process.url}/livez").elapsed.total_seconds() < 1
    assert resident_kib(process) < before + 40_000
    assert "Traceback" not in process.log.read_text()


def test_as_many_calls_as_may_wait_are_answered_in_turn(process, connect):
    (one,) = connect("GET /livez HTTP/1.1\r\n\r\n" * (1 + connections.MOST_BEHIND))
    answer = b""
    while answer.count(b"HTTP/1.1 200") < 1 + connections.MOST_BEHIND:
        answer += one.recv(4096)


@pytest.mark.parametrize("pieces", [1, 2, 60])
@pytest.mark.parametrize("ask", ["h2c", "websocket", "TLS/1.0"])
def test_who_asks_for_another_protocol_is_served_in_this_one(process, connect, ask, pieces):
    """As clients do that would rather speak HTTP/2: body and all, and what follows on the connection."""
    head = f"{HEAD}Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {ask}\r\nHTTP2-Settings: AAMAAABkAAQ\r\n"
    (one,) = connect("")
    id = f"{ask[:3]}-{pieces}"
    body = wire.encode(FRAME, step_body([(id, 0, 4)], [HCA], step_id=id))
    data = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body + b"GET /livez HTTP/1.1\r\n\r\n"
    for i in range(pieces):
        one.sendall(data[i * len(data) // pieces : (i + 1) * len(data) // pieces])
    answer = b""
    while not answer.endswith(b'{"status":"ok"}'):
        answer += (part := one.recv(4096))
        assert part, answer
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    httpx.delete(f"{process.url}/v1/requests/{id}")


def test_connect_is_no_call(process, connect):
    (one,) = connect("CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n")
    assert one.recv(4096).startswith(b"HTTP/1.1 400")
    assert not one.recv(4096)


def test_who_has_sent_everything_may_say_so_and_is_answered(process, connect):
    body = wire.encode(FRAME, step_body([("half", 0, 4)], [HCA], step_id="half"))
    (one,) = connect(f"{HEAD}Content-Length: {len(body)}\r\n\r\n")
    one.sendall(body)
    one.shutdown(socket.SHUT_WR)
    answer = b""
    while part := one.recv(4096):
        answer += part
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in answer
    httpx.delete(f"{process.url}/v1/requests/half")


@pytest.mark.parametrize("room", [-200, 200])
def test_a_head_in_one_piece_is_bounded_too(process, connect, room):
    head = f"GET /livez HTTP/1.1\r\nX: {'x' * (connections.HEAD_BYTES - 40 - room)}\r\n\r\n"
    (one,) = connect(head)
    assert one.recv(4096).startswith(b"HTTP/1.1 200" if room > 0 else b"HTTP/1.1 400")


def test_trailers_in_one_piece_are_bounded_too(process, connect):
    (one,) = connect(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n0\r\nX: {'x' * connections.HEAD_BYTES}\r\n\r\n")
    assert not is_answered(one)


def is_answered(connection: socket.socket) -> bool:
    with contextlib.suppress(ConnectionError):
        return connection.recv(4096).startswith(b"HTTP/1.1 200")
    return False


@pytest.mark.parametrize(
    ("limits", "wanted", "allowed", "raised"),
    [
        ((1024, 4096), 1000, 1000, (1256, 4096)),
        ((1024, 1024), 1000, 768, (1024, 1024)),
        ((100, 100), 1000, 1, (100, 100)),
        ((8192, 8192), 1000, 1000, None),
        ((100, resource.RLIM_INFINITY), 1000, 1000, (1256, resource.RLIM_INFINITY)),
        ((resource.RLIM_INFINITY,) * 2, 1000, 1000, None),
    ],
)
def test_connections_are_files(monkeypatch, limits, wanted, allowed, raised):
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, given: made.append(given))
    assert connections.allow_files(wanted) == allowed
    assert made == ([raised] if raised else [])
