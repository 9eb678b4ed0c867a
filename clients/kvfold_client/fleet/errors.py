"""What a fleet can fail at, beside what a call to a worker raises.

KvfoldError
└── FleetError
    ├── NoWorker      no living worker of the role (and compat) takes new requests
    └── WorkerLost    the worker that held the request is dead, started anew, or trusts itself no more; see `recover`
"""
# ruff: noqa: N818

from ..errors import KvfoldError


class FleetError(KvfoldError):
    """Root of what a fleet raises on its own."""


class NoWorker(FleetError):
    """Nobody can own the request now."""


class WorkerLost(FleetError):
    """`worker` held the request in an epoch that is over."""

    def __init__(self, worker: str, request_id: str) -> None:
        super().__init__(f"worker {worker} was lost with what it held of request {request_id}; recover it")
        self.worker = worker
        self.request_id = request_id

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.worker, self.request_id)
