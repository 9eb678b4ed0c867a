"""drain: from SIGTERM to exit code 0 within one budget, at once on a second signal; TLS, metrics' port, logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvfold_client import Client, errors, wire
from kvfold_client.wire import FRAME
from kvfold_service import settings
from kvfold_service.drain import drain
from kvfold_service.serve import tls_of
from tests.http_cases import assert_refused, said, services
from tests.service_cases import HCA, NAMES, Gate, Process, no_start, parts_of, stream
from tests.test_settings import NEEDED

serve = pytest.fixture(services)
SECRET = "step-token-0123456789"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


# -- in process ----------------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_what_is_served_while_draining(serve):
    api = serve()
    reply = said(await api.step([("r", 0, 30)]))
    handles = parts_of(reply, "r")[HCA]["pages"]
    exported = said(await api.post("/v1/requests/r/export", {"version": 1}))
    api.service.draining = True
    ready = await api.get("/readyz")
    assert (ready.status_code, ready.json()) == (503, {"status": "not_ready", "reason": "draining"})
    for response in (
        await api.step([("r", 30, 5)], step_id="s2"),
        await api.post("/v1/import", exported | {"id": "new"}),
    ):
        assert_refused(response, "draining")
        assert response.headers["retry-after"] == "1"
    assert (await api.post("/v1/pages/read", {"version": 1, "handles": handles})).status_code == 200
    assert (await api.post("/v1/verify", {"version": 1, "handles": handles})).status_code == 200
    assert (await api.post("/v1/requests/r/export", {"version": 1})).status_code == 200
    assert (await api.post("/v1/requests/r/lease", {"version": 1, "seconds": 9})).status_code == 200
    assert (await api.get("/v1/requests/r")).status_code == 200
    assert (await api.http.delete("/v1/requests/r")).status_code == 204
    assert (await api.get("/livez")).status_code == 200


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["read", "export", "release", "nobody"])
async def test_drain_waits_for_pages_that_nobody_has_fetched(serve, how):
    api = serve()
    reply = said(await api.step([("r", 0, 30)]))
    handles = [handle for part in parts_of(reply, "r").values() for handle in part["pages"]]
    assert await drain(api.service, 0.2) == 0
    if how == "read":
        await api.post("/v1/pages/read", {"version": 1, "handles": handles[1:]})
        assert await drain(api.service, 0.2) == 0
        await api.post("/v1/pages/read", {"version": 1, "handles": handles[:1]})
    elif how == "export":
        await api.post("/v1/requests/r/export", {"version": 1})
    elif how == "release":
        await api.http.delete("/v1/requests/r")
    assert (await drain(api.service, 1) > 0.5) is (how != "nobody")


@pytest.mark.anyio
async def test_drain_waits_for_what_runs(serve):
    gate = Gate()
    api = serve(gate.backend)
    running = asyncio.create_task(api.step([("r", 0, 3)]))
    await gate.running()
    assert await drain(api.service, 0.2) == 0
    gate.go.set()
    assert await drain(api.service, 5) > 3
    assert (await running).status_code == 200


# -- the process ---------------------------------------------------------------------------------------------------


def test_sigterm_under_load(tmp_path):
    """Every step is done or refused, what was done can be read until the last page is fetched, and then it is over."""
    with Process(tmp_path, "--drain-seconds=20", "--max-requests=16", "--lease-seconds=60") as process:
        _drain_under_load(process)


def _drain_under_load(process: Process) -> None:
    rows = {name: stream(name, "r") for name in NAMES}
    done: dict[str, int] = {}
    outcomes: set[str] = set()

    def load(id: str) -> None:
        with Client(process.url, retries=0) as client:
            for turn in range(10_000):
                at = turn % 9 * 8
                name = f"{id}-{turn // 9 % 2}"
                try:
                    if not at:
                        done.pop(name, None)
                        client.release(name)
                    client.step([(name, at, 8)], {name: part[at : at + 8] for name, part in rows.items()})
                    done[name] = at + 8
                except errors.KvfoldError as error:
                    outcomes.add(type(error).__name__)
                    return

    threads = [threading.Thread(target=load, args=(f"r{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    process.signal()
    for thread in threads:
        thread.join()
    assert outcomes == {"Draining"}
    with Client(process.url, retries=0) as client:
        assert not client.ready()
        assert httpx.get(f"{process.url}/readyz").json()["reason"] == "draining"
        time.sleep(0.3)
        assert process.process.poll() is None
        handles = []
        for name, committed in done.items():
            state = client.request(name)
            assert {part.committed for part in state.values()} == {committed}
            handles += [handle for part in state.values() for handle in part.pages]
        began = time.monotonic()
        assert len(client.read_pages(handles)) == len(handles)
    assert process.wait() == 0
    assert time.monotonic() - began < 10


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """A folder with cert.pem, key.pem and a file of tokens."""
    folder = tmp_path_factory.mktemp("tls")
    (folder / "tokens").write_text(f"{SECRET} team step,pull,admin\n")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=kvfold"
    command += " -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    subprocess.run(command.split(), cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def guarded(files) -> Iterator[Process]:
    """TLS, tokens, metrics on a port of their own, JSON logs of everything, and long patience at the end."""
    flags = [f"--tls-cert={files / 'cert.pem'}", f"--tls-key={files / 'key.pem'}", f"--token-file={files / 'tokens'}"]
    process = Process(files, *flags, "--metrics-port=0", "--log-format=json", "--log-level=debug", "--drain-seconds=60")
    with process:
        yield process


@pytest.fixture(scope="module")
def trust(files) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=files / "cert.pem")


def test_tls_and_logs_that_tell_no_secret(guarded, trust):
    assert guarded.url.startswith("https://")
    with Client(guarded.url, SECRET, transport=httpx.HTTPTransport(verify=trust), retries=0) as client:
        rows = {name: stream(name, "r")[:30] for name in NAMES}
        step = client.step([("r-1", 0, 30)], rows, step_id="step-1")
        handles = step.requests["r-1"][HCA].pages
        client.read_pages(handles)
        with pytest.raises(errors.PositionConflict):
            client.step([("r-1", 0, 30)], rows, step_id="step-2")
        with pytest.raises(errors.UnknownRequest):
            client.request(handles[0])  # a handle in a path, which a log may show
        client.release("r-1")
    written = guarded.log.read_text()
    lines = [json.loads(line) for line in written.splitlines()]
    assert all(line.keys() >= {"time", "level", "logger", "message"} for line in lines)
    told = {line["step_id"]: line for line in lines if "step_id" in line}
    assert told["step-1"]["requests"] == ["r-1"]
    assert "position_conflict" in told["step-2"]["message"] or "30 tokens" in told["step-2"]["message"]
    assert "[handle]" in written
    assert not [secret for secret in (SECRET, *handles) if secret in written]


def test_metrics_have_a_port_of_their_own(guarded, trust):
    token = {"authorization": f"Bearer {SECRET}"}
    with httpx.Client(verify=trust) as http:
        assert http.get(f"{guarded.metrics}/metrics").status_code == 401
        assert "kvfold_steps_total" in http.get(f"{guarded.metrics}/metrics", headers=token).text
        for url in (f"{guarded.url}/metrics", f"{guarded.metrics}/v1/stats", f"{guarded.metrics}/readyz"):
            assert http.get(url, headers=token).status_code == 404
        assert http.post(f"{guarded.metrics}/v1/step", headers=token).status_code == 404


def test_a_second_signal_ends_it_at_once(guarded, trust):
    """The first waits for a body that does not come. (The last test of this worker.)"""
    with (
        socket.create_connection(("127.0.0.1", guarded.port)) as plain,
        trust.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        head = f"POST /v1/step HTTP/1.1\r\nHost: x\r\nContent-Type: {FRAME}\r\nContent-Length: 4000\r\n"
        connection.sendall(f"{head}Authorization: Bearer {SECRET}\r\n\r\n".encode() + b"KVF1")
        time.sleep(0.2)
        guarded.signal()
        with httpx.Client(verify=trust) as http:
            while (ready := http.get(f"{guarded.url}/readyz")).status_code == 200:
                time.sleep(0.01)
        assert ready.json()["reason"] == "draining"
        began = time.monotonic()
        guarded.signal(signal.SIGINT)
        assert guarded.process.wait(30) == 1
        assert time.monotonic() - began < 5


def test_handshakes_that_do_not_come_are_connections_too(files, trust, tmp_path):
    """They make room for others, and end when a head would have to be there."""
    flags = [f"--tls-cert={files / 'cert.pem'}", f"--tls-key={files / 'key.pem'}"]
    with (
        Process(tmp_path, *flags, "--max-connections=8", "--receive-timeout=1.5") as process,
        contextlib.ExitStack() as stack,
    ):
        began = time.monotonic()
        silent = [
            stack.enter_context(socket.create_connection(("127.0.0.1", process.port), timeout=30)) for _ in range(40)
        ]
        with httpx.Client(verify=trust, base_url=process.url) as http:
            assert http.get("/v1/stats").json()["connections"] == {"open": 8, "max": 8}
            assert [no_more(one) for one in silent[:32]] == [True] * 32
            assert time.monotonic() - began < 1.5
            assert [no_more(one) for one in silent[33:]] == [True] * 7
            assert time.monotonic() - began < 5
            assert http.get("/v1/stats").json()["connections"]["open"] == 1
        assert process.end() == 0
        assert "Traceback" not in process.log.read_text()


def no_more(connection: socket.socket) -> bool:
    """Waits for the end of a connection that nothing comes on."""
    with contextlib.suppress(ConnectionError):
        return connection.recv(1) == b""
    return True


@pytest.mark.parametrize("what", ["nothing", "a body", "a reply"])
def test_what_still_runs_at_the_end_is_cut_off_and_told(tmp_path, what):
    """Pages that nobody reads are no call: 0. A body that does not come, a reply that is not taken: 1."""
    with Process(tmp_path, "--drain-seconds=1") as process, Client(process.url) as client:
        rows = {name: stream(name, "r")[:90] for name in NAMES}
        handles = [page for part in client.step([("r", 0, 90)], rows).requests["r"].values() for page in part.pages]
        with socket.create_connection(("127.0.0.1", process.port)) as connection:
            if what != "nothing":
                path, body = "read", wire.encode(FRAME, {"version": 1, "handles": handles * 500})
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                head = f"POST /v1/pages/{path} HTTP/1.1\r\nContent-Type: {FRAME}\r\nContent-Length: {len(body)}\r\n\r\n"
                connection.sendall(head.encode() + (body[:-1] if what == "a body" else body))
                time.sleep(0.3)
            process.signal()
            began = time.monotonic()
            assert process.wait() == (0 if what == "nothing" else 1)
            assert 0.9 < time.monotonic() - began < 2
        log = process.log.read_text()
        assert "Traceback" not in log
        assert ("is cut off" in log) is (what != "nothing")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--tls-cert=x"], ("--tls-cert", "--tls-key", "together")),
        (["--tls-key=x"], ("together",)),
        (["--port=9000", "--metrics-port=9000"], ("--metrics-port", "differ")),
        (["--metrics-host=0.0.0.0"], ("--metrics-host", "--token-file", "--insecure")),
        (["--receive-timeout=0"], ("--receive-timeout",)),
        (["--drain-seconds=-1"], ("--drain-seconds",)),
        (["--canary-seconds=nan"], ("--canary-seconds",)),
        (["--max-queue=0"], ("--max-queue",)),
        (["--log-format=xml"], ("--log-format",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_stop_the_start(argv, words):
    with no_start(*words):
        settings.read([*NEEDED, *argv])


@pytest.mark.parametrize("bad", ["missing", "swapped", "other"])
def test_a_certificate_that_cannot_be_used(files, bad, tmp_path):
    cert, key = {
        "missing": (files / "none.pem", files / "key.pem"),
        "swapped": (files / "key.pem", files / "cert.pem"),
        "other": (files / "cert.pem", tmp_path / "key.pem"),
    }[bad]
    if bad == "other":
        subprocess.run(["openssl", "genpkey", "-algorithm=ed25519", f"-out={key}"], check=True)
    with no_start("--tls-cert and --tls-key cannot be used"):
        tls_of(cert, key)
    tls_of(files / "cert.pem", files / "key.pem")
