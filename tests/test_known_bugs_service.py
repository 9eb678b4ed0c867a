"""Faults that other engines' services shipped, each as the small input that shows its whole kind.

`test_known_bugs` has those of kernels. Here are those of handles, tenants, transfer, slots, and bytes from a socket.
"""

from __future__ import annotations

import itertools
import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from kvfold_client import Client, wire
from kvfold_client.wire import FRAME, MSGPACK
from kvfold_service.worker import Worker
from tests.service_cases import (
    HCA,
    NAMES,
    RATIO,
    REAL,
    REAL_NAMES,
    SMALL,
    Process,
    alone,
    assert_entries,
    committed,
    entries_of,
    export,
    feed,
    import_,
    parts_of,
    read,
    refused,
    run,
    send,
    step_body,
    stream,
    tensor,
    whole_workers,
)

Start = Callable[..., Worker]
start = pytest.fixture(whole_workers)


def handles_of(worker: Worker, id: str, tenant: str = "") -> list[str]:
    parts = worker.request(id, tenant)["compressors"]
    return [handle for part in parts.values() for handle in part["pages"]]


# -- state ---------------------------------------------------------------------------------------------------------


# vLLM 52234, 52276: the handle of a freed page whose page is in use again.
def test_the_handle_of_a_page_that_has_a_new_owner(start):
    """A pool of few pages goes round many times: no handle of before ever reads again."""
    worker, old = start(max_requests=2, pages=5), []
    for turn, ends in enumerate(("release", "truncate", "release", "lease", "release")):
        id = f"r{turn}"
        feed(worker, id, [14])
        run(worker, [(id, 14, 3)], draft_tokens=[3])
        old += handles_of(worker, id)
        if ends == "truncate":
            worker.truncate(id, 14)
            old += handles_of(worker, id)
            worker.release(id)
        elif ends == "release":
            worker.release(id)
        else:
            worker.requests["", id].expires = worker.clock()
        feed(worker, "next", [40])
        good = handles_of(worker, "next")
        for handle in old:
            for call in (worker.read_pages, worker.verify):
                with refused("stale_handle"):
                    call([*good, handle])
        for name in NAMES:
            assert_entries(worker, "next", name)
        worker.release("next")
        old += good


# LMCache 4825: tenant B reads tenant A's handle.
def test_another_tenant_s_handle_says_nothing(start):
    """Live, freed, forged, of another worker: B is told the same in every case, and A's page is untouched."""
    worker, other = start(), start(worker_id="other")
    for made in (worker, other):
        run(made, [("r", 0, 16), ("gone", 0, 16)], tenant="a")
    live, freed = handles_of(worker, "r", "a"), handles_of(worker, "gone", "a")
    foreign = handles_of(other, "r", "a")
    worker.release("gone", "a")
    told = []
    for handle in (live[0], freed[0], foreign[0], "A" * 52, live[0][:-1], live[0] + "=", ""):
        for call in (worker.read_pages, worker.verify):
            with refused("unknown_handle") as caught:
                call([handle], "b")
            told.append(caught.value.body())
    assert all(body == told[0] for body in told)
    with refused("unknown_handle"):
        worker.read_pages(foreign, "a")
    with refused("stale_handle"):
        worker.read_pages(freed, "a")
    assert len(read(worker, live, "a")) == len(live)


# SGLang 38922, 38819: export at an odd token count, import where the ring has another size.
@pytest.mark.parametrize("slack", [0, 1, 5, 64])
@pytest.mark.parametrize("num_tokens", [1, 5, 7, 9, 13, 15, 37])
def test_an_odd_token_count_into_a_ring_of_another_size(start, num_tokens, slack):
    giver, taker = start(), start(manifest=SMALL | {"draft_slack": slack})
    feed(giver, "r", [1] * num_tokens)
    import_(taker, "r", export(giver, "r"))
    rings = [{cache.rings.shape[1] for cache in worker.caches.compressors} for worker in (giver, taker)]
    assert not rings[0] & rings[1]
    feed(taker, "r", [1] * 23)
    for name in NAMES:
        assert_entries(taker, "r", name)


