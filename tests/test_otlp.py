"""otlp: a real worker's spans at a receiver; where they go, and nothing at all where nobody wants them."""

from __future__ import annotations

import http.server
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvfold_client import wire
from kvfold_client.wire import MSGPACK
from kvfold_service import serve as serving
from kvfold_service.settings import read
from kvfold_service.tracing import PHASES
from tests.service_cases import HCA, Process, no_start, step_body
from tests.test_settings import NEEDED
from tests.test_tracing import CALLER, TRACE, TRACEPARENT


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name in ("SDK_DISABLED", "TRACES_EXPORTER", "EXPORTER_OTLP_ENDPOINT", "EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)


# -- the process ---------------------------------------------------------------------------------------------------


class Receiver:
    """What an OTLP collector does, as far as a sender can see."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        requests = self.requests

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["content-length"]))
                requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def spans(self) -> list:
        resources = [resource for request in self.requests for resource in request.resource_spans]
        return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield receiver
    finally:
        receiver.server.shutdown()
        thread.join()
        receiver.server.server_close()


def test_a_worker_sends_its_spans_and_the_last_of_them_at_its_end(tmp_path):
    body = wire.encode(MSGPACK, step_body([("r", 0, 3)], [HCA]))
    headers = {"content-type": MSGPACK, "traceparent": TRACEPARENT}
    with receiving() as receiver:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_SERVICE_NAME": "prefill"}
        with Process(tmp_path, "--worker-id=w-1", **environment) as process:
            assert httpx.post(f"{process.url}/v1/step", content=body, headers=headers).status_code == 200
            assert process.end() == 0
        spans = {span.name: span for span in receiver.spans()}
    assert set(spans) == {*PHASES, "POST /v1/step"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    assert spans["POST /v1/step"].parent_span_id.hex() == CALLER
    attributes = {pair.key: pair.value for pair in receiver.requests[0].resource_spans[0].resource.attributes}
    assert attributes["service.name"].string_value == "prefill"
    assert attributes["service.instance.id"].string_value == "w-1"


def test_a_receiver_that_is_not_there_holds_up_neither_calls_nor_the_end(tmp_path):
    with Process(tmp_path, "--otlp-endpoint=http://127.0.0.1:9") as process:
        began = time.monotonic()
        for _ in range(20):
            assert httpx.get(f"{process.url}/v1/requests/none").status_code == 404
        assert process.end() == 0
        assert time.monotonic() - began < 8


# -- whether -------------------------------------------------------------------------------------------------------


def test_nothing_is_imported_where_no_spans_are_wanted():
    """FastAPI's newer versions import the bare API by themselves."""
    code = (
        "import sys, kvfold_service.serve; print(*(name for name in sys.modules if name.startswith('opentelemetry.')))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert not [name for name in loaded.split() if name.split(".")[1] in ("sdk", "exporter", "proto")]
    assert serving.tracing_to(None, "w") is None


def test_without_the_extra_a_sentence_says_which(monkeypatch):
    monkeypatch.delitem(sys.modules, "kvfold_service.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with no_start("--otlp-endpoint", "pip install 'kvfold[otel]'"):
        serving.tracing_to("http://127.0.0.1:4318/v1/traces", "w")


@pytest.mark.parametrize(
    ("argv", "environment", "url"),
    [
        ([], {}, None),
        (["--otlp-endpoint=http://c:4318"], {}, "http://c:4318/v1/traces"),
        (["--otlp-endpoint=https://c/"], {}, "https://c/v1/traces"),
        (["--otlp-endpoint=https://c/otlp/x"], {}, "https://c/otlp/x"),
        ([], {"KVFOLD_OTLP_ENDPOINT": "http://k:1"}, "http://k:1/v1/traces"),
        ([], {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://o:1/base/"}, "http://o:1/base/v1/traces"),
        ([], {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://t:1/own"}, "http://t:1/own"),
        (
            [],
            {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://o:1", "KVFOLD_OTLP_ENDPOINT": "http://k:1"},
            "http://k:1/v1/traces",
        ),
        ([], {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://o:1", "OTEL_SDK_DISABLED": "true"}, None),
        ([], {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://o:1", "OTEL_TRACES_EXPORTER": "none"}, None),
    ],
)
def test_where_spans_go(monkeypatch, argv, environment, url):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert read([*NEEDED, *argv]).otlp_endpoint == url


@pytest.mark.parametrize("url", ["c:4318", "ftp://c", "http://", "x"])
def test_an_endpoint_that_is_no_url(url):
    with no_start("--otlp-endpoint", "http://127.0.0.1:4318"):
        read([*NEEDED, f"--otlp-endpoint={url}"])
