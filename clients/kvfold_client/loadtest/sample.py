"""One step as its sender saw it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .traffic import Traffic

OK = "ok"
UNFINISHED = "unfinished"
"""No answer when the traffic ended: its latency is at least what is told."""
UNREACHABLE = "unreachable"
BAD_REPLY = "bad_reply"


@dataclass(slots=True)
class Sample:
    """Times are seconds since the traffic began, on its clock; NaN: it has not happened."""

    traffic: Traffic = field(repr=False)
    idx: int
    scheduled_s: float
    """When the step was due. Latency counts from here, whatever kept it from being sent."""
    op: str = "step"
    sent_s: float = math.nan
    done_s: float = math.nan
    outcome: str = UNFINISHED
    """ok, unfinished, unreachable, bad_reply, or the code of the worker's refusal."""
    worker: str = ""
    num_tokens: int = 0
    row_bytes: int = 0
    timings_us: dict[str, float] = field(default_factory=dict)
    """The worker's phases."""

    @property
    def latency_s(self) -> float:
        """From the scheduled time to the end."""
        return self.done_s - self.scheduled_s

    @property
    def call_s(self) -> float:
        """From the sending to the end: what a client that waits for each answer would call latency."""
        return self.done_s - self.sent_s

    def begin(self) -> None:
        """It is being sent now."""
        self.sent_s = self.traffic.now()

    def end(self, outcome: str) -> None:
        """It has ended now, for good."""
        self.done_s, self.outcome = self.traffic.now(), outcome
        self.traffic.on_end(self)

    def to_json(self) -> dict[str, Any]:
        """Times in ms; what has not happened is null."""
        return {
            "idx": self.idx,
            "op": self.op,
            "outcome": self.outcome,
            "worker": self.worker,
            "scheduled_ms": _ms(self.scheduled_s),
            "sent_ms": _ms(self.sent_s),
            "done_ms": _ms(self.done_s),
            "latency_ms": _ms(self.latency_s),
            "num_tokens": self.num_tokens,
            "row_bytes": self.row_bytes,
            "timings_us": self.timings_us,
        }


def _ms(seconds: float) -> float | None:
    return None if math.isnan(seconds) else round(seconds * 1e3, 3)
