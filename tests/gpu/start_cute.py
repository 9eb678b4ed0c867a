"""From nothing to the first step on the `cute` backend, in a process of its own; JSON on stdout.

    python -m tests.gpu.start_cute [--library FOLDER]

import_s         torch and the backend's modules
context_s        the CUDA context, whatever runs on it
load_s           the backend: library found, checked, opened, the device asked
first_step_s     hca (32 windows), csa and indexer in one launch, a step without a window, the input check; synchronised
second_step_s    the same again

Without a library, and with the compiler, first_step_s is what compiling four kernels now takes.
"""

from __future__ import annotations

import time

START = time.perf_counter()

import argparse  # noqa: E402
import datetime  # noqa: E402
import json  # noqa: E402
import pathlib  # noqa: E402
import sys  # noqa: E402
from types import SimpleNamespace  # noqa: E402

import torch  # noqa: E402

from kvfold_kernels import backends  # noqa: E402
from kvfold_kernels.compress import cute  # noqa: E402

IMPORTED = time.perf_counter()

from tests.bench.measure import from_root  # noqa: E402
from tests.cases import Holder, make_compressor, make_rows  # noqa: E402
from tests.gpu.check_cute import on_gpu  # noqa: E402

HCA_TOKENS, CSA_TOKENS = 32 * 128 + 5, 512 + 3


class Steps:
    """Operands of the three compressors, ready on the device."""

    def __init__(self) -> None:
        self.calls = {}
        for kind, cache_format in (("hca", "fp8_ds_mla"), ("csa", "fp8_ds_mla"), ("indexer", "indexer_fp8")):
            total = HCA_TOKENS if kind == "hca" else CSA_TOKENS
            compressor, seen = make_compressor(kind, cache_format), []
            holder = Holder(compressor, SimpleNamespace(compress=lambda *call, seen=seen: seen.append(call) or 0))
            holder.step([(1, total)], make_rows(compressor.geometry, total))
            self.calls[kind] = (*(tensor.cuda() for tensor in seen[0][:5]), on_gpu(compressor))

    def run(self) -> float:
        """Seconds."""
        start = time.perf_counter()
        windows, *others = self.calls["hca"]
        assert cute.find_non_finite(others[1], HCA_TOKENS) is None
        launches = cute.compress(windows, *others) + cute.compress(windows[:, :0], *others)
        launches += cute.compress_layer(self.calls["csa"], self.calls["indexer"])
        torch.cuda.synchronize()
        assert launches == 3
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--library", type=pathlib.Path)
    args = parser.parse_args()
    if args.library:
        cute.LIBRARIES = args.library
    began = time.perf_counter()
    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()
    context = time.perf_counter()
    backends.load("cute")
    loaded = time.perf_counter()
    steps = Steps()
    torch.cuda.synchronize()
    result = {
        "import_s": IMPORTED - START,
        "context_s": context - began,
        "load_s": loaded - context,
        "first_step_s": steps.run(),
        "second_step_s": steps.run(),
        "origin": from_root(cute.kernels().origin),
        "clusters": cute.max_clusters(),
        "compiler_imported": "cutlass" in sys.modules,
        "device": torch.cuda.get_device_name(),
        "versions": {module: sys.modules[module].__version__ for module in ("torch", "tvm_ffi")},
        "python": sys.version.split()[0],
        "date": datetime.date.today().isoformat(),
    }
    print(json.dumps({name: round(value, 4) if isinstance(value, float) else value for name, value in result.items()}))


if __name__ == "__main__":
    main()
