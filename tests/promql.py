"""The queries of the shipped dashboard and alerts, and what they name: for tests with and without a Prometheus."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

DOCKER = Path(__file__).parents[1] / "docker"
DASHBOARD = json.loads((DOCKER / "grafana/dashboards/kvfold.json").read_text(encoding="utf-8"))
ALERTS = yaml.safe_load((DOCKER / "prometheus/alerts.yml").read_text(encoding="utf-8"))

_VARIABLES = {"$__rate_interval": "1m", "$worker": ".*"}
_SELECTOR = re.compile(r"\b(kvfold_\w+|up)\b(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)(=~|!=|!~|=)"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|on|ignoring|without)\s*\(([^)]*)\)")
_COMPARISON = re.compile(r"\s(?:[<>]=?|==)\s[^()]*$")


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric's name and the (label, operator, value) that a query wants of it."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]


def panels() -> list[dict[str, Any]]:
    """Every panel that shows data."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def panel_queries() -> list[tuple[str, str]]:
    """(panel title, PromQL), with Grafana's variables filled in."""
    return [(panel["title"], _filled(target["expr"])) for panel in panels() for target in panel["targets"]]


def alert_rules() -> list[dict[str, Any]]:
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


def selectors(query: str) -> list[Selector]:
    return [Selector(name, tuple(_MATCHER.findall(inside))) for name, inside in _SELECTOR.findall(query)]


def labels(query: str) -> set[str]:
    """Labels that the query groups or joins by."""
    return {label.strip() for group in _GROUPING.findall(query) for label in group.split(",") if label.strip()}


def _filled(query: str) -> str:
    for variable, value in _VARIABLES.items():
        query = query.replace(variable, value)
    return query
