"""Small steps through every kernel of a backend, for compute-sanitizer.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1   # else a tensor's neighbours hide what lies beyond its end
    for tool in memcheck racecheck initcheck synccheck; do
        compute-sanitizer --tool $tool --error-exitcode 1 python tests/gpu/sanitize.py --backend triton
    done

Rings and pages are not initialised, so that initcheck sees a read of a row that nobody wrote. The bytes are compared
between one step and several, so that the run also shows that something was computed.
"""

from __future__ import annotations

import argparse
import importlib
from types import SimpleNamespace

import torch

from tests.cases import DTYPES, FORMATS, Holder, make_compressor, make_rows
from tests.checks import assert_bits
from tests.gpu.check_cute import on_gpu

TOKENS = {"hca": (300, 2), "csa": (41, 3), "indexer": (41, 3)}
"""Tokens of a request, and how many requests a step has."""


class Device(Holder):
    """A holder on the device; `counted` as in a captured graph: room for more columns than are real."""

    def __init__(self, backend, compressor, ring: torch.dtype, counted: bool) -> None:
        device = on_gpu(compressor)

        def compress(windows, appends, rows, rings, pages, _):
            counts = None
            if counted:
                counts = torch.tensor([windows.shape[1], appends.shape[1]], dtype=torch.int32).cuda()
                windows, appends = (torch.nn.functional.pad(a, (0, 3), value=-(2**30)) for a in (windows, appends))
            return backend.compress(windows.cuda(), appends.cuda(), rows.cuda(), rings, pages, device, counts)

        super().__init__(compressor, SimpleNamespace(compress=compress), 4, 64, ring_dtype=ring)
        self.rings = torch.empty(self.rings.shape, dtype=ring, device="cuda")
        self.pages = torch.empty(self.pages.shape, dtype=torch.uint8, device="cuda")

    def feed(self, rows: torch.Tensor, sizes: list[int], num_requests: int) -> None:
        at = 0
        for size in sizes:
            part = rows[at : at + size]
            self.step([(slot, size) for slot in range(num_requests)], torch.cat([part] * num_requests))
            at += size


def run(backend, kind: str, cache_format: str, given: str, ring: str) -> None:
    compressor = make_compressor(kind, cache_format)
    total, num_requests = TOKENS[kind]
    rows = make_rows(compressor.geometry, total, dtype=given)
    once = Device(backend, compressor, DTYPES[ring], False)
    once.feed(rows, [total], num_requests)
    pieces = Device(backend, compressor, DTYPES[ring], True)
    pieces.feed(rows, [1, total // 2, 1, total - total // 2 - 2], num_requests)
    for slot in range(num_requests):
        assert_bits(pieces.entries(slot), once.entries(slot))
    assert backend.find_non_finite(rows.cuda(), total) is None


def run_layer(backend, given: str) -> None:
    """csa main and indexer in one launch."""
    calls = []
    for kind, cache_format in (("csa", "fp8_ds_mla"), ("indexer", "indexer_fp8")):
        compressor = make_compressor(kind, cache_format)
        holder = Device(backend, compressor, DTYPES[given], False)
        rows = make_rows(compressor.geometry, 41, dtype=given)
        holder.feed(rows, [41], 1)
        plan = holder.plans[-1]
        arrays = [torch.from_numpy(array.copy()).cuda() for array in (plan.windows, plan.appends)]
        calls.append((*arrays, rows.cuda(), holder.rings, holder.pages, on_gpu(compressor)))
    backend.compress_layer(*calls)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton", choices=("triton", "cute"))
    args = parser.parse_args()
    backend, num_cases = importlib.import_module(f"kvfold_kernels.compress.{args.backend}"), 0
    for kind, cache_format in FORMATS:
        for given, ring in (("bf16", "bf16"), ("fp32", "fp32"), ("bf16", "fp32")):
            run(backend, kind, cache_format, given, ring)
            num_cases += 1
    if hasattr(backend, "compress_layer"):
        for given in DTYPES:
            run_layer(backend, given)
            num_cases += 1
    torch.cuda.synchronize()
    print(f"{args.backend}: {num_cases} cases ran")


if __name__ == "__main__":
    main()
