"""Spans of calls: one a call, under the caller's traceparent if it sends one, and below a step's one a phase.

Imported only where spans are wanted; it needs the extra `otel`. Sampling, headers and resource attributes are what
OpenTelemetry's own variables say.
"""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import kvfold_client
from kvfold_service.once import STEP, Moments
from kvfold_service.service import SPAN
from kvfold_service.step import Step

PHASES: Final = ("recv", "queue", "plan", "copy", "kernel", "reply")
_EXPORT_S: Final = 5.0
"""How long one export may take."""
_LAST_EXPORT_S: Final = 1.0
"""How long the last one may take, at the end."""
_CALLS: Final = "/v1/"
_CARRIED: Final = (b"traceparent", b"tracestate")


class Tracing:
    """Makes spans and gives them to a processor."""

    def __init__(self, processor: SpanProcessor, worker_id: str) -> None:
        resource = Resource.create({SERVICE_VERSION: kvfold_client.__version__, SERVICE_INSTANCE_ID: worker_id})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "kvfold"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("kvfold", kvfold_client.__version__)
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def sending_to(cls, url: str, worker_id: str) -> Tracing:
        return cls(BatchSpanProcessor(OTLPSpanExporter(url, timeout=_EXPORT_S)), worker_id)

    def around(self, app: ASGIApp) -> ASGIApp:
        """The app, every call under /v1/ in a span of its own."""

        async def traced(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or not scope["path"].startswith(_CALLS):
                await app(scope, receive, send)
                return
            span = scope[SPAN] = self._begin(scope)

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    _note_status(span, message["status"])
                await send(message)

            try:
                await app(scope, receive, noting)
            finally:
                if route := _route(scope):
                    span.update_name(f"{scope['method']} {route}")
                    span.set_attribute("http.route", route)
                span.end()

        return traced

    def _begin(self, scope: Scope) -> Span:
        carrier = {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in _CARRIED}
        return self._tracer.start_span(
            scope["method"],
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            {"http.request.method": scope["method"], "url.path": scope["path"][:200]},
        )

    def step(self, span: Span | None, step: Step, tenant: str, message: dict[str, Any], moments: Moments) -> None:
        """Say of a step's span what ran, and put its phases below it; a batch's phases are each of its steps'."""
        if span is None or not span.is_recording():
            return
        if tenant:
            span.set_attribute("kvfold.tenant", hashlib.blake2b(tenant.encode(), digest_size=8).hexdigest())
        span.set_attributes(
            {
                "kvfold.step_id": step.step_id,
                "kvfold.requests": len(step.requests),
                "kvfold.tokens": step.num_tokens,
                "kvfold.launches": message["launches"],
                "kvfold.skipped": message["skipped"],
            }
        )
        parent, to_unix_ns = set_span_in_context(span), time.time_ns() - time.perf_counter_ns()
        for name, begin, end in _spans(message["timings_us"], moments):
            phase = self._tracer.start_span(name, parent, start_time=begin + to_unix_ns)
            phase.end(end + to_unix_ns)

    def stop(self) -> None:
        """Send what is left, as far as that is quick."""
        ending = threading.Thread(target=self._provider.shutdown, daemon=True)
        ending.start()
        ending.join(_LAST_EXPORT_S)


def _spans(timings_us: dict[str, int], moments: Moments) -> list[tuple[str, int, int]]:
    """(phase, begin, end) in ns of perf_counter. The engine's phases follow one another from the step's arrival on."""
    spans = [("recv", moments.began, moments.received)]
    begin = moments.submitted
    for name in PHASES[1:-1]:
        end = begin + 1000 * timings_us[name]
        spans.append((name, begin, end))
        begin = end
    return [*spans, ("reply", moments.done, moments.encoded)]


def _route(scope: Scope) -> str | None:
    """The call's path with names in place of ids."""
    found = scope.get("route")
    return STEP[1] if scope["path"] == STEP[1] else found and found.path


def _note_status(span: Span, status: int) -> None:
    span.set_attribute("http.response.status_code", status)
    if status >= 500:
        span.set_status(StatusCode.ERROR)
