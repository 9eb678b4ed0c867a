"""What the scheduler does when a worker refuses, stops or dies.

429      new requests wait for a place; if there are none, the youngest gives up its own and starts over later;
         one that is alone waits as long as the worker says, and tries again
503      its requests go to other workers
lost     the fleet finds out who has how much of each request, and the rest is sent again
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import (
    ApiError,
    Busy,
    KvfoldError,
    PeerFailed,
    PositionConflict,
    PositionGap,
    QueueFull,
    StepFailed,
    TransportError,
    Unavailable,
    UnknownRequest,
)
from ..fleet import FleetError
from .request import Request
from .workers import SimulationError

if TYPE_CHECKING:
    from .lane import Lane
    from .simulation import Simulation

WAIT_S = 1.0
"""Where a refusal does not say how long."""
MOST_REFUSALS = 30
"""In a row, of a request that is alone at its worker."""
LOST = (TransportError, UnknownRequest, PositionConflict, PositionGap, PeerFailed, FleetError)
"""After these nobody but the fleet knows where the request stands."""


def step_failed(simulation: Simulation, lane: Lane, error: KvfoldError) -> None:
    """Nothing of the step was kept, or nobody knows. Raises the error where no waiting mends it."""
    if isinstance(error, ApiError):
        simulation.tally.refusals[error.code] += 1
    if isinstance(error, (QueueFull, StepFailed)):
        _wait(simulation, lane, error)
    elif isinstance(error, Busy):
        _busy(simulation, lane, error)
    elif isinstance(error, Unavailable):
        _stopping(simulation, lane, error)
    elif isinstance(error, LOST):
        for request in list(lane.requests):
            _recover(simulation, lane, request)
    else:
        raise error


def move_failed(simulation: Simulation, lane: Lane, request: Request, error: KvfoldError) -> None:
    """The request is in the lane that it could not leave."""
    if isinstance(error, ApiError):
        simulation.tally.refusals[error.code] += 1
    if isinstance(error, Busy):
        return
    if not isinstance(error, (*LOST, Unavailable)):
        raise error
    _recover(simulation, lane, request)


def finish_failed(simulation: Simulation, lane: Lane, request: Request) -> None:
    """Its last step had ended, and its worker was lost before it was looked at and released."""
    lane.leave(request)
    request.lane, has = simulation.workers.recover(request, lane.role)
    if has >= request.committed:  # all is there, and nothing of it could be sent again
        simulation.workers.release(request)
        has = 0
    simulation.tally.recovered += 1
    request.lose_the_end(has)
    simulation.wait_for_a_place(request)


def abandon(simulation: Simulation) -> None:
    """The simulation ends before its end: what runs is waited for, and what workers hold is released."""
    for pending in [*simulation.moves, *(lane.pending for lane in simulation.lanes.values() if lane.pending)]:
        with suppress(KvfoldError):
            pending.result()
    for request in simulation.requests:
        if request.lane is not None and not request.released:
            try:
                simulation.workers.release(request)
            except KvfoldError:  # it does not answer: leases end by themselves
                return


def _busy(simulation: Simulation, lane: Lane, error: Busy) -> None:
    newcomers = [request for request in lane.requests if request.committed == 0]
    if len(newcomers) == len(lane.requests):
        newcomers = newcomers[1:]
    if newcomers:
        for request in newcomers:
            _unseat(simulation, lane, request)
    elif len(lane.requests) > 1:
        youngest = max(lane.requests, key=lambda request: request.idx)
        simulation.workers.release(youngest)
        youngest.go_back(0)
        simulation.tally.preempted += 1
        _unseat(simulation, lane, youngest)
    else:
        _wait(simulation, lane, error)
    lane.full_until_us = simulation.clock.now_us() + (error.retry_after_s or WAIT_S) * 1e6


def _unseat(simulation: Simulation, lane: Lane, request: Request) -> None:
    lane.leave(request)
    request.lane = None
    simulation.wait_for_a_place(request)


def _wait(simulation: Simulation, lane: Lane, error: ApiError) -> None:
    lane.num_refused += 1
    if lane.num_refused > MOST_REFUSALS:
        raise SimulationError(f"worker {lane.name} refused {MOST_REFUSALS} times in a row: {error}") from error
    lane.wake_us = simulation.clock.now_us() + (error.retry_after_s or WAIT_S) * 1e6


def _stopping(simulation: Simulation, lane: Lane, error: Unavailable) -> None:
    if not simulation.workers.roles().keys() - {lane.name}:
        raise SimulationError(f"worker {lane.name} takes no more steps ({error.code}); start another, run again")
    for request in list(lane.requests):
        _away(simulation, lane, request)


def _away(simulation: Simulation, lane: Lane, request: Request) -> None:
    """From a worker that stops to another one of its role, with all that it has."""
    if request.committed == 0:
        _recover(simulation, lane, request)
        return
    try:
        handed = simulation.workers.hand_over(request, lane.role, keep=False)
    except (*LOST, Busy, Unavailable):
        _recover(simulation, lane, request)
        return
    simulation.tally.hand_over(handed)
    lane.leave(request)
    request.lane = handed.target
    simulation.wait_for_a_place(request)


def _recover(simulation: Simulation, lane: Lane, request: Request) -> None:
    lane.leave(request)
    request.lane, has = simulation.workers.recover(request, lane.role)
    if has > request.committed:  # the reply of a step was lost, and which of its guesses were right is not told
        simulation.workers.release(request)
        has = 0
    simulation.tally.recovered += request.committed > 0
    request.go_back(has)
    simulation.wait_for_a_place(request)
