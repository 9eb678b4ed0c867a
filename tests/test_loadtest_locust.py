"""loadtest.locustfile: its users, with a stand-in for locust that has what the file uses of it."""

from __future__ import annotations

import argparse
import functools
import importlib
import logging
import sys
import types
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import httpx
import pytest

from kvfold_client import Client, wire
from kvfold_client.loadtest.options import LOCUSTFILE, read

NAME = "kvfold_client.loadtest.locustfile"
MANIFEST = {"max_position": 20, "compressors": [{"name": "layers.0.hca", "kind": "hca", "ratio": 8, "head_dim": 64}]}


class Event:
    def __init__(self) -> None:
        self.listeners: list[Any] = []
        self.fired: list[dict[str, Any]] = []

    def add_listener(self, listener: Any) -> Any:
        self.listeners.append(listener)
        return listener

    def fire(self, **what: Any) -> None:
        self.fired.append(what)


class Parser(argparse.ArgumentParser):
    def add_argument(self, *names: str, is_secret: bool = False, **options: Any) -> Any:
        return super().add_argument(*names, **options)


class Worker:
    """Takes steps that begin where the last one ended, and refuses the one that is next to be refused."""

    def __init__(self) -> None:
        self.committed: dict[str, int] = {}
        self.refuse_next = False
        self.tokens: list[int] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        assert request.headers["authorization"] == "Bearer secret"
        if request.method == "DELETE":
            self.committed.pop(request.url.path.rpartition("/")[2], None)
            return httpx.Response(204)
        if request.url.path == "/v1/manifest":
            return httpx.Response(200, json=MANIFEST)
        return self.step(wire.decode(request.headers["content-type"], request.read()))

    def step(self, message: dict[str, Any]) -> httpx.Response:
        if self.refuse_next:
            self.refuse_next = False
            return self.reply({"code": "queue_full", "message": "no", "retryable": True, "details": {}}, 429)
        for request in message["requests"]:
            assert self.committed.get(request["id"], 0) == request["start"]
            self.committed[request["id"]] = request["start"] + request["num_tokens"]
        (tensor,) = message["tensors"]
        assert tensor["shape"][1] == 2 * 64
        self.tokens.append(tensor["shape"][0])
        fixed = {"epoch": "e", "compat": "c", "launches": 1, "skipped": [], "requests": [], "timings_us": {}}
        return self.reply({"step_id": message["step_id"], **fixed}, 200)

    @staticmethod
    def reply(message: dict[str, Any], status: int) -> httpx.Response:
        return httpx.Response(status, content=wire.encode(wire.FRAME, message), headers={"content-type": wire.FRAME})


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    stand_in = types.ModuleType("locust")
    events = SimpleNamespace(init_command_line_parser=Event())
    vars(stand_in).update(
        User=type("User", (), {}), task=lambda function: function, constant=lambda s: lambda _: s, events=events
    )
    monkeypatch.setitem(sys.modules, "locust", stand_in)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    level = logging.getLogger("httpx").level
    yield importlib.import_module(NAME)
    logging.getLogger("httpx").setLevel(level)
    sys.modules.pop(NAME, None)


@pytest.fixture
def worker(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Worker:
    made = Worker()
    monkeypatch.setattr(module, "Client", functools.partial(Client, transport=httpx.MockTransport(made)))
    return made


def started(module: ModuleType, kind: str, *flags: str) -> Any:
    parser = Parser()
    (add_options,) = module.events.init_command_line_parser.listeners
    add_options(parser)
    user = getattr(module, kind)()
    user.host = "http://worker"
    options = parser.parse_args(["--kvfold-token=secret", *flags])
    user.environment = SimpleNamespace(parsed_options=options, events=SimpleNamespace(request=Event()))
    user.on_start()
    return user


def test_decode(module, worker):
    user = started(module, "DecodeUser", "--batch=3", "--output=5")
    for _ in range(5):
        user.decode()
    assert worker.committed == {}, "they had decoded --output tokens"
    user.decode()
    assert list(worker.committed.values()) == [1, 1, 1]
    fired = user.environment.events.request.fired
    assert [(event["request_type"], event["name"], event["exception"]) for event in fired] == [
        ("step", "decode", None)
    ] * 6
    assert all(event["response_time"] > 0 and event["response_length"] == 3 * 128 * 2 for event in fired)
    user.on_stop()
    assert worker.committed == {}


def test_a_refusal_is_an_event_and_a_new_beginning(module, worker):
    user = started(module, "DecodeUser", "--batch=2")
    user.decode()
    worker.refuse_next = True
    user.decode()
    user.decode()
    names = [event["name"] for event in user.environment.events.request.fired]
    assert names == ["decode", "decode: queue_full", "decode"]
    assert user.environment.events.request.fired[1]["exception"].code == "queue_full"
    assert list(worker.committed.values()) == [1, 1]
    user.on_stop()


def test_no_request_outgrows_the_model(module, worker):
    user = started(module, "DecodeUser", "--batch=1", "--output=500")
    for _ in range(45):
        user.decode()
    assert list(worker.committed.values()) == [5]
    user.on_stop()


def test_prefill(module, worker):
    user = started(module, "PrefillUser", "--prompt=7", "--dtype=fp32")
    user.prefill()
    user.prefill()
    assert worker.tokens == [7, 7]
    assert worker.committed == {}
    assert user.environment.events.request.fired[0]["response_length"] == 7 * 128 * 4
    user.on_stop()


def test_without_locust_it_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "locust", None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(SystemExit, match="pip install locust"):
        importlib.import_module(NAME)


def test_where_it_is(capsys):
    with pytest.raises(SystemExit, match="0"):
        read(["--locustfile"])
    assert capsys.readouterr().out == f"{LOCUSTFILE}\n"
    assert LOCUSTFILE.is_file()