# SGLang 30339, 34562; ATOM 1417: [0, 300) cold against resume at 256 with imported state.
@pytest.mark.parametrize("resumed_at", [255, 256, 257])
@pytest.mark.parametrize("entries", [True, False])
def test_resume_at_256_from_imported_state(start, resumed_at, entries):
    warm, resumed = start(manifest=REAL), start(manifest=REAL)
    feed(warm, "r", [resumed_at], REAL_NAMES)
    import_(resumed, "r", export(warm, "r", entries=entries))
    feed(resumed, "r", [300 - resumed_at], REAL_NAMES)
    for name in REAL_NAMES:
        assert committed(resumed, "r", name) == 300
        got, cold = entries_of(resumed, "r", name), alone(resumed.backend, "r", name)
        if entries:
            np.testing.assert_array_equal(got, cold, strict=True)
        else:
            assert len(got) == len(cold) - resumed_at // REAL["compressors"][REAL_NAMES.index(name)]["ratio"]
            np.testing.assert_array_equal(got, cold[len(cold) - len(got) :], strict=True)


# Ascend 10296: two requests share the first 128 but not 512 tokens.
def test_the_same_first_128_tokens_are_no_reason_to_share_a_page(start):
    """Fed together, then apart; what one does to its pages the other never sees."""
    worker = start(manifest=REAL)
    body = step_body([("a", 0, 128), ("b", 0, 128)], REAL_NAMES)
    same = [tensor(np.concatenate([stream(name, "a")[:128]] * 2), name) for name in REAL_NAMES]
    reply = send(worker, body | {"tensors": same})
    for name in REAL_NAMES:
        a, b = (entries_of(worker, id, name) for id in "ab")
        np.testing.assert_array_equal(a, b, strict=True)
        assert not {*parts_of(reply, "a")[name]["pages"]} & {*parts_of(reply, "b")[name]["pages"]}
    run(worker, [("a", 128, 172), ("b", 128, 172)], REAL_NAMES)
    assert not set(handles_of(worker, "a")) & set(handles_of(worker, "b"))
    for cache in worker.caches.compressors:
        a, b = (cache.page_table[worker.requests["", id].slot, : cache.num_pages[0]].tolist() for id in "ab")
        assert not set(a) & set(b)
        assert not np.array_equal(entries_of(worker, "a", cache.name)[-1], entries_of(worker, "b", cache.name)[-1])
    worker.release("b")
    for name in REAL_NAMES:
        assert_entries(worker, "a", name)


# pypto-lib 1260: the requests of a step in another order each time.
def test_requests_in_another_order_each_step(start):
    """Every order of four requests, by turns; their slots stay, their rows never mix."""
    worker, at = start(), dict.fromkeys("abcd", 0)
    for turn, order in enumerate(itertools.permutations("abcd")):
        requests = [(id, at[id], (turn + 2 * place) % 5) for place, id in enumerate(order)]
        run(worker, requests, pad=turn % 3)
        at |= {id: begin + length for id, begin, length in requests}
        worker.check_integrity()
    assert min(at.values()) > 40
    for id, name in itertools.product("abcd", NAMES):
        assert committed(worker, id, name) == at[id]
        assert_entries(worker, id, name)


# pypto-lib 1260: a slot that another request had.
@pytest.mark.parametrize("num_tokens", [1, 3, 7, 8, 13, 41])
def test_a_slot_is_as_good_as_new(start, num_tokens):
    """Whatever the one before left in its ring and pages, drafts and imports included, the next one begins at 0."""
    worker, giver = start(max_requests=1), start()
    feed(giver, "given", [num_tokens])
    before = export(giver, "given", entries=False)
    for first in ("fed", "given"):
        if first == "fed":
            run(worker, [("fed", 0, num_tokens)], draft_tokens=[1])
        else:
            import_(worker, "given", before)
        slot = worker.requests["", first].slot
        worker.release(first)
        import_(worker, "moved", before)
        with refused("truncate_too_far", draft_tokens=0):
            worker.truncate("moved", num_tokens - 1)
        worker.release("moved")
        run(worker, [("r", 0, 1)])
        assert worker.requests["", "r"].slot == slot
        told = worker.request("r")["compressors"]
        assert all("first_entry" not in part for part in told.values())
        with refused("truncate_too_far"):
            worker.truncate("r", 0)
        feed(worker, "r", [2, 5, 30])
        for name in NAMES:
            assert len(entries_of(worker, "r", name)) == 38 // RATIO[name]
            assert_entries(worker, "r", name)
        worker.release("r")


# -- packages that are missing -------------------------------------------------------------------------------------

