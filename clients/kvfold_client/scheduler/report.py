"""What a simulation amounts to, as JSON and as a table. Times are those of the simulation's clock.

ttft        from a request's arrival to the end of the step that gave its first token
per token   (last token − first token) / (output_length − 1), of requests of two tokens or more
gap         from one step that gave a request tokens to the next one that did: what a reader sees as a stall
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..loadtest.report import table
from ..loadtest.summary import percentiles_ms
from .lane import Tally
from .request import Request

HEAD = (
    *("variant", "ttft p50 ms", "p90", "p99", "per token p50 ms", "p99", "gap p99 ms", "tokens/s"),
    *("compress µs/step", "no window"),
)


def summarise(requests: Sequence[Request], tally: Tally) -> dict[str, Any]:
    """Of requests that are all finished. Percentiles in ms, as in `loadtest.summary`."""
    firsts_us = [(request, request.first_token_us or 0.0) for request in requests]
    ends_us = [request.finished_us or 0.0 for request in requests]
    seconds = (max(ends_us) - min(request.arrived_us for request in requests)) / 1e6
    generated = sum(request.generated for request in requests)
    return {
        "requests": len(requests),
        "prompt_tokens": sum(request.arrival.input_length for request in requests),
        "generated_tokens": generated,
        "seconds": seconds,
        "tokens_per_s": generated / seconds if seconds else None,
        "ttft_ms": percentiles_ms((first - request.arrived_us) / 1e6 for request, first in firsts_us),
        "per_token_ms": percentiles_ms(
            (end - first) / (request.arrival.output_length - 1) / 1e6
            for (request, first), end in zip(firsts_us, ends_us, strict=True)
            if request.arrival.output_length > 1
        ),
        "gap_ms": percentiles_ms(
            (after - before) / 1e6
            for request, first in firsts_us
            for before, after in pairwise([first, *request.times_us])
        ),
        **_work(tally),
        "replayed_tokens": sum(request.replayed_tokens for request in requests),
    }


def _work(tally: Tally) -> dict[str, Any]:
    steps = max(tally.steps, 1)
    return {
        "steps": tally.steps,
        "rows": tally.rows,
        "row_bytes": tally.row_bytes,
        "windows": tally.windows,
        "launches": tally.launches,
        "compressor_steps": tally.compressor_steps,
        "skipped": tally.skipped,
        "skipped_share": tally.skipped / max(tally.compressor_steps, 1),
        "guesses": tally.guesses,
        "accepted": tally.accepted,
        "model": {"model_us_a_step": tally.model_us / steps, "compress_us_a_step": tally.compress_us / steps},
        "measured": {
            "call_us_a_step": tally.call_us / steps,
            "rows_us_a_step": tally.made_us / steps,
            "phases_us_a_step": {phase: us / steps for phase, us in tally.phases_us.items()},
        },
        "hand_overs": {
            "requests": tally.handed_over,
            "entry_bytes": tally.entry_bytes,
            "open_row_bytes": tally.open_row_bytes,
            "seconds": tally.hand_over_s,
        },
        "refusals": dict(tally.refusals),
        "preempted": tally.preempted,
        "recovered": tally.recovered,
    }


def comparison(summaries: Mapping[str, dict[str, Any]]) -> str:
    """A table, a row a variant."""
    return table(HEAD, [_row(name, summary) for name, summary in summaries.items()])


def _row(name: str, summary: dict[str, Any]) -> list[str]:
    ttft, per_token, gap = summary["ttft_ms"], summary["per_token_ms"], summary["gap_ms"]
    return [
        name,
        *_cells(ttft, "p50", "p90", "p99"),
        *_cells(per_token, "p50", "p99"),
        *_cells(gap, "p99"),
        "–" if summary["tokens_per_s"] is None else f"{summary['tokens_per_s']:.1f}",
        f"{summary['model']['compress_us_a_step']:.1f}",
        f"{summary['skipped_share']:.1%}",
    ]


def _cells(percentiles: Mapping[str, float], *names: str) -> Iterable[str]:
    return (f"{percentiles[name]:.2f}" if name in percentiles else "–" for name in names)


def lines(summary: dict[str, Any]) -> str:
    """What happened beside the times."""
    moved = summary["hand_overs"]
    told = [
        f"{summary['requests']} requests, {summary['prompt_tokens']} tokens of prompt, "
        f"{summary['generated_tokens']} generated, in {summary['steps']} steps and {summary['seconds']:.2f} s",
        f"{summary['rows']} rows ({summary['row_bytes'] / 1e6:.1f} MB), {summary['windows']} windows closed; "
        f"{summary['skipped']} of {summary['compressor_steps']} compressor steps closed none",
    ]
    if summary["guesses"]:
        told.append(f"{summary['accepted']} of {summary['guesses']} draft tokens accepted, the others withdrawn")
    if moved["requests"]:
        told.append(
            f"{moved['requests']} hand-overs: {moved['entry_bytes'] / 1e6:.1f} MB of entries, "
            f"{moved['open_row_bytes'] / 1e6:.1f} MB of open rows"
        )
    if summary["refusals"]:
        refusals = ", ".join(f"{code} {count}" for code, count in summary["refusals"].items())
        told.append(f"refused and tried again: {refusals}; {summary['preempted']} requests started over")
    if "checked" in summary:
        checked = summary["checked"]
        told.append(
            f"{checked['entries']} entries of {checked['requests']} requests are the reference's, "
            f"{checked['rounded']} of them but for a rounding"
        )
    if summary["recovered"]:
        told.append(f"{summary['recovered']} requests recovered, {summary['replayed_tokens']} rows sent again")
    return "\n".join(told)
