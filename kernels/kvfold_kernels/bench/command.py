"""The command line of `kvfold bench`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvfold_kernels.bench.result import BenchResult

EXAMPLES = """
what is measured
  Steps of one compressor: plan made, rows, rings and pages on the device; each backend closes the windows and keeps the
  rows. Before a backend is timed its bytes are compared with the reference's. Backends take turns, the whole list is
  gone through several times, and every round's time is kept. On a GPU: replays of CUDA graphs, so the device's part.
  floor is what the step's bytes would take at the rate of a plain copy, measured in the same run.

examples
  kvfold bench
      all backends of this machine: some minutes on a small CPU, one on a GPU
  kvfold bench --only 'hca decode' --dtypes bf16 --rounds 15
      some of the cases, more carefully
  kvfold bench --json before.json; …; kvfold bench --json after.json
  kvfold bench --compare before.json after.json
      what became slower or faster by more than the noise; exit status 1 if anything is slower
  kvfold bench --from after.json --markdown table.md
      tables of a result that is there already
"""
_SIZES = {
    "quick": ((128, 1024), (1, 32)),
    "cpu": ((1024, 8192), (1, 32, 256)),
    "cuda": ((1024, 8192, 65536), (1, 32, 256)),
}
"""Tokens of prefills, and requests of decodes."""


def run(argv: list[str]) -> int:
    """Time the kernels of every backend on this machine beside what its memory could do, and the plan."""
    options = _parser().parse_args(argv)
    from kvfold_kernels.backends import BackendUnavailableError
    from kvfold_kernels.bench.check import WrongResultError

    try:
        return _compare(*options.compare) if options.compare else _bench(options)
    except (OSError, ValueError, BackendUnavailableError, WrongResultError) as error:
        return _refuse(str(error))
    except KeyboardInterrupt:
        return _refuse("stopped, and nothing kept")


def _bench(options: argparse.Namespace) -> int:
    from kvfold_kernels.bench import result as results
    from kvfold_kernels.bench.tables import markdown

    result = results.load(options.source) if options.source else _measured(options)
    if options.json is not None:
        result.save(options.json)
    tables = markdown(result)
    if options.markdown is not None:
        options.markdown.write_text(tables, encoding="utf-8")
    print(tables, end="")
    return 0


def _measured(options: argparse.Namespace) -> BenchResult:
    from kvfold_kernels.bench import measured
    from kvfold_kernels.bench.cases import step_cases
    from kvfold_kernels.bench.progress import shown

    backends, left_out = measured.choose(options.backends)
    on_gpu = any(backend.device == "cuda" for backend in backends)
    prefills, decodes = _SIZES["quick" if options.quick else "cuda" if on_gpu else "cpu"]
    cases = [
        case for kind in options.kinds for case in step_cases(kind, prefills, decodes) if options.only in case.name
    ]
    if not cases and options.only:
        raise ValueError(f"no case has {options.only!r} in its name")
    if options.threads is not None:
        _set_threads(options.threads)
    passes, rounds = (1, 3) if options.quick else (options.passes, options.rounds)
    work = measured.Work(cases, options.dtypes, backends, left_out, passes, rounds)
    with shown(work.num_parts) as told:
        return measured.measure(work, told)


def _set_threads(num_threads: int) -> None:
    """Of torch, and of the cpu backend if it can run."""
    import torch

    from kvfold_kernels import backends

    torch.set_num_threads(num_threads)
    if backends.why_not("cpu") is None:
        from kvfold_kernels.compress import cpu

        cpu.set_num_threads(num_threads)


def _compare(before: Path, after: Path) -> int:
    from kvfold_kernels.bench.compare import comparison
    from kvfold_kernels.bench.result import load

    text, slower = comparison(load(before), load(after))
    print(text, end="")
    return 1 if slower else 0


def _refuse(sentence: str) -> int:
    print(f"kvfold bench: {sentence}", file=sys.stderr)
    return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvfold bench",
        description=run.__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--backends", type=_names, metavar="NAME,…", help="default: all that can run here")
    add("--kinds", type=_names, default=["hca", "csa", "indexer"], metavar="KIND,…", help="default hca,csa,indexer")
    add("--dtypes", type=_names, default=["fp32", "bf16"], metavar="DTYPE,…", help="of the rows (default fp32,bf16)")
    add("--only", default="", metavar="WORD", help="cases with WORD in their name")
    add("--passes", type=_count, default=3, metavar="N", help="times through everything (default 3)")
    add("--rounds", type=_count, default=5, metavar="N", help="turns of each backend in a pass (default 5)")
    add("--threads", type=_count, metavar="N", help="of the CPU (default: all)")
    add("--quick", action="store_true", help="small cases, one pass: to see that it works")
    add("--json", type=Path, metavar="FILE", help="write every time, for --compare and --from")
    add("--markdown", type=Path, metavar="FILE", help="write the tables")
    add("--from", dest="source", type=Path, metavar="FILE", help="measure nothing; show this result")
    add("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"), help="measure nothing; compare two results")
    return parser


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {text}")
    return value
