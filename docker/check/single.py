"""One worker and Prometheus, as compose.yaml runs them."""

from __future__ import annotations

import json
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import step
from engine import CheckFailed, Engine

from kvfold_client import ApiError, Client
from tests import promql

PORT, PROMETHEUS_PORT = 18787, 19090
VARIABLES = {"KVFOLD_PUBLISHED_PORT": str(PORT), "KVFOLD_PROMETHEUS_PORT": str(PROMETHEUS_PORT)}
WORKER = f"http://127.0.0.1:{PORT}"
PROMETHEUS = f"http://127.0.0.1:{PROMETHEUS_PORT}"
TRAFFIC_SECONDS = 25
"""Some scrapes, so that every rate has two samples."""


def check(engine: Engine, secrets: Path, say: Callable[[str], None]) -> None:
    token = (secrets / "client_token").read_text()
    engine.compose("cpu", "up", "-d", "--no-build", "worker", **VARIABLES)
    engine.compose("observability", "up", "-d", "--no-build", "--no-deps", "prometheus", **VARIABLES)
    say(f"worker healthy {engine.wait_healthy('worker'):.1f} s after it was started, nothing compiled before")
    worker = engine.container("worker")
    _hardening(engine, worker, say)
    _refuses_strangers(say)
    say(f"a step over the published port: {step.compare(WORKER, token)}")
    _traffic(token)
    _dashboard(engine, say)
    _stops(engine, worker, say)
    engine.compose("observability", "stop", "prometheus")


def _hardening(engine: Engine, worker: str, say: Callable[[str], None]) -> None:
    def inside(*command: str) -> str:
        return engine.run(engine.cli, "exec", worker, *command)

    def status(name: str) -> str:
        return inside("sed", "-n", f"s/^{name}:[[:space:]]*//p", "/proc/1/status")

    as_it_should_be = {
        "uid 10001": inside("id", "-u") == "10001",
        "read-only root": inside("sh", "-c", "touch /x 2>&1 || true").endswith("Read-only file system"),
        "no capabilities": int(status("CapEff"), 16) == 0,
        "no new privileges": status("NoNewPrivs") == "1",
    }
    if engine.whole:
        as_it_should_be["4 GiB"] = engine.inspect(worker, ".HostConfig.Memory") == str(4 << 30)
    wrong = [name for name, is_so in as_it_should_be.items() if not is_so]
    if wrong:
        raise CheckFailed(f"the worker's container is not: {', '.join(wrong)}")
    say(f"container: {', '.join(as_it_should_be)}; this machine {'enforces' if engine.whole else 'ignores'} limits")


def _refuses_strangers(say: Callable[[str], None]) -> None:
    with Client(WORKER, "not-a-token-of-this-worker", retries=0) as client:
        try:
            client.manifest()
        except ApiError as error:
            if error.code == "unauthorized":
                say("a wrong token is refused")
                return
            raise CheckFailed(f"a wrong token gave {error.code}") from error
    raise CheckFailed("a wrong token is accepted")


def _traffic(token: str) -> None:
    """What a dashboard shows: steps that close windows and steps that do not, reads, releases, refusals."""
    rows = {name: np.ones((1, width), np.float32) for name, width in step.WIDTHS.items()}
    began, position = time.monotonic(), 0
    with Client(WORKER, token, retries=0) as client:
        while time.monotonic() - began < TRAFFIC_SECONDS:
            reply = client.step([("traffic", position, 1)], rows)
            position += 1
            client.read_pages([handle for state in reply.requests["traffic"].values() for handle in state.pages])
            if position == 200:
                client.release("traffic")
                position = 0
                try:
                    client.step([("traffic", 5, 1)], rows)
                except ApiError as error:
                    if error.code != "position_gap":
                        raise CheckFailed(f"a gap gave {error.code}") from error
            time.sleep(0.01)


def _dashboard(engine: Engine, say: Callable[[str], None]) -> None:
    (target,) = _ask("targets?state=active")["activeTargets"]
    if target["health"] != "up" or target["labels"]["worker"] != "worker":
        raise CheckFailed(f"Prometheus does not scrape the worker: {target}")
    empty = [f"{title}: {query}" for title, query in promql.panel_queries() if not _query(query)]
    if empty:
        raise CheckFailed("panels without data:\n" + "\n".join(empty))
    rules = [rule for group in _ask("rules")["groups"] for rule in group["rules"]]
    bad = [rule["name"] for rule in rules if rule["health"] == "err"]
    if bad or len(rules) != len(promql.alert_rules()):
        raise CheckFailed(f"{len(rules)} rules are loaded; these fail: {bad}")
    for words in ("check config /etc/prometheus/prometheus.yml", "test rules /etc/prometheus/tests.yml"):
        engine.run(engine.cli, "exec", engine.container("prometheus"), "promtool", *words.split())
    version = _ask("status/buildinfo")["version"]
    say(f"Prometheus {version}: all {len(promql.panel_queries())} queries of {len(promql.panels())} panels give data")
    say(f"{len(rules)} alerts loaded, promtool's tests of them pass")


def _query(query: str) -> list[Any]:
    return _ask("query?" + urllib.parse.urlencode({"query": query}))["result"]


def _ask(path: str) -> Any:
    with urllib.request.urlopen(f"{PROMETHEUS}/api/v1/{path}", timeout=10) as reply:
        return json.load(reply)["data"]


def _stops(engine: Engine, worker: str, say: Callable[[str], None]) -> None:
    began = time.monotonic()
    engine.compose("cpu", "stop", "worker", **VARIABLES)
    seconds, code = time.monotonic() - began, engine.inspect(worker, ".State.ExitCode")
    if code != "0" or "draining" not in engine.logs(worker):
        raise CheckFailed(f"after SIGTERM the worker exited with {code}:\n{engine.logs(worker)[-2000:]}")
    say(f"SIGTERM: drained and exited with 0 in {seconds:.1f} s")
