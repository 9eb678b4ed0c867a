"""`kvfold doctor`: what can run on this machine, what cannot and why, and what to do next. Needs nothing installed."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import kvfold_client

EXAMPLES = """
example
  kvfold doctor
      ends in advice; exit status 1: no worker can run here yet
"""
_PURPOSES = {
    "torch": "every backend: pip install 'kvfold[worker]'",
    "numba": "the cpu backend: pip install 'kvfold[worker]'",
    "triton": "the triton backend: pip install 'kvfold[cuda]', on AMD 'kvfold[rocm]'",
    "fastapi": "serving: pip install 'kvfold[worker]'",
    "transformers": "the demo: pip install 'kvfold[demo]'",
    "matplotlib": "the plots of kvfold loadtest: pip install 'kvfold[load]'",
    "rich": "progress bars: pip install 'kvfold[load]'",
}
_NVIDIA_DRIVER, _AMD_DRIVER = Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu")


def run(argv: list[str]) -> int:
    """Say which backends can run here, why the others cannot, and what to do next."""
    argparse.ArgumentParser(
        prog="kvfold doctor",
        description=run.__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    ).parse_args(argv)
    print("\n".join(_machine()))
    reasons = _reasons()
    print("backends")
    for name, reason in reasons.items():
        print(f"  {name:10} {'can run' if reason is None else reason}")
    print("packages")
    for package, purpose in _PURPOSES.items():
        print(f"  {package:13} {_version(package) or f'missing; needed for {purpose}'}")
    best = _automatic(reasons)
    print("advice")
    for sentence in _advice(reasons, best):
        print(f"  - {sentence}")
    return 0 if best else 1


def _machine() -> Iterator[str]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cpus = f"{usable} CPUs" if usable == os.cpu_count() else f"{usable} of {os.cpu_count()} CPUs"
    yield f"kvfold {kvfold_client.__version__}, Python {platform.python_version()}, {platform.machine()}, {cpus}"
    if not _has("torch"):
        return
    import torch

    if not torch.cuda.is_available():
        yield f"  no GPU that torch {torch.__version__} can use"
    for i in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(i)
        yield f"  GPU {i}: {gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"


def _reasons() -> dict[str, str | None]:
    """Why each backend cannot run here; None: it can."""
    if not _has("torch"):
        return {"all": "every backend needs the package torch, which is not installed"}
    from kvfold_kernels import backends

    return {name: backends.why_not(name) for name in backends.NAMES}


def _automatic(reasons: dict[str, str | None]) -> str | None:
    """The backend that `auto` takes, None if there is none."""
    if all(reasons.values()):
        return None
    from kvfold_kernels import backends

    try:
        return backends.load("auto").name
    except backends.BackendUnavailableError:
        return None


def _advice(reasons: dict[str, str | None], best: str | None) -> Iterator[str]:
    """What to do, the most urgent first; the last is what to try now."""
    if not _has("torch"):
        yield "install what a worker needs: pip install 'kvfold[worker]'; for a GPU 'kvfold[cuda]' or 'kvfold[rocm]'"
        return
    yield from _about_gpus(reasons)
    if not _has("fastapi"):
        yield "install what serves: pip install 'kvfold[worker]'"
    if best is None:
        yield "no backend can run by itself: pip install 'kvfold[worker]' brings the one for CPUs"
        return
    if best == "cpu":
        yield "the cpu backend is there to try things; how far it is from what the memory could do: kvfold bench"
    yield f"a worker here will use backend {best}: kvfold serve --manifest tiny --weights random:1"
    yield "then, beside it: kvfold loadtest http://127.0.0.1:8787"


def _about_gpus(reasons: dict[str, str | None]) -> Iterator[str]:
    import torch

    if torch.cuda.is_available():
        if reasons.get("triton"):
            extra = "rocm" if torch.version.hip else "cuda"
            yield f"there is a GPU, and no kernels for it: pip install 'kvfold[{extra}]'"
        return
    driver = "NVIDIA" if _NVIDIA_DRIVER.exists() else "AMD" if _AMD_DRIVER.exists() else None
    if driver:
        yield (
            f"this machine has a driver for {driver} GPUs, but torch {torch.__version__} sees none: install a torch "
            "that is built for it, or give the container its devices"
        )


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
