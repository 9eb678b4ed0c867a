"""What a load test gives, and who is told while it runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .points import Point
from .sample import Sample
from .traffic import Traffic


class LoadtestError(RuntimeError):
    """The test could not begin, or not go on; the message says what to do."""


class Stop:
    """Ends a test early, and remembers why; the test still releases and reports."""

    def __init__(self) -> None:
        self.event = asyncio.Event()
        self.reason: str | None = None

    def __call__(self, reason: str) -> None:
        self.reason = self.reason or reason
        self.event.set()


@dataclass
class Watcher:
    """What to do when something happens; nothing by itself."""

    note: Callable[[str], None] = lambda text: None
    began: Callable[[Point, Traffic], None] = lambda point, traffic: None
    step: Callable[[Point, Sample], None] = lambda point, sample: None
    ended: Callable[[Point, dict[str, Any]], None] = lambda point, summary: None


@dataclass
class Result:
    run: str
    """Begins the id of every request and step."""
    workers: list[dict[str, Any]]
    """As they described themselves at the beginning."""
    points: list[dict[str, Any]] = field(default_factory=list)
    """A summary each."""
    samples: list[list[Sample]] = field(default_factory=list)
    """Of each point."""
    stopped: str | None = None
    """Why it ended before its last point."""
    num_shortened: int = 0
    """Requests of a trace that were longer than the model."""
    not_released: dict[str, str] = field(default_factory=dict)
    """Requests, and why they were not."""
    after: list[dict[str, Any]] = field(default_factory=list)
    """The workers when all was released."""
