"""Several workers as one: who owns a request, how it moves from one to another, where to go on after a death.

    from kvfold_client.fleet import Fleet, StaticPlane            # or RayPlane, with the extra `ray`

    with Fleet(StaticPlane.from_file("peers.txt"), token=None) as fleet:
        fleet.client_for("r1", "prefill").step([("r1", 0, 130)], tensors)
        moved = fleet.hand_over("r1", to="decode")
        fleet.client_for("r1", "decode").step([("r1", 130, 1)], tensors)

After `TransportError`, `WorkerLost`, `UnknownRequest`, or `PositionGap` with expected 0: `fleet.recover("r1", role)`
says where to go on; tokens from its `start` on are to be sent again.
"""

from .errors import FleetError, NoWorker, WorkerLost
from .fleet import Fleet
from .plane import ControlPlane, Role, WorkerInfo
from .ray import RayPlane
from .records import Moved, Recovered
from .static import StaticPlane

__all__ = [
    "ControlPlane",
    "Fleet",
    "FleetError",
    "Moved",
    "NoWorker",
    "RayPlane",
    "Recovered",
    "Role",
    "StaticPlane",
    "WorkerInfo",
    "WorkerLost",
]
