"""Dashboard and alerts ask for what a worker really exports, so that no panel stays empty and no alert is blind."""

from __future__ import annotations

import re
from typing import Any

import httpx
import numpy as np
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from kvfold_client import ApiError, Client
from tests import promql
from tests.bench.measure import worker

Sample = tuple[str, dict[str, str]]
SCRAPED = {"job": "kvfold", "worker": "worker", "instance": "worker:8787"}
"""Labels that Prometheus adds: prometheus.yml."""
COMPOSE = yaml.safe_load((promql.DOCKER / "compose.yaml").read_text(encoding="utf-8"))
CONFIG = yaml.safe_load((promql.DOCKER / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
QUERIES = [*promql.panel_queries(), *((rule["alert"], rule["expr"]) for rule in promql.alert_rules())]


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    """What a worker exports after a step, a read, a refusal and a release."""
    rows = np.ones((130, 1024), np.float32)
    with worker() as (url, _), Client(url, retries=0) as client:
        reply = client.step([("r1", 0, 130)], {"layers.0.hca": rows})
        client.read_pages(reply.requests["r1"]["layers.0.hca"].pages)
        with pytest.raises(ApiError, match="position_gap"):
            client.step([("r2", 7, 130)], {"layers.0.hca": rows})
        client.release("r1")
        text = httpx.get(f"{url}/metrics").text
    exported = [(s.name, s.labels | SCRAPED) for family in text_string_to_metric_families(text) for s in family.samples]
    return [*exported, ("up", SCRAPED)]


def matching(selector: promql.Selector, samples: list[Sample]) -> list[dict[str, str]]:
    """Labels of the samples that a selector takes."""
    compare = {
        "=": lambda value, wanted: value == wanted,
        "!=": lambda value, wanted: value != wanted,
        "=~": lambda value, wanted: re.fullmatch(wanted, value) is not None,
        "!~": lambda value, wanted: re.fullmatch(wanted, value) is None,
    }
    return [
        labels
        for name, labels in samples
        if name == selector.metric
        and all(compare[how](labels.get(label, ""), wanted) for label, how, wanted in selector.matchers)
    ]


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_every_query_finds_what_it_names(title: str, query: str, samples: list[Sample]) -> None:
    selectors = promql.selectors(query)
    assert selectors
    for selector in selectors:
        found = matching(selector, samples)
        assert found, f"{title}: no sample of {selector}"
        assert promql.labels(query) <= set(found[0]), f"{title}: {selector.metric} lacks a label that is grouped by"


def test_every_metric_is_shown(samples: list[Sample]) -> None:
    """Sums and counts belong to their histogram; the time of creation is not for people."""
    exported = {name for name, _ in samples if not name.endswith("_created")}
    shown = {selector.metric for _, query in QUERIES for selector in promql.selectors(query)}
    assert exported <= shown


def test_a_query_for_nothing_is_noticed(samples: list[Sample]) -> None:
    (selector,) = promql.selectors('sum(rate(kvfold_steps_total{state="used"}[1m]))')
    assert not matching(selector, samples)


def test_alerts_are_described_and_tested() -> None:
    names = [rule["alert"] for rule in promql.alert_rules()]
    operations = (promql.DOCKER.parent / "docs/operations.md").read_text(encoding="utf-8")
    tests = (promql.DOCKER / "prometheus/tests.yml").read_text(encoding="utf-8")
    assert len(set(names)) == len(names)
    assert all(f"`{name}`" in operations and f'alertname="{name}"' in tests for name in names)


def test_prometheus_looks_for_the_workers_of_compose() -> None:
    (job,) = CONFIG["scrape_configs"]
    (found,) = job["dns_sd_configs"]
    services: dict[str, Any] = COMPOSE["services"]
    workers = {name for name, service in services.items() if "KVFOLD_MANIFEST" in service.get("environment", {})}
    assert set(found["names"]) == workers
    credentials = job["authorization"]["credentials_file"]
    assert credentials.removeprefix("/run/secrets/") in services["prometheus"]["secrets"]
    assert job["relabel_configs"] == [{"source_labels": ["__meta_dns_name"], "target_label": "worker"}]


def test_grafana_finds_dashboard_and_prometheus() -> None:
    grafana = promql.DOCKER / "grafana"
    (provider,) = yaml.safe_load((grafana / "provisioning/dashboards/kvfold.yml").read_text())["providers"]
    (source,) = yaml.safe_load((grafana / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    mounted = dict(volume.split(":")[:2] for volume in COMPOSE["services"]["grafana"]["volumes"])
    assert mounted["./grafana/dashboards"] == provider["options"]["path"]
    assert {panel["datasource"]["uid"] for panel in promql.panels()} == {source["uid"]}
    ids = [panel["id"] for panel in promql.DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    assert all(panel["description"] for panel in promql.panels())


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in promql.DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_every_metric_is_explained(samples: list[Sample]) -> None:
    """In docs/operations.md, with its labels."""
    text = (promql.DOCKER.parent / "docs/operations.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `kvfold_")]
    told = {
        name: set(re.findall(r"`(\w+)`", labels)) for names, labels in rows for name in re.findall(r"`(\w+)`", names)
    }
    exported = {
        re.sub(r"_(bucket|sum|count)$", "", name): set(labels) - set(SCRAPED) - {"le"}
        for name, labels in samples
        if name != "up" and not name.endswith("_created")
    }
    assert told == exported
