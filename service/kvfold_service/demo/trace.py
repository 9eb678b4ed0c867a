"""Greedy generation that keeps every logit, and the comparison of two such runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Trace:
    """One run: the logits `[T, vocab]` of every forward pass, prefill chunks first, and the tokens chosen."""

    logits: list[torch.Tensor] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """`max_difference` is the largest |Δ logit|, NaN if any is NaN; `first_pass` the first pass that is off, or −1."""

    num_passes: int
    max_difference: float
    first_pass: int
    equal_tokens: int
    num_tokens: int

    @property
    def equal(self) -> bool:
        """Whether every logit was within the tolerance and every token the same."""
        return self.first_pass < 0 and self.equal_tokens == self.num_tokens


@torch.inference_mode()
def generate(
    model: Any,
    cache: Any,
    prompt: torch.Tensor,
    chunk: int,
    num_tokens: int,
    progress: Callable[[str], None] = lambda text: None,
) -> Trace:
    """Feed `prompt` [P] in pieces of `chunk` tokens, then choose `num_tokens` greedily, one pass each."""
    trace = Trace()

    def forward(tokens: torch.Tensor) -> None:
        trace.logits.append(model(input_ids=tokens[None], cache=cache, use_cache=True).logits[0].clone())

    for start in range(0, len(prompt), chunk):
        forward(prompt[start : start + chunk])
        progress(f"prefill {min(start + chunk, len(prompt))}/{len(prompt)} tokens")
    for done in range(1, num_tokens + 1):
        token = trace.logits[-1][-1].argmax()
        trace.tokens.append(int(token))
        forward(token[None])
        if done % 50 == 0 or done == num_tokens:
            progress(f"decode {done}/{num_tokens} tokens")
    return trace


def compare(expected: Trace, actual: Trace, tolerance: float) -> Comparison:
    """Compare pass by pass; `actual` may be the shorter run, of the prompt alone."""
    passes = list(zip(expected.logits, actual.logits, strict=False))
    differences = torch.stack([(a - b).abs().max() for a, b in passes])
    off = ~(differences <= tolerance)  # a NaN is off too
    return Comparison(
        num_passes=len(passes),
        max_difference=float(differences.max()),
        first_pass=int(off.nonzero()[0]) if off.any() else -1,
        equal_tokens=sum(a == b for a, b in zip(expected.tokens, actual.tokens, strict=False)),
        num_tokens=len(actual.tokens),
    )
