"""tracing: a span a call and a phase, under the caller's own; and nothing at all where nobody wants them."""

from __future__ import annotations

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from kvfold_service import app as apps
from kvfold_service.auth import Tokens
from kvfold_service.tracing import PHASES, Tracing
from tests.http_cases import Api, said, services
from tests.service_cases import step_body

serve = pytest.fixture(services)
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"
TOKEN = "step-token-000000"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name in ("SDK_DISABLED", "TRACES_EXPORTER", "EXPORTER_OTLP_ENDPOINT", "EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(f"OTEL_{name}", raising=False)


# -- in process ----------------------------------------------------------------------------------------------------


@pytest.fixture
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
async def api(serve, spans) -> Api:
    """A service whose spans are kept."""
    api = serve()
    api.service.tracing = Tracing(SimpleSpanProcessor(spans), "w-1")
    app = api.service.tracing.around(apps.build(api.service))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    api.http = httpx.AsyncClient(transport=transport, base_url="http://kvfold")
    return api


def by_name(spans: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    finished = spans.get_finished_spans()
    assert len({span.name for span in finished}) == len(finished)
    return {span.name: span for span in finished}


@pytest.mark.anyio
async def test_a_step_is_a_span_and_its_phases_lie_in_it(api, spans):
    reply = said(await api.post("/v1/step", step_body([("r", 0, 9), ("s", 0, 3)]), traceparent=TRACEPARENT))
    made = by_name(spans)
    call = made.pop("POST /v1/step")
    assert call.kind is SpanKind.SERVER
    assert f"{call.context.trace_id:032x}" == TRACE
    assert f"{call.parent.span_id:016x}" == CALLER
    told = {"http.route": "/v1/step", "http.response.status_code": 200, "kvfold.step_id": "s1", "kvfold.requests": 2}
    told |= {"kvfold.tokens": 12, "kvfold.launches": reply["launches"], "kvfold.skipped": ()}
    assert told.items() <= call.attributes.items()
    assert tuple(made) == PHASES
    edges = [(call.start_time, call.start_time)]
    for span in made.values():
        assert span.parent.span_id == call.context.span_id
        assert span.start_time <= span.end_time
        edges.append((span.start_time, span.end_time))
    assert edges == sorted(edges)
    assert edges[-1][1] <= call.end_time + 1_000_000
    for name, us in reply["timings_us"].items():
        assert (made[name].end_time - made[name].start_time) // 1000 == us
    assert call.resource.attributes["service.name"] == "kvfold"
    assert call.resource.attributes["service.instance.id"] == "w-1"


@pytest.mark.anyio
@pytest.mark.parametrize("traceparent", ["", "00-0-0-00", "00-" + "0" * 32 + f"-{CALLER}-01", "x" * 5000, "é"])
async def test_what_is_no_traceparent_begins_a_trace(api, spans, traceparent):
    headers = {"traceparent": traceparent.encode("latin-1")}
    assert (await api.http.get("/v1/requests/none", headers=headers)).status_code == 404
    (call,) = spans.get_finished_spans()
    assert call.parent is None
    assert call.name == "GET /v1/requests/{id}"


@pytest.mark.anyio
async def test_a_caller_that_does_not_sample_is_not_sampled(api, spans):
    assert (await api.post("/v1/step", step_body([("r", 0, 9)]), traceparent=f"{TRACEPARENT[:-2]}00")).is_success
    assert not spans.get_finished_spans()


@pytest.mark.anyio
async def test_refusals_and_failures(api, spans, monkeypatch):
    await api.step([("r", 3, 9)])
    call = by_name(spans)["POST /v1/step"]
    assert call.attributes["error.type"] == "position_gap"
    assert call.attributes["http.response.status_code"] == 409
    assert call.status.status_code is StatusCode.UNSET
    spans.clear()
    monkeypatch.setattr(api.service.worker, "request", lambda *_: 1 / 0)
    await api.get("/v1/requests/r")
    call = by_name(spans)["GET /v1/requests/{id}"]
    assert call.status.status_code is StatusCode.ERROR
    spans.clear()
    for path in ("/livez", "/readyz", "/metrics", "/openapi.json"):
        await api.get(path)
    assert not spans.get_finished_spans()


@pytest.mark.anyio
async def test_a_step_sent_again_has_no_phases(api, spans):
    for _ in range(2):
        await api.step([("r", 0, 9)])
    names = [span.name for span in spans.get_finished_spans()]
    assert names == [*PHASES, "POST /v1/step", "POST /v1/step"]


@pytest.mark.anyio
async def test_a_tenant_is_not_named(api, spans, tmp_path):
    (tmp_path / "tokens").write_text(f"{TOKEN} team-secret step,pull\n")
    api.service.tokens = Tokens(tmp_path / "tokens")
    for id in ("r", "s"):
        await api.step([(id, 0, 9)], step_id=id, token=TOKEN)
    first, second = (span for span in spans.get_finished_spans() if span.kind is SpanKind.SERVER)
    assert first.attributes["kvfold.tenant"] == second.attributes["kvfold.tenant"]
    assert not [
        span for span in spans.get_finished_spans() if "team-secret" in span.to_json() or TOKEN in span.to_json()
    ]
