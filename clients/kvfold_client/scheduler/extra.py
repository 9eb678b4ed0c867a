"""What only the worker extra can do, found by entry points (group kvfold.expected) when it is asked for."""

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from .workers import SimulationError

GROUP = "kvfold.expected"


def load(name: str) -> Callable[..., Any]:
    """`sizes` or `reference`, see kvfold_service.expected. Raises SimulationError if the extra is not installed."""
    try:
        (point,) = entry_points(group=GROUP, name=name)
        return point.load()
    except (ModuleNotFoundError, ValueError) as error:
        missing = f"{error.name} is missing" if isinstance(error, ModuleNotFoundError) else "it is not installed"
        raise SimulationError(f"this needs the worker extra ({missing}): pip install 'kvfold[worker]'") from error
