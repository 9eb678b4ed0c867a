"""What the steps of a profile carry."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shape:
    decode_requests: int
    """Requests in each step that have been there before, with 1 + draft_tokens tokens each."""
    prompt_tokens: int
    """Tokens of one new request in each step, which is released behind it; 0: none."""
    draft_tokens: int
    """How many of a decode request's tokens are guesses."""
    acceptance: float = 1.0
    """Chance of a guess to be right, if those before it were."""

    @property
    def num_tokens(self) -> int:
        return self.decode_requests * (1 + self.draft_tokens) + self.prompt_tokens

    def rejected(self, chance: random.Random) -> int:
        """How many of a request's guesses are withdrawn: all behind the first wrong one."""
        for accepted in range(self.draft_tokens):
            if chance.random() >= self.acceptance:
                return self.draft_tokens - accepted
        return 0


PROFILES = ("decode", "prefill", "mixed", "speculative")


def shape_of(profile: str, batch: int, prompt: int, drafts: int, acceptance: float) -> Shape:
    """
    prefill       a new request's prompt
    decode        `batch` requests, a token each
    mixed         both in one step
    speculative   as decode, with `drafts` guesses behind each token
    """
    return {
        "prefill": Shape(0, prompt, 0),
        "decode": Shape(batch, 0, 0),
        "mixed": Shape(batch, prompt, 0),
        "speculative": Shape(batch, 0, drafts, acceptance),
    }[profile]
