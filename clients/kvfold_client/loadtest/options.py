"""The command line of `kvfold loadtest`, checked and frozen."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..tokens import token_of_file
from .shape import PROFILES

EXAMPLES = """
what is measured
  A step is due at a time of its own, whatever became of the steps before it, and its latency counts from that time
  (open loop). So a worker that stands still for a second shows it in p99, as its callers would see it. A closed loop
  (--concurrency) sends the next step when the last one was answered: good for finding the capacity, not for tails.

examples
  kvfold loadtest http://127.0.0.1:8787
      finds the capacity for decode steps of 8 requests, then sends 25, 50, 75, 90 and 110 % of it
  kvfold loadtest http://127.0.0.1:8787 --profile prefill --prompt 4096 --rate 2,4,8 --slo-ms 200
      prompts of 4096 tokens, at three rates
  kvfold loadtest http://127.0.0.1:8787 --profile mixed --concurrency 1,2,4,8
      1, 2, 4 and 8 callers that wait for their answers; a prompt beside 8 decodes in every step
  kvfold loadtest http://127.0.0.1:8787 --profile speculative --drafts 3 --accept 0.7 --rate 50
      each step guesses 3 tokens more, and what was rejected is truncated
  kvfold loadtest http://127.0.0.1:8787 --trace requests.jsonl --speed 2
      replays a trace twice as fast; `kvfold simulate --write-trace requests.jsonl` makes one
  kvfold loadtest --peers peers.txt --token-file tokens
      the same over all workers of a peers file

Everything lands in a folder (--out): report.html, four PNG, summary.json, steps.jsonl. Ctrl-C stops and still reports.
Plots and the live display need: pip install 'kvfold[load]'
"""

LOCUSTFILE = Path(__file__).with_name("locustfile.py")


@dataclass(frozen=True, slots=True)
class Options:
    urls: tuple[str, ...]
    peers: Path | None
    token: str | None
    profile: str
    rates: tuple[float, ...]
    concurrencies: tuple[int, ...]
    trace: Path | None
    speed: float
    pace_ms: float
    arrivals: str
    seconds: float
    warmup: float
    slo_ms: float
    batch: int
    prompt: int
    context: int
    output: int
    drafts: int
    accept: float
    chunk: int
    compressors: tuple[str, ...] | None
    dtype: str
    encoding: Literal["frame", "msgpack"]
    sessions: int | None
    in_flight: int
    timeout: float
    drain: float
    max_steps: int
    max_seconds: float
    seed: int
    out: Path | None
    quiet: bool


def read(argv: list[str]) -> Options:
    """Raises SystemExit, with a sentence, for what cannot be meant."""
    parser = make_parser()
    given: dict[str, Any] = vars(parser.parse_args(argv))
    if bool(given["urls"]) == (given["peers"] is not None):
        parser.error("give the URL of a worker (or several), or --peers FILE")
    for url in given["urls"]:
        if not url.startswith(("http://", "https://")):
            parser.error(f"{url!r} is no URL of a worker: http://HOST:PORT")
    if sum(bool(given[name]) for name in ("rates", "concurrencies", "trace")) > 1:
        parser.error("--rate, --concurrency and --trace exclude each other")
    given["urls"] = tuple(given["urls"])
    return Options(**given)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvfold loadtest",
        description="Send steps to a worker at a rate of their own, and say what its callers would have waited.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("urls", nargs="*", metavar="URL", help="the worker; several: requests in turn")
    _where(parser.add_argument_group("where").add_argument)
    _when(parser.add_argument_group("when steps are due").add_argument)
    _what(parser.add_argument_group("what a step is").add_argument)
    _bounds(parser.add_argument_group("bounds and results").add_argument)
    return parser


def _where(add: Callable[..., object]) -> None:
    add("--peers", type=Path, metavar="FILE", help="the workers of a fleet, instead of URL")
    add("--token", help="bearer token")
    add("--token-file", dest="token", type=token_of_file, metavar="FILE", help="file whose first word is the token")
    add("--encoding", choices=("frame", "msgpack"), default="frame", help="default frame")
    add("--timeout", type=_positive, default=30.0, metavar="S", help="for each call (default 30)")


def _when(add: Callable[..., object]) -> None:
    add("--rate", dest="rates", type=_list(_positive), default=(), metavar="R,…", help="steps a second; a sweep")
    add(
        "--concurrency",
        dest="concurrencies",
        type=_list(_count),
        default=(),
        metavar="N,…",
        help="closed loop; a sweep",
    )
    add("--trace", type=Path, metavar="FILE", help="JSON lines: timestamp (ms), input_length, output_length")
    add("--speed", type=_positive, default=1.0, metavar="X", help="of the trace (default 1)")
    add(
        "--pace-ms",
        type=_not_negative,
        default=0.0,
        metavar="MS",
        help="of a trace, between a request's steps (default 0)",
    )
    add("--arrivals", choices=("poisson", "even"), default="poisson", help="default poisson")
    add("--seconds", type=_positive, default=10.0, metavar="S", help="that are measured at each point (default 10)")
    add("--warmup", type=_not_negative, default=2.0, metavar="S", help="before them (default 2)")
    add("--seed", type=int, default=0, help="of arrivals and lengths (default 0)")


def _what(add: Callable[..., object]) -> None:
    add("--profile", choices=tuple(PROFILES), default="decode", help="default decode")
    add("--batch", type=_count, default=8, metavar="N", help="decode requests in a step (default 8)")
    add("--prompt", type=_count, default=1024, metavar="N", help="tokens of a prompt (default 1024)")
    add("--context", type=_count, default=256, metavar="N", help="most tokens before a request decodes (default 256)")
    add("--output", type=_count, default=512, metavar="N", help="tokens that a request decodes (default 512)")
    add("--drafts", type=_count, default=3, metavar="N", help="guessed tokens, profile speculative (default 3)")
    add("--accept", type=_share, default=0.7, metavar="P", help="chance of a guess to be right (default 0.7)")
    add("--chunk", type=_count, default=4096, metavar="N", help="most tokens of a trace's prefill step (default 4096)")
    add("--compressors", type=_list(str), metavar="NAME,…", help="in every step (default: all of the manifest)")
    add("--dtype", choices=("bf16", "fp32"), default="bf16", help="of the rows (default bf16)")


def _bounds(add: Callable[..., object]) -> None:
    add("--slo-ms", type=_positive, default=50.0, metavar="MS", help="what a good latency is (default 50)")
    add(
        "--sessions", type=_count, metavar="N", help="batches of decode requests that exist (default: what fits, to 16)"
    )
    add("--in-flight", type=_count, default=256, metavar="N", help="most steps on their way (default 256)")
    add("--drain", type=_not_negative, default=10.0, metavar="S", help="for the last answers (default 10)")
    add("--max-steps", type=_count, default=100_000, metavar="N", help="of the whole run (default 100000)")
    add("--max-seconds", type=_positive, default=600.0, metavar="S", help="of the whole run (default 600)")
    add("--out", type=Path, metavar="DIR", help="default kvfold-loadtest-DATE-TIME")
    add("--locustfile", action="version", version=str(LOCUSTFILE), help="print the path of a locustfile, and end")
    add("--quiet", action="store_true", help="no display while it runs")


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


def _not_negative(text: str) -> float:
    return 0.0 if float(text) == 0 else _positive(text)


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, not {text}")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return value


def _list(kind: Callable[[str], object]) -> Callable[[str], tuple[object, ...]]:
    def values(text: str) -> tuple[object, ...]:
        return tuple(kind(part) for part in text.split(",") if part)

    return values
