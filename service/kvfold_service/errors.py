"""What can go wrong, as types.

    StartError                      the worker cannot start: one sentence, exit code 2
    ServiceError                    a call is refused: code, HTTP status, sentence, details; nothing was changed
    └── BrokenDeviceError           … and so will be every later one: the worker stops being ready

Foreign errors are translated where they are caught: pydantic's by `first_problem`, the wire's by `of_wire`.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from kvfold_client.wire import RETRYABLE, STATUS, WireError


class StartError(Exception):
    """A bad option, manifest or weights file; str() is the sentence to print."""


class ServiceError(Exception):
    """A refused call."""

    def __init__(self, code: str, message: str, *, retry_after: float | None = None, **details: Any) -> None:
        super().__init__(message)
        assert code in STATUS, code
        self.code, self.message, self.details, self.retry_after = code, message, details, retry_after

    @property
    def status(self) -> int:
        return STATUS[self.code]

    def body(self) -> dict[str, Any]:
        """The one shape of an error."""
        return {
            "code": self.code,
            "message": self.message,
            "retryable": self.code in RETRYABLE,
            "details": self.details,
        }

    @classmethod
    def of_wire(cls, error: WireError) -> ServiceError:
        return cls(error.code, error.message)


class BrokenDeviceError(ServiceError):
    """A step failed because the device did; `reason` is told by /readyz."""

    def __init__(self, reason: str) -> None:
        super().__init__("step_failed", "the device failed; nothing of the step was kept, send it to another worker")
        self.reason = reason


def first_problem(error: ValidationError) -> str:
    """The first complaint of a pydantic error, as `place: what`."""
    problem = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in problem["loc"])
    text = problem["msg"].removeprefix("Value error, ")
    return f"{place}: {text}" if place else text
