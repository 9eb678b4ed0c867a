"""Schemathesis on the calls without a binary body: what /openapi.json promises is what the worker answers."""

from __future__ import annotations

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings

from kvfold_kernels import backends
from kvfold_service import app, engine, weights
from kvfold_service.auth import Tokens
from kvfold_service.manifest import load
from kvfold_service.settings import Settings
from kvfold_service.worker import Worker


def build() -> FastAPI:
    manifest = load("tiny")
    worker = Worker(manifest, weights.seeded(manifest, 1), backends.load("reference"), max_requests=2, pages=4)
    options = Settings(manifest="tiny", weights="random:1", max_body_bytes=1 << 20)
    service = app.Service(options, engine.Engine(worker), Tokens(None))
    service.not_ready = None
    return app.build(service)


schema = schemathesis.openapi.from_asgi("/openapi.json", build()).include(method=["GET", "DELETE"])


@schema.parametrize()
@settings(max_examples=50, suppress_health_check=list(HealthCheck), deadline=None)
def test_calls_without_a_body(case: schemathesis.Case) -> None:
    case.call_and_validate()


def test_every_route_is_described() -> None:
    paths = build().openapi()["paths"]
    described = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    from kvfold_service.openapi import CALLS

    assert described == set(CALLS)


@pytest.mark.parametrize("path", ["/v1/step", "/v1/import", "/v1/pages/read", "/v1/verify"])
def test_binary_bodies_are_described_in_both_encodings(path: str) -> None:
    body = build().openapi()["paths"][path]["post"]["requestBody"]
    assert set(body["content"]) == {"application/msgpack", "application/vnd.kvfold.frame"}
