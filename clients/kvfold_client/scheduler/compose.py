"""What goes into a worker's next step: every decode that fits, then prompts in chunks, within a budget of tokens.

Pure: the same requests and policy give the same step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .request import Chunk, Request


@dataclass(frozen=True, slots=True)
class Policy:
    """How steps are made. Raises ValueError for numbers that make no step."""

    token_budget: int = 2048
    """Rows a step, guesses included."""
    max_running: int = 64
    """Requests that a worker has at a time."""
    draft_tokens: int = 0
    """Guesses a decode carries; a worker's draft_slack bounds them."""
    acceptance: float = 0.7
    """Probability that a guess is right, given that those before it were."""
    chunked: bool = True
    """False: a prompt is never cut; it goes whole into one step, beyond the budget if need be."""

    def __post_init__(self) -> None:
        if self.token_budget < 1 or self.max_running < 1:
            raise ValueError("a step needs a token budget of at least 1, a worker at least 1 running request")
        if self.draft_tokens < 0 or not 0 <= self.acceptance <= 1:
            raise ValueError("draft_tokens must be 0 or more, acceptance between 0 and 1")


Accept = Callable[[Request, int], int]
"""(request, number of guesses) → how many of them are right, up to the first wrong one."""


def compose(requests: Sequence[Request], policy: Policy, accept: Accept) -> tuple[Chunk, ...]:
    """The next step of these requests; empty if none has anything to send.

    Decodes come first, those that waited longest ahead, so that a budget below their number serves all in turn; then
    prompts, first come, first served.
    """
    left = policy.token_budget
    chunks: list[Chunk] = []
    for request in sorted((r for r in requests if r.decoding), key=lambda r: (r.last_step, r.idx)):
        if left < 1:
            break
        remaining = request.arrival.output_length - request.generated
        num_guesses = max(0, min(policy.draft_tokens, remaining - 1, left - 1))
        num_accepted = accept(request, num_guesses) if num_guesses else 0
        chunks.append(Chunk(request, request.committed, 1, num_guesses, num_accepted))
        left -= 1 + num_guesses
    for request in sorted((r for r in requests if not r.decoding and r.pending), key=lambda r: (r.arrived_us, r.idx)):
        if left < 1:
            break
        num_tokens = min(request.pending, left) if policy.chunked else request.pending
        chunks.append(Chunk(request, request.committed, num_tokens))
        left -= num_tokens
    return tuple(chunks)
