"""A simulated request, and the piece of it that one step takes.

    known       tokens there are: the prompt and what was generated
    committed   tokens whose rows a worker has, drafts that were withdrawn left out
    pending     known − committed; when it reaches 0 the model has seen all of them and says the next one

The last token is never fed back, so a finished request has input_length + output_length − 1 rows.
"""

from dataclasses import dataclass, field

from .trace import Arrival


@dataclass(slots=True, eq=False)
class Request:
    """One request on its way. Times are µs on the simulation's clock."""

    idx: int
    id: str
    arrival: Arrival
    arrived_us: float
    committed: int = 0
    generated: int = 0
    lane: str | None = None
    """The worker that has it, None while it waits for one."""
    last_step: int = -1
    first_token_us: float | None = None
    finished_us: float | None = None
    released: bool = False
    replayed_tokens: int = 0
    """Rows that had to be sent once more."""
    times_us: list[float] = field(default_factory=list)
    """When steps gave tokens, the first one left out."""

    @property
    def known(self) -> int:
        return self.arrival.input_length + self.generated

    @property
    def pending(self) -> int:
        return self.known - self.committed

    @property
    def decoding(self) -> bool:
        """One token ahead of its worker: the next step is a decode."""
        return self.generated > 0 and self.pending == 1

    @property
    def finished(self) -> bool:
        return self.generated >= self.arrival.output_length

    def go_back(self, committed: int) -> None:
        """A worker has only so many of its tokens now; the rest is sent again."""
        self.replayed_tokens += self.committed - committed
        self.committed = committed

    def lose_the_end(self, committed: int) -> None:
        """It was finished, and its worker has only so many of its tokens: the last step is to be made again."""
        self.generated = self.arrival.output_length - 1
        self.finished_us = None
        self.go_back(committed)

    def took(self, num_tokens: int, num_accepted: int, now_us: float) -> None:
        """A step with its next tokens, and some accepted guesses behind them, has ended."""
        self.committed += num_tokens + num_accepted
        if self.generated == 0 and self.pending == 0:
            self.generated = 1
            self.first_token_us = now_us if self.first_token_us is None else self.first_token_us
        elif self.pending <= 0 < self.generated:
            self.generated += num_accepted + 1
            self.times_us.append(now_us)
        if self.finished:
            self.finished_us = now_us


@dataclass(frozen=True, slots=True)
class Chunk:
    """A request's part of a step: known tokens [start, start + num_tokens), then `num_guesses` draft tokens."""

    request: Request
    start: int
    num_tokens: int
    num_guesses: int = 0
    num_accepted: int = 0

    @property
    def stop(self) -> int:
        """One past the last row that the step carries."""
        return self.start + self.num_tokens + self.num_guesses

    @property
    def kept(self) -> int:
        """Tokens that are there when the wrong guesses have been withdrawn."""
        return self.start + self.num_tokens + self.num_accepted
