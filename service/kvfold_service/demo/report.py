"""What the demo prints: progress lines while it runs, then tables. Plain text, and numbers with their units."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from kvfold_client.loadtest.report import table
from kvfold_client.loadtest.summary import PHASES
from kvfold_service.demo.folding import Tally
from kvfold_service.demo.trace import Comparison


class Progress:
    """Lines with the seconds since `start`, of the monotonic clock."""

    def __init__(self, start: float) -> None:
        self.start = start

    def __call__(self, text: str) -> None:
        print(f"[{time.monotonic() - self.start:5.1f} s] {text}", flush=True)


def compressor_table(tallies: Mapping[str, Tally]) -> str:
    """One row a compressor, then their sum."""
    head = ("compressor", "steps", "entries", "rows sent", "pages read", "bytes read", "launches", "launches skipped")
    total = sum(tallies.values(), Tally())
    return table(head, [_compressor_row(name, tally) for name, tally in [*tallies.items(), ("all", total)]])


def _compressor_row(name: str, tally: Tally) -> tuple[object, ...]:
    sent, read = _bytes(tally.sent_bytes), _bytes(tally.read_bytes)
    return name, tally.steps, tally.entries, sent, tally.pages_read, read, tally.launches, tally.skipped


def phase_table(tallies: Iterable[Tally]) -> str:
    """The time of all steps by the worker's phases; the rest of each call is HTTP, the client and the network."""
    total = sum(tallies, Tally())
    timings = total.timings_us
    phases = {f"worker: {phase}": timings[phase] for phase in PHASES if phase in timings}
    phases["http and client, steps"] = total.step_us - sum(timings.values())
    phases["page reads"] = total.read_us
    steps = max(total.steps, 1)
    rows = [(phase, f"{us / 1e3:.1f}", f"{us / steps:.0f}") for phase, us in phases.items()]
    return table(("phase", "total ms", "µs a step"), rows)


def comparison_lines(comparison: Comparison, tolerance: float) -> list[str]:
    """Two lines: the logits, the tokens."""
    within = comparison.first_pass < 0
    where = "" if within else f", first off in pass {comparison.first_pass}"
    same = comparison.equal_tokens == comparison.num_tokens
    return [
        f"  logits   {comparison.num_passes} passes, largest difference {comparison.max_difference:.1e} of "
        f"{tolerance:.0e} allowed{where}: {'equal' if within else 'DIFFERENT'}",
        f"  tokens   {comparison.equal_tokens} of {comparison.num_tokens}: {'equal' if same else 'DIFFERENT'}",
    ]


def control_line(name: str, comparison: Comparison) -> str:
    """One line: whether one entry altered on its way back was noticed."""
    verdict = "caught" if comparison.first_pass >= 0 else "NOT CAUGHT"
    return f"  control  {name}, first entry negated: largest difference {comparison.max_difference:.1e}: {verdict}"


def text_of(tokens: Sequence[int]) -> str:
    """Tokens as ASCII text on one line; what cannot be printed is a dot."""
    return "".join(char if (char := chr(token)).isprintable() else "·" for token in tokens)


def print_report(
    tallies: Mapping[str, Tally], result: Comparison, controls: Mapping[str, Comparison], tolerance: float
) -> None:
    """The tables of the run through the worker, and what was compared."""
    print("\nThrough the worker, prefill and decode (rows fp32, whole pages read):\n" + compressor_table(tallies))
    print("\nWhere the time went:\n" + phase_table(tallies.values()))
    print("\nAgainst the untouched model:\n" + "\n".join(comparison_lines(result, tolerance)))
    for name, control in controls.items():
        print(control_line(name, control))


def print_texts(prompt: Sequence[int], generated: Sequence[int], passed: bool) -> None:
    """The end of the prompt, the start of what followed, the verdict."""
    print(f"  prompt   …{text_of(prompt[-60:])}")
    print(f"  text     {text_of(generated[:60])}{'…' if len(generated) > 60 else ''}")
    print("\n" + ("kvfold's entries do what the model's own do." if passed else "FAILED: see above."), flush=True)


def _bytes(count: int) -> str:
    return f"{count / 1024:.0f} KiB" if count < 1024**2 else f"{count / 1024**2:.1f} MiB"
