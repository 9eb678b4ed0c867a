"""`kvfold simulate`: a simulated scheduler with disaggregated prefill, over one worker, a fleet, or on paper.

trace         who arrives when, with how many tokens
rows          the random rows of their tokens
compose       what goes into a worker's next step
simulation    the loop; `clock` virtual or real, `workers` real or on paper, `trouble` when they fail
costs         what a step takes on the virtual clock, from `launches` measured on a GPU
check         every entry against the reference
accounting    scale on paper: bytes, steps and handles a second
"""

from .clock import RealClock, VirtualClock
from .compose import Policy
from .costs import Costs
from .launches import LaunchModel
from .rows import RowSource, shapes_of
from .simulation import Simulation
from .trace import Arrival, TraceError, read_trace, synthetic, write_trace
from .workers import FleetWorkers, OneWorker, OnPaper, SimulationError

__all__ = [
    "Arrival",
    "Costs",
    "FleetWorkers",
    "LaunchModel",
    "OnPaper",
    "OneWorker",
    "Policy",
    "RealClock",
    "RowSource",
    "Simulation",
    "SimulationError",
    "TraceError",
    "VirtualClock",
    "read_trace",
    "shapes_of",
    "synthetic",
    "write_trace",
]
