"""What a step costs on the virtual clock: a model that is assumed, compressors from measured launches.

step = step_us + token_us · rows + Σ over compressors of LaunchModel.launch_us
move = move_us + bytes / link_bytes_per_s
"""

from dataclasses import dataclass, field
from functools import cached_property

from .launches import LaunchModel
from .request import Chunk
from .rows import Group
from .workers import Handed


@dataclass(frozen=True)
class Step:
    """What goes into a worker at a time, and how many windows it closes, those with guesses in them too."""

    chunks: tuple[Chunk, ...]
    groups: tuple[Group, ...]

    @cached_property
    def num_rows(self) -> int:
        return sum(chunk.stop - chunk.start for chunk in self.chunks)

    @cached_property
    def num_closed(self) -> tuple[int, ...]:
        """Windows of one compressor of each group."""
        return tuple(
            sum(chunk.stop // group.ratio - chunk.start // group.ratio for chunk in self.chunks)
            for group in self.groups
        )

    @property
    def num_windows(self) -> int:
        """Of all compressors together."""
        return sum(n * len(group.names) for n, group in zip(self.num_closed, self.groups, strict=True))

    @property
    def skipped(self) -> tuple[str, ...]:
        """Compressors in which no window closes."""
        idle = (group.names for n, group in zip(self.num_closed, self.groups, strict=True) if not n)
        return tuple(name for names in idle for name in names)

    @property
    def row_bytes(self) -> int:
        return self.num_rows * sum(group.row_bytes for group in self.groups)


@dataclass(frozen=True, slots=True)
class StepCost:
    model_us: float
    compress_us: float

    @property
    def us(self) -> float:
        return self.model_us + self.compress_us


@dataclass(frozen=True, slots=True)
class Costs:
    """Times of the simulated model. The first four are assumptions, not measurements: give those of your own model."""

    step_us: float = 8000.0
    """A forward pass, whatever it carries: weights have to be read."""
    token_us: float = 30.0
    """One more row in it."""
    move_us: float = 1000.0
    """A hand-over, whatever it carries."""
    link_bytes_per_s: float = 25e9
    launches: LaunchModel = field(default_factory=LaunchModel)

    def step(self, step: Step) -> StepCost:
        compress_us = sum(
            len(group.names) * self.launches.launch_us(group.kind, step.num_rows, num_closed)
            for group, num_closed in zip(step.groups, step.num_closed, strict=True)
        )
        return StepCost(self.step_us + self.token_us * step.num_rows, compress_us)

    def move(self, handed: Handed) -> float:
        """µs of a hand-over."""
        return self.move_us + (handed.entry_bytes + handed.open_row_bytes) / self.link_bytes_per_s * 1e6
