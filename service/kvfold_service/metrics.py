"""Prometheus metrics, base units, `kvfold_*`; the same numbers for /v1/stats."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvfold_service.engine import Engine

_BUCKETS = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 5.0)


class Metrics:
    """One registry for one service. Pools are read when asked for, on the engine thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.registry = CollectorRegistry()
        self._phase = Histogram(
            "kvfold_step_seconds", "Time of a step by phase.", ["phase"], registry=self.registry, buckets=_BUCKETS
        )
        self.bytes_in = Counter("kvfold_received_bytes", "Bytes of request bodies.", registry=self.registry)
        self.bytes_out = Counter("kvfold_sent_bytes", "Bytes of step replies.", registry=self.registry)
        self.rejections = Counter("kvfold_rejections", "Refused calls by code.", ["code"], registry=self.registry)
        self.registry.register(_State(engine))
        self._sums: dict[str, int] = {}
        self._steps = 0

    def observe_step(self, message: dict[str, Any], reply_bytes: int) -> None:
        self._steps += 1
        self.bytes_out.inc(reply_bytes)
        for phase, us in message["timings_us"].items():
            self._phase.labels(phase).observe(us * 1e-6)
            self._sums[phase] = self._sums.get(phase, 0) + us

    def phases(self) -> dict[str, Any]:
        """Mean µs of a step by phase."""
        return {"mean_us": {phase: total / self._steps for phase, total in self._sums.items()}}

    def expose(self) -> bytes:
        return generate_latest(self.registry)


class _State:
    """The worker's counts and pools as a collector."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        worker = self._engine.worker
        for name, total in worker.totals.items():
            yield CounterMetricFamily(f"kvfold_{name}", f"Number of {name}.", value=total)
        pages = GaugeMetricFamily("kvfold_pool_pages", "Pages by pool and state.", labels=["pool", "state"])
        for group in worker.caches.groups:
            pages.add_metric([group.label, "used"], group.pool.num_used)
            pages.add_metric([group.label, "free"], group.pool.num_free)
        yield pages
        yield GaugeMetricFamily("kvfold_requests_live", "Known requests.", value=len(worker.requests))
        yield GaugeMetricFamily("kvfold_queue_depth", "Calls that wait or run.", value=self._engine.depth)