WITHOUT = """
import importlib.util, sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in MISSING:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name in MISSING else real(name, *args)
from kvfold_client import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def without(missing: set[str], *command: str) -> subprocess.CompletedProcess[str]:
    """`kvfold …` on a machine that lacks these packages."""
    code = f"MISSING = {missing!r}\n{WITHOUT}"
    return subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=120)


SERVE = ("serve", "--manifest", "tiny", "--weights", "random:1", "--port", "0")


# vLLM 43735: import and run with optional dependencies missing.
@pytest.mark.parametrize("package", ["torch", "fastapi", "xxhash"])
def test_without_a_package_that_serving_needs(package):
    """One sentence with the package and the extra, whatever else is there; the client works."""
    ended = without({package}, *SERVE)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"kvfold serve needs the worker extra ({package} is missing): pip install 'kvfold[worker]'\n"
    )
    assert without({package}, "version").returncode == 0


def test_without_numba_the_reference_is_offered_and_nothing_slow_is_picked():
    ended = without({"numba"}, *SERVE)
    assert ended.returncode == 2
    assert "needs the package numba, which is not installed" in ended.stderr
    assert "Traceback" not in ended.stderr
    told = without({"numba", "triton", "transformers"}, "doctor").stdout
    assert re.search(r"reference +can run", told)
    assert re.search(r"cpu +backend cpu needs the package numba", told)


def test_a_worker_runs_without_what_it_does_not_need(tmp_path):
    """numba, triton, the CUTLASS DSL and transformers; the reference serves a step."""
    missing = {"numba", "llvmlite", "triton", "cutlass", "transformers", "ml_dtypes", "scipy", "pandas"}
    code = f"MISSING = {missing!r}\n{WITHOUT}"
    command = [sys.executable, "-c", code, *SERVE, "--backend", "reference"]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process:
        try:
            ready = process.stdout.readline().decode().split()
            assert ready[:1] == ["ready"], (tmp_path / "log").read_text()
            assert ready[2] == "backend=reference"
            with Client(ready[1]) as client:
                reply = client.step([("r", 0, 130)], {"layers.0.hca": np.zeros((130, 1024), np.uint16)})
                assert reply.requests["r"]["layers.0.hca"].num_entries == 1
                client.release("r")
        finally:
            process.terminate()


# -- bytes from a socket -------------------------------------------------------------------------------------------

MAX_BODY = 400_000


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    flags = (f"--max-body-bytes={MAX_BODY}", f"--staging-bytes={2 * MAX_BODY}")
    process = Process(tmp_path_factory.mktemp("worker"), *flags)
    yield process
    process.end()


def connect(process: Process, *, length: int | None = None, path: str = "/v1/step", kind: str = FRAME) -> socket.socket:
    """A connection with the head of a POST sent; without a length the body is chunked."""
    connection = socket.create_connection(("127.0.0.1", process.port), 60)
    framing = "Transfer-Encoding: chunked" if length is None else f"Content-Length: {length}"
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\n{framing}\r\n\r\n".encode())
    return connection


def answer(connection: socket.socket) -> tuple[int, dict[str, Any]]:
    """Status and message of the response."""
    with connection, connection.makefile("rb") as file:
        status = int(file.readline().split()[1])
        headers = dict(line.decode().lower().strip().split(": ") for line in iter(file.readline, b"\r\n"))
        return status, wire.decode(headers["content-type"], file.read(int(headers["content-length"])))


def released(process: Process, *ids: str) -> None:
    with Client(process.url) as client:
        for id in ids:
            client.release(id)
        assert client.stats()["requests"]["live"] == 0


# Triton server CVE-2025-23310: 100,000 one-byte chunks.
def test_a_body_of_100_000_chunks(process):
    """It is the step that it says, and costs no more memory than its bytes."""
    body = wire.encode(FRAME, step_body([("r", 0, 24)], pad=2))
    assert 100_000 < len(body) < 140_000
    before = _resident(process)
    with connect(process) as connection:
        for start in range(0, len(body), 1000):
            connection.sendall(b"".join(b"1\r\n%c\r\n" % byte for byte in body[start : start + 1000]))
        connection.sendall(b"0\r\n\r\n")
        status, reply = answer(connection)
    assert status == 200, reply
    assert {part["committed"] for part in parts_of(reply, "r").values()} == {24}
    assert _resident(process) - before < 20 << 20
    released(process, "r")


def _resident(process: Process) -> int:
    statm = Path(f"/proc/{process.process.pid}/statm").read_text()
    return int(statm.split()[1]) * os.sysconf("SC_PAGESIZE")


# The same CVE: a chunked body past the limit, which announces no length.
@pytest.mark.parametrize("chunk", [1, 1000, MAX_BODY + 1])
def test_a_chunked_body_past_the_limit(process, chunk):
    """Refused as soon as it is past it; the rest is not waited for."""
    sent, some = 0, max(1, 1000 // chunk)
    with connect(process) as connection:
        while sent <= MAX_BODY:
            connection.sendall((b"%x\r\n" % chunk + bytes(chunk) + b"\r\n") * some)
            sent += chunk * some
        status, error = answer(connection)
    assert (status, error["code"], error["details"]) == (413, "body_too_large", {"limit": MAX_BODY})
    released(process)


# The same CVE: a slow sender.
def test_slow_senders_hold_up_nobody(process):
    """Forty connections whose bodies do not come: the last ten of no known length, which find no room.

    The others leave room for small steps, and those go on. A slow body that has come after all is answered.
    """
    slow = [connect(process, length=20_000) for _ in range(30)] + [connect(process) for _ in range(10)]
    longest = 0.0
    try:
        with Client(process.url, retries=4) as client:
            for at in range(30):
                for connection in slow[:30]:
                    connection.sendall(b"\xc1")
                began = time.monotonic()
                client.step([("r", at, 1)], {HCA: stream(HCA, "r")[at : at + 1]})
                longest = max(longest, time.monotonic() - began)
            assert client.request("r")[HCA].committed == 30
        slow[0].sendall(bytes(20_000 - 30))
        status, error = answer(slow[0])
        assert (status, error["code"]) == (400, "malformed")
        status, error = answer(slow[-1])
        assert (status, error["code"]) == (429, "queue_full")
    finally:
        for connection in slow:
            connection.close()
    assert longest < 5
    released(process, "r")


# NIXL and five P/D stacks: pickle from the network.
class Trap:
    """Whoever unpickles it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("path", ["/v1/step", "/v1/import", "/v1/pages/read", "/v1/requests/r/export"])
