"""`kvfold fleet`: start, list and stop the workers of a Ray cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

EXAMPLES = """
what it needs
  A Ray cluster that runs already (`ray start --head`), of which this machine is a part; pip install 'kvfold[ray]'.
  Each worker has an actor, which Ray places by what it takes (--gpus, --cpus, --resource) and which starts the worker
  again when it ends: with nothing in it, and under a new epoch. Clients find the workers by RayPlane.

start waits until all are ready, and says for what. Ctrl-C, a worker that fails, and --wait-seconds leave none of them.

examples
  kvfold fleet start --worker p0=prefill --worker d0=decode --gpus 1 -- --manifest tiny --weights random:1
      what stands behind -- goes to kvfold serve
  kvfold fleet list
  kvfold fleet stop --worker d0
      drains it first; without --worker all of them
"""


def run(argv: list[str]) -> int:
    """Start, list or stop workers on a Ray cluster, one actor each."""
    own, serve = _split(argv)
    options = _parser().parse_args(own)
    starts = options.action == "start"
    if bool(serve) != starts or (starts and not options.worker):
        print(
            "kvfold fleet: start wants --worker, and options of kvfold serve behind --; the others none",
            file=sys.stderr,
        )
        return 2
    from ray.exceptions import RayError

    from kvfold_service.control.ray import ClusterError

    try:
        _do(options, serve)
    except KeyboardInterrupt:
        _say("interrupted" + ("; no worker of this call is left" if starts else ""))
        return 130
    except ClusterError as error:
        _say(str(error))
        return 1
    except (RayError, ValueError) as error:
        _say(f"Ray refused: {type(error).__name__}: {str(error).strip().splitlines()[0]}")
        return 1
    return 0


def _do(options: argparse.Namespace, serve: list[str]) -> None:
    from kvfold_service.control import ray as cluster

    cluster.connect(options.address, options.namespace)
    if options.action == "start":
        slots = [
            cluster.Slot(name, role, options.gpus, options.cpus, options.resource) for name, role in options.worker
        ]
        how: dict[str, Any] = {"namespace": options.namespace, "host": options.host, "say": _say}
        cluster.start_workers(slots, serve, wait_seconds=options.wait_seconds, **how)
    elif options.action == "stop":
        cluster.stop_workers([name for name, _ in options.worker] or None, options.namespace)
    for name, words in cluster.describe_workers(options.namespace).items():
        print(name, words)


def _say(sentence: str) -> None:
    print(f"kvfold fleet: {sentence}", file=sys.stderr, flush=True)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Options of ours, and what stands behind --."""
    at = argv.index("--") if "--" in argv else len(argv)
    return list(argv[:at]), list(argv[at + 1 :])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvfold fleet",
        usage="kvfold fleet {start,list,stop} [options] [-- OPTIONS OF kvfold serve]",
        description=run.__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("start", "list", "stop"), help="what to do; start waits until all are ready")
    parser.add_argument(
        "--worker", type=_worker, action="append", default=[], metavar="NAME=ROLE", help="prefill, decode or any"
    )
    parser.add_argument("--address", default="auto", help="of the cluster, in Ray's words (default: this machine's)")
    parser.add_argument("--namespace", default="kvfold", help="Ray namespace of this fleet (default: kvfold)")
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each worker (default: 0)")
    parser.add_argument("--cpus", type=float, default=1, help="CPUs of each worker, for Ray's books (default: 1)")
    parser.add_argument(
        "--resource", type=_resource, default={}, metavar="NAME=AMOUNT", help="a custom resource that each worker takes"
    )
    parser.add_argument(
        "--wait-seconds",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="start: how long workers may take until they are ready; then none is left (default: 300)",
    )
    parser.add_argument("--host", help="what each worker listens on (default: its node's address, which wants tokens)")
    return parser


def _worker(text: str) -> tuple[str, str]:
    name, _, role = text.partition("=")
    if role not in ("", "prefill", "decode", "any") or not name:
        raise argparse.ArgumentTypeError("a worker is NAME or NAME=prefill, decode or any")
    return name, role or "any"


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError(text)
    return seconds


def _resource(text: str) -> dict[str, float]:
    name, _, amount = text.partition("=")
    return {name: float(amount)}
