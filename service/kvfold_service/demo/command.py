"""The command line of the demo. Imports neither torch nor transformers until the options are known to be good."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

# The shortest prompt whose prefill closes an hca window and gives the indexer more csa entries than it may keep.
MIN_PROMPT = 160
EXAMPLES = """
examples
  kvfold demo
      starts a worker, generates 140 tokens through it and without it, and compares tokens and logits
  kvfold demo --prompt 1000 --chunk 128 --tokens 500
      a longer prompt, in chunks
  kvfold demo --files demo
  kvfold serve --manifest demo/manifest.json --weights demo/weights.safetensors
  kvfold demo --url http://127.0.0.1:8787
      against a worker of your own, wherever it runs
"""


def run(argv: Sequence[str] | None = None) -> int:
    """Run a small DeepSeek-V4 model through a real worker and compare it with the untouched model.

    Returns 0 if everything compared was equal, 1 if not, 2 if the demo could not run.
    """
    options = _parser().parse_args(argv)
    print("[  0.0 s] loading torch and transformers", flush=True)
    started = time.monotonic()
    try:
        from kvfold_service.demo.proof import DemoError, prove
    except ImportError as error:
        return _stopped(f"{error}; install what the demo needs with: pip install 'kvfold[demo]'")
    try:
        return 0 if prove(options, started) else 1
    except DemoError as error:
        return _stopped(str(error))


def _stopped(reason: str) -> int:
    print(f"kvfold demo could not run: {reason}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvfold demo",
        description=(run.__doc__ or "").partition("\n")[0],
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--tokens", type=_at_least(1), default=140, metavar="N", help="tokens to generate (default 140)")
    add("--prompt", type=_at_least(MIN_PROMPT), default=300, metavar="N", help="tokens of prompt (default 300)")
    add("--chunk", type=_at_least(1), default=100, metavar="N", help="tokens a prefill step (default 100)")
    add("--tolerance", type=float, default=1e-4, metavar="X", help="largest difference of a logit (default 1e-4)")
    add("--backend", default="auto", help="the worker's backend, as in kvfold serve (default auto)")
    add("--files", type=Path, metavar="DIR", help="keep the manifest and weights file the worker serves in DIR")
    add("--url", help="use a running worker, which serves the files written by an earlier --files DIR")
    add("--token", help="bearer token for --url")
    add("--start-timeout", type=float, default=120, metavar="S", help="seconds until the worker is ready (default 120)")
    return parser


def _at_least(lowest: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < lowest:
            raise argparse.ArgumentTypeError(f"must be {lowest} or more, got {value}")
        return value

    return number