def test_nothing_pickled_is_parsed(process, tmp_path, path):
    """As the body, as an extension type, as a field's or a tensor's bytes, in both encodings."""
    trap = tmp_path / "sprung"
    payload = pickle.dumps(Trap(trap))
    header = msgpack.packb({"version": 1, "x": msgpack.ExtType(42, payload)})
    frame = b"KVF1\x01\0\0\0" + len(header).to_bytes(4, "little") + header
    tensor = {"compressor": HCA, "dtype": "bf16", "shape": [1, 256], "data": payload}
    part = {"committed": 1, "open_rows": tensor, "open_positions": [0], "entries": tensor}
    bodies = [
        (MSGPACK, payload),
        (FRAME, payload),
        (FRAME, b"KVF1\x01\0\0\0" + len(payload).to_bytes(4, "little") + payload),
        (FRAME, frame + bytes(-len(frame) % 64)),
        *(
            (MSGPACK, msgpack.packb(message))
            for message in (
                msgpack.ExtType(42, payload),
                {"version": 1, "handles": [msgpack.ExtType(1, payload)]},
                {"version": msgpack.Timestamp(1), "handles": []},
                {"version": 1, "handles": [payload]},
                {"version": 1, "pickle": payload},
                step_body([("r", 0, 1)], [], positions=payload) | {"tensors": [tensor]},
                step_body([("r", 0, 1)], []) | {"tensors": [tensor | {"dtype": "pickle"}]},
                {"version": 1, "id": "r", "compat": process.compat, "compressors": {HCA: part}},
            )
        ),
    ]
    for kind, body in bodies:
        with connect(process, length=len(body), path=path, kind=kind) as connection:
            connection.sendall(body)
            status, error = answer(connection)
        assert (status, error["code"]) in ((400, "malformed"), (400, "bad_shape"), (400, "bad_dtype"))
    assert not trap.exists()
    released(process)
    pickle.loads(payload)
    assert trap.exists()  # it would have


def test_the_service_imports_no_pickle_of_its_own():
    """Nothing in the three packages reads pickles, by whatever door."""
    doors = re.compile(r"\b(pickle|cPickle|dill|cloudpickle|shelve|marshal|torch\.load|allow_pickle=True)\b")
    root = Path(__file__).parents[1]
    sources = [path for part in ("clients", "kernels", "service") for path in (root / part).rglob("*.py")]
    assert len(sources) > 40
    assert not [path.name for path in sources if doors.search(path.read_text())]
