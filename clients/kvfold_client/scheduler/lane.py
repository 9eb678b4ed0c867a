"""One worker as the simulation sees it: the requests that are there, and the step that is under way."""

from collections import Counter
from dataclasses import dataclass, field

from ..fleet import Role
from ..heartbeat import Heartbeat
from .clock import Pending
from .costs import Step, StepCost
from .request import Request
from .step import Outcome
from .workers import Handed


@dataclass(slots=True, eq=False)
class Lane:
    name: str
    number: int
    role: Role
    beats: Heartbeat | None
    """Keeps the leases of its requests; None on paper."""
    requests: list[Request] = field(default_factory=list)
    pending: Pending | None = None
    step: Step | None = None
    """The one that is pending."""
    num_steps: int = 0
    num_refused: int = 0
    """Steps refused in a row with nobody left to make room for."""
    wake_us: float = 0.0
    """No step before."""
    full_until_us: float = 0.0
    """No new request before, unless one leaves."""

    def enter(self, request: Request) -> None:
        self.requests.append(request)
        request.lane = self.name

    def leave(self, request: Request) -> None:
        """Its place and, at the worker, its pages are free again."""
        self.requests.remove(request)
        self.full_until_us = 0.0
        self.forget(request)

    def remember(self, request: Request) -> None:
        """The worker knows it: keep its lease."""
        if self.beats is not None:
            self.beats.add(request.id)

    def forget(self, request: Request) -> None:
        if self.beats is not None:
            self.beats.discard(request.id)


@dataclass(slots=True)
class Tally:
    """What a simulation did, in numbers. Bytes and µs are sums."""

    steps: int = 0
    rows: int = 0
    row_bytes: int = 0
    compressor_steps: int = 0
    skipped: int = 0
    """Of these, those in which no window closed."""
    launches: int = 0
    """As the worker counts them; 0 on paper."""
    windows: int = 0
    guesses: int = 0
    accepted: int = 0
    model_us: float = 0.0
    compress_us: float = 0.0
    call_us: float = 0.0
    made_us: float = 0.0
    phases_us: Counter[str] = field(default_factory=Counter)
    handed_over: int = 0
    entry_bytes: int = 0
    open_row_bytes: int = 0
    hand_over_s: float = 0.0
    refusals: Counter[str] = field(default_factory=Counter)
    preempted: int = 0
    recovered: int = 0

    def step(self, step: Step, outcome: Outcome, cost: StepCost) -> None:
        self.steps += 1
        self.rows += step.num_rows
        self.row_bytes += step.row_bytes
        self.compressor_steps += sum(len(group.names) for group in step.groups)
        self.skipped += len(step.skipped)
        self.launches += outcome.launches
        self.windows += step.num_windows
        self.guesses += sum(chunk.num_guesses for chunk in step.chunks)
        self.accepted += sum(chunk.num_accepted for chunk in step.chunks)
        self.model_us += cost.model_us
        self.compress_us += cost.compress_us
        self.call_us += outcome.call_us
        self.made_us += outcome.made_us
        self.phases_us.update(outcome.timings_us)

    def hand_over(self, handed: Handed) -> None:
        self.handed_over += 1
        self.entry_bytes += handed.entry_bytes
        self.open_row_bytes += handed.open_row_bytes
        self.hand_over_s += handed.seconds
