"""Prometheus metrics, base units, `kvfold_*`; the same numbers for /v1/stats."""

from __future__ import annotations

import collections
from collections import deque
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from kvfold_client.wire import STATUS
from kvfold_service import canary
from kvfold_service.admission import Admission
from kvfold_service.connection import Connections
from kvfold_service.engine import Engine

_BUCKETS = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0, 5.0)
_BY_KIND = ("launches", "skipped")
_RECENT_STEPS = 1000


class Metrics:
    """One registry for one service. Pools are read when asked for, on the engine thread."""

    def __init__(self, engine: Engine, admission: Admission, connections: Connections) -> None:
        self._engine, self._connections = engine, connections
        self.registry = CollectorRegistry()
        self._phase = Histogram(
            "kvfold_step_seconds", "Time of a step by phase.", ["phase"], registry=self.registry, buckets=_BUCKETS
        )
        self.bytes_in = Counter("kvfold_received_bytes", "Bytes of request bodies.", registry=self.registry)
        self.bytes_out = Counter("kvfold_sent_bytes", "Bytes of msgpack and frame replies.", registry=self.registry)
        self._rejections = Counter("kvfold_rejections", "Refused calls by code.", ["code"], registry=self.registry)
        self._refused: collections.Counter[str] = collections.Counter()
        for code in STATUS:
            self._rejections.labels(code)  # a rate needs a zero before the first
        self.proofs = Counter("kvfold_proofs", "Canary steps by outcome.", ["outcome"], registry=self.registry)
        for outcome in (canary.PASSED, canary.NO_ROOM, canary.FAILED):
            self.proofs.labels(outcome)
        self.registry.register(_State(engine, admission, connections))
        self._phases: dict[str, Histogram] = {}
        self._sums: dict[str, int] = {}
        self._recent: dict[str, deque[int]] = {}
        self._steps = 0

    def observe_step(self, timings_us: dict[str, int]) -> None:
        self._steps += 1
        for phase, us in timings_us.items():
            if phase not in self._sums:
                self._phases[phase] = self._phase.labels(phase)
                self._recent[phase] = deque(maxlen=_RECENT_STEPS)
            self._phases[phase].observe(us * 1e-6)
            self._sums[phase] = self._sums.get(phase, 0) + us
            self._recent[phase].append(us)

    def refuse(self, code: str) -> None:
        self._rejections.labels(code).inc()
        self._refused[code] += 1

    def worker_stats(self) -> dict[str, Any]:
        """What /v1/stats says of the worker's state. On the engine thread."""
        worker = self._engine.worker
        counts = {name: {kind: n for (what, kind), n in worker.by_kind.items() if what == name} for name in _BY_KIND}
        return worker.stats() | {"by_kind": counts}

    def stats(self) -> dict[str, Any]:
        """… and of the calls. On the event loop."""
        return {
            "mean_us": {phase: total / self._steps for phase, total in self._sums.items()},
            "recent_us": {phase: _quantiles(recent) for phase, recent in self._recent.items()},
            "queue_depth": self._engine.depth,
            "connections": {"open": self._connections.num_open, "max": self._connections.most},
            "rejections": dict(self._refused),
        }

    def expose(self) -> bytes:
        return generate_latest(self.registry)


def _quantiles(recent: deque[int]) -> dict[str, int]:
    ordered = sorted(recent)
    return {"p50": ordered[len(ordered) // 2], "p99": ordered[len(ordered) * 99 // 100]}


class _State:
    """The worker's counts and pools as a collector."""

    def __init__(self, engine: Engine, admission: Admission, connections: Connections) -> None:
        self._engine, self._worker = engine, engine.worker
        self._admission, self._connections = admission, connections

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        worker, caches = self._worker, self._worker.caches
        for name, total in worker.totals.items():
            if name not in _BY_KIND:
                yield CounterMetricFamily(f"kvfold_{name}", f"Number of {name}.", value=total)
        kinds = sorted({cache.part.kind for cache in caches.compressors})
        for name in _BY_KIND:
            family = CounterMetricFamily(f"kvfold_{name}", f"Kernel launches: {name}.", labels=["kind"])
            for kind in kinds:
                family.add_metric([kind], worker.by_kind[name, kind])
            yield family
        yield from self._pools()
        slots = GaugeMetricFamily("kvfold_ring_slots", "Ring slots by state.", labels=["state"])
        slots.add_metric(["used"], caches.num_rings - len(worker.free_slots))
        slots.add_metric(["free"], len(worker.free_slots))
        yield slots
        yield GaugeMetricFamily("kvfold_requests_live", "Requests whose lease runs.", value=len(worker.requests))
        depth = max(0, self._engine.depth - 1)  # but for this one
        yield GaugeMetricFamily("kvfold_queue_depth", "Calls that wait or run.", value=depth)
        yield GaugeMetricFamily("kvfold_connections", "Open connections.", value=self._connections.num_open)
        staging = GaugeMetricFamily("kvfold_staging_bytes", "Bytes for bodies in flight by state.", labels=["state"])
        staging.add_metric(["used"], self._admission.staging.num_lent)
        staging.add_metric(["free"], self._admission.staging.num_bytes - self._admission.staging.num_lent)
        yield staging

    def _pools(self) -> Iterable[Metric]:
        pages = GaugeMetricFamily("kvfold_pool_pages", "Pages by pool and state.", labels=["pool", "state"])
        unread = GaugeMetricFamily("kvfold_pool_pages_unread", "Used pages that nobody has fetched.", labels=["pool"])
        for group in self._worker.caches.groups:
            pages.add_metric([group.label, "used"], group.pool.num_used)
            pages.add_metric([group.label, "free"], group.pool.num_free)
            unread.add_metric([group.label], int(group.pool.unread.sum()))
        yield pages
        yield unread
