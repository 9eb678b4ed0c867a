"""`kvfold doctor`: what can run on this machine, what cannot and why, and what to do about it."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform

import kvfold_client
from kvfold_kernels import backends

_OPTIONAL = {
    "numba": "the cpu backend: pip install 'kvfold[worker]'",
    "fastapi": "serving: pip install 'kvfold[worker]'",
    "transformers": "the demo: pip install 'kvfold[demo]'",
}


def run(argv: list[str]) -> int:
    """Say which backends can run here, and why the others cannot."""
    argparse.ArgumentParser(prog="kvfold doctor", description=run.__doc__).parse_args(argv)
    print(f"kvfold {kvfold_client.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPUs")
    print(f"  {_gpus()}")
    print("backends")
    for name in backends.NAMES:
        reason = backends.why_not(name)
        print(f"  {name:10} {'can run' if reason is None else reason}")
    print("packages")
    for package, purpose in {"torch": "every backend: pip install 'kvfold[worker]'", **_OPTIONAL}.items():
        print(f"  {package:13} {_version(package) or f'missing; needed for {purpose}'}")
    try:
        best = backends.load("auto").name
    except backends.BackendUnavailableError as error:
        print(f"advice: {error}")
        return 1
    print(f"advice: `kvfold serve` will use backend {best}; try: kvfold serve --manifest tiny --weights random:1")
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> str:
    import torch

    if not torch.cuda.is_available():
        return f"no GPU that torch {torch.__version__} can use"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return f"GPUs: {', '.join(names)}"
