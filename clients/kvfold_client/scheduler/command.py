"""The command line of `kvfold simulate`."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import KvfoldError
from ..tokens import token_of_file
from . import runs, scale, trace
from .compose import Policy
from .costs import Costs
from .launches import LaunchModel

EXAMPLES = """
what is simulated
  A model's scheduler: requests arrive, prompts are prefilled in chunks within a budget of tokens, decodes ride along in
  every step, draft tokens are guessed and some withdrawn, requests move from prefill to decode workers. The rows are
  random, the same for a seed however they are cut; the workers are real.

examples
  kvfold simulate --compare
      on paper: what skipping launches, the two-stage kernel, chunks and hand-over do to the time to the first token
  kvfold simulate --url http://127.0.0.1:8787 --requests 20 --drafts 3 --check random:1
      a worker serves the trace, and every entry is compared with the reference
  kvfold simulate --peers peers.txt --trace requests.jsonl --clock real
      a fleet, in real time
  kvfold simulate --scale
      bytes, steps and handles a second for 1 to 1,000 workers

Without --url and --peers nothing is sent. On the virtual clock a step takes --step-us + --token-us a row + its
compressors by launch times measured on an H200; the first two are assumptions. On the real clock the model takes no
time, and what is told is what the workers took.
"""

RANGES: dict[str, tuple[float, float]] = {
    "requests": (1, 10**7),
    "rate": (1e-6, 10**6),
    "input": (1, trace.LONGEST),
    "output": (1, trace.LONGEST),
    "longest": (1, 2 * trace.LONGEST),
    "seed": (0, 2**64 - 1),
    "speed": (1e-3, 10**6),
    "step_us": (0, 10**9),
    "token_us": (0, 10**9),
    "link_gb_s": (1e-6, 10**6),
}
"""Option → least and most, both allowed."""


def run(argv: list[str]) -> int:
    """Play an arrival trace through a simulated scheduler: on paper, over one worker, or over a fleet."""
    options = _parser().parse_args(argv)
    try:
        if options.scale:
            print(scale.page())
            return 0
        _check(options)
        with _result_file(options.json) as keep:
            keep(_run(options))
    except (KvfoldError, trace.TraceError, ValueError, OSError) as error:
        print(f"kvfold simulate: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("kvfold simulate: stopped", file=sys.stderr)
        return 130
    return 0


def _check(options: argparse.Namespace) -> None:
    """Raises ValueError for a number that is out of its range."""
    for name, (least, most) in RANGES.items():
        value = getattr(options, name)
        if value is not None and not least <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')} must be from {least} to {most}, not {value}")


@contextmanager
def _result_file(path: Path | None) -> Iterator[Callable[[dict[str, Any]], Any]]:
    """What writes the result. Opened before the run, which may take hours; a run that fails leaves no file behind."""
    if path is None:
        yield lambda result: None
        return
    was_there = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"--json {path} cannot be written: {error.strerror}") from None
    try:
        yield lambda result: path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    except BaseException:
        if not was_there:
            path.unlink(missing_ok=True)
        raise


def _run(options: argparse.Namespace) -> dict[str, Any]:
    costs = Costs(
        step_us=options.step_us,
        token_us=options.token_us,
        link_bytes_per_s=options.link_gb_s * 1e9,
        launches=LaunchModel(graphs=not options.eager),
    )
    policy = Policy(
        token_budget=options.budget,
        max_running=options.max_running,
        draft_tokens=options.drafts,
        acceptance=options.acceptance,
        chunked=not options.whole_prompts,
    )
    with runs.scene(options, policy, costs) as scene:
        if options.write_trace is not None:
            trace.write_trace(options.write_trace, scene.trace)
        return scene.compare() if options.compare else scene.run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvfold simulate",
        description=run.__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _where(parser.add_argument_group("where"))
    _what(parser.add_argument_group("requests"))
    _how(parser.add_argument_group("scheduling"))
    _time(parser.add_argument_group("time"))
    return parser


def _where(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--url", help="a worker")
    add("--peers", type=Path, metavar="FILE", help="a fleet: a line a worker, NAME URL ROLE")
    add("--token", help="bearer token for either")
    add("--token-file", dest="token", type=token_of_file, metavar="FILE", help="file whose first word is the token")
    add("--keep-copies", action="store_true", help="prefill workers keep what they handed over until its lease ends")
    add("--check", metavar="WEIGHTS", help="compare every entry with the reference; WEIGHTS as given to kvfold serve")
    add("--manifest", default="deepseek-v4-flash", help="on paper: preset or file (default deepseek-v4-flash)")
    add("--prefill-workers", type=int, default=1, metavar="N", help="on paper (default 1)")
    add("--decode-workers", type=int, default=1, metavar="N", help="on paper; 0: no hand-over (default 1)")
    add("--scale", action="store_true", help="print the tables of scale, and do nothing else")


def _what(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--trace", type=Path, metavar="FILE", help="JSON lines: timestamp (ms), input_length, output_length, hash_ids")
    add("--requests", type=int, default=100, metavar="N", help="of a synthetic trace (default 100)")
    add("--rate", type=float, default=2.0, help="its requests a second (default 2)")
    add("--input", type=float, default=1024, metavar="N", help="its mean prompt (default 1024)")
    add("--output", type=float, default=64, metavar="N", help="its mean of generated tokens (default 64)")
    add("--longest", type=int, metavar="N", help="cut prompts so that no request has more rows")
    add("--seed", type=int, default=0, help="of trace, rows and acceptance (default 0)")
    add("--write-trace", type=Path, metavar="FILE", help="write what is played, as --trace reads it")


def _how(group: argparse._ArgumentGroup) -> None:
    add, default = group.add_argument, Policy()
    add("--budget", type=int, default=default.token_budget, metavar="N", help="rows a step (default 2048)")
    add("--max-running", type=int, default=default.max_running, metavar="N", help="requests a worker (default 64)")
    add("--drafts", type=int, default=0, metavar="N", help="guessed tokens in every decode (default 0)")
    add("--acceptance", type=float, default=default.acceptance, metavar="P", help="of a guess (default 0.7)")
    add("--whole-prompts", action="store_true", help="never cut a prompt")
    add("--compare", action="store_true", help="play the trace once more for every thing left out")


def _time(group: argparse._ArgumentGroup) -> None:
    add, default = group.add_argument, Costs()
    add("--clock", choices=("virtual", "real"), default="virtual", help="default virtual")
    add("--speed", type=float, default=1.0, help="arrivals so many times as fast (default 1)")
    add("--step-us", type=float, default=default.step_us, help="assumed: of a forward pass (default 8000)")
    add("--token-us", type=float, default=default.token_us, help="assumed: of a row in it (default 30)")
    add("--link-gb-s", type=float, default=default.link_bytes_per_s / 1e9, help="assumed: of a hand-over (default 25)")
    add("--eager", action="store_true", help="launches are not replayed from graphs: the host's part of each counts")
    add("--json", type=Path, metavar="FILE", help="write the result")
