"""The scheduler: requests arrive, are seated at workers, prefilled in chunks, decoded together, moved, released.

    wait for an arrival, the end of a step, the end of a move  →  seat requests  →  begin a step at every free worker

Nothing but the clock decides what comes next, so on the virtual one a run is the same every time.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial

from ..client import Client
from ..errors import KvfoldError, TransportError
from ..fleet import Role
from . import trouble
from .clock import Clock, Pending
from .compose import Policy, compose
from .costs import Costs, Step
from .lane import Lane, Tally
from .progress import OnProgress
from .request import Request
from .rows import RowSource
from .step import Outcome, run_step
from .trace import Arrival
from .workers import Handed, Workers

OnFinish = Callable[[Request, Client | None], None]
"""Called with a finished request before it is released, and the client of the worker that has it."""


class Simulation:
    """One run of a trace. `run` once; then `requests` and `tally` say what happened."""

    def __init__(
        self,
        trace: Sequence[Arrival],
        workers: Workers,
        source: RowSource,
        clock: Clock,
        *,
        policy: Policy,
        costs: Costs,
        run_id: str = "simulation",
        speed: float = 1.0,
        on_finish: OnFinish | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.workers, self.source, self.clock = workers, source, clock
        self.policy, self.costs, self.run_id = policy, costs, run_id
        self.requests = [
            Request(idx, f"{run_id}.{idx}", arrival, arrival.timestamp * 1e3 / speed)
            for idx, arrival in enumerate(trace)
        ]
        self.coming = deque(self.requests)
        self.waiting: list[Request] = []
        self.lanes: dict[str, Lane] = {}
        self.moves: dict[Pending, tuple[Request, Lane]] = {}
        self.tally = Tally()
        self.num_finished = 0
        self._on_finish, self._on_progress = on_finish, on_progress
        self._stack = ExitStack()

    def run(self) -> None:
        """Raises KvfoldError: SimulationError, or a refusal that no waiting mends."""
        with self._stack:
            try:
                self._go_on_to_the_end()
            except BaseException:  # Ctrl-C too
                trouble.abandon(self)
                raise

    def _go_on_to_the_end(self) -> None:
        for name in self.workers.roles():
            self.lane(name)
        while self.num_finished < len(self.requests):
            self._arrive()
            self._seat()
            for lane in list(self.lanes.values()):
                self._begin(lane)
            self._wait()
            if self._on_progress is not None:
                self._on_progress(self.num_finished, self.tally, self.clock.now_us())

    def lane(self, name: str) -> Lane:
        """The lane of a worker, which may have joined just now."""
        if name not in self.lanes:
            client = self.workers.client(name)
            beats = None if client is None else self._stack.enter_context(client.heartbeat())
            role = self.workers.roles().get(name, "any")
            self.lanes[name] = Lane(name, len(self.lanes), role, beats)
        return self.lanes[name]

    def wait_for_a_place(self, request: Request) -> None:
        """It is at no worker now; if it is to go to a certain one, `request.lane` says so."""
        self.waiting.append(request)

    @property
    def _first_role(self) -> Role:
        return "prefill" if any(lane.role == "prefill" for lane in self.lanes.values()) else "any"

    def _arrive(self) -> None:
        while self.coming and self.coming[0].arrived_us <= self.clock.now_us():
            self.waiting.append(self.coming.popleft())

    def _seat(self) -> None:
        """First come, first served at each worker; a full one holds up nobody who goes to another."""
        waiting, self.waiting = sorted(self.waiting, key=lambda request: request.idx), []
        now_us = self.clock.now_us()
        for request in waiting:
            if request.lane is None:
                request.lane = self.workers.place(request, self._first_role)
            lane = self.lane(request.lane)
            if len(lane.requests) < self.policy.max_running and lane.full_until_us <= now_us:
                lane.enter(request)
            else:
                self.waiting.append(request)

    def _begin(self, lane: Lane) -> None:
        if lane.pending is not None or lane.wake_us > self.clock.now_us():
            return
        chunks = compose(lane.requests, self.policy, self._accept)
        if not chunks:
            return
        for chunk in chunks:
            chunk.request.last_step = lane.num_steps
        step = lane.step = Step(chunks, self.source.groups)
        cost = self.costs.step(step)
        step_id = f"{self.run_id}.{lane.number}.{lane.num_steps}"
        lane.num_steps += 1
        lane.pending = self.clock.start(partial(self._send, lane.name, step_id, step), lambda outcome: cost.us)

    def _send(self, name: str, step_id: str, step: Step) -> Outcome:
        client = self.workers.client(name)
        return Outcome() if client is None else run_step(client, step_id, step, self.source)

    def _accept(self, request: Request, num_guesses: int) -> int:
        return self.source.accepted(request.idx, request.known, num_guesses, self.policy.acceptance)

    def _wait(self) -> None:
        if self.num_finished == len(self.requests):
            return
        now_us = self.clock.now_us()
        steps = {lane.pending: lane for lane in self.lanes.values() if lane.pending is not None}
        times_us = [self.coming[0].arrived_us] if self.coming else []
        times_us += [lane.wake_us for lane in self.lanes.values() if lane.requests and lane.wake_us > now_us]
        times_us += [lane.full_until_us for lane in self.lanes.values() if lane.full_until_us > now_us]
        for ended in self.clock.wait([*steps, *self.moves], min(times_us, default=math.inf)):
            if ended in steps:
                self._step_ended(steps[ended], ended)
            else:
                self._move_ended(ended)

    def _step_ended(self, lane: Lane, pending: Pending) -> None:
        step, lane.step, lane.pending = lane.step, None, None
        assert step is not None
        try:
            outcome: Outcome = pending.result()
        except KvfoldError as error:
            trouble.step_failed(self, lane, error)
            return
        lane.num_refused = 0
        self.tally.step(step, outcome, self.costs.step(step))
        for chunk in step.chunks:
            request = chunk.request
            request.took(chunk.num_tokens, chunk.num_accepted, pending.done_us)
            lane.remember(request)
            if request.finished:
                self._finish(lane, request)
            elif request.generated and lane.role == "prefill":
                self._move(lane, request)

    def _finish(self, lane: Lane, request: Request) -> None:
        try:
            if self._on_finish is not None:
                self._on_finish(request, self.workers.client(lane.name))
        except trouble.LOST:
            trouble.finish_failed(self, lane, request)
            return
        lane.leave(request)
        with suppress(TransportError):  # it is dead: nothing is left to release
            self.workers.release(request)
        request.released = True
        self.num_finished += 1

    def _move(self, lane: Lane, request: Request) -> None:
        """The prompt is in: on to a worker that decodes. If that has no room, the next step here tries again."""
        lane.requests.remove(request)
        work = partial(self.workers.hand_over, request, "decode", keep=True)
        self.moves[self.clock.start(work, self.costs.move)] = request, lane

    def _move_ended(self, pending: Pending) -> None:
        request, lane = self.moves.pop(pending)
        lane.requests.append(request)
        try:
            handed: Handed = pending.result()
        except KvfoldError as error:
            trouble.move_failed(self, lane, request, error)
            return
        self.tally.hand_over(handed)
        lane.leave(request)
        self.lane(handed.target).enter(request)
        self.lane(handed.target).remember(request)
