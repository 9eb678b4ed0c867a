"""FlashMLA reads our pages: every byte that matters, through the kernel that a decode worker would run.

    python tests/gpu/read_back.py [--backend triton] [--out FILE.json]

A query that sees one key gives it a softmax weight of 1, so the attention's output is the dequantised row itself. It
must equal our own decoding of the page in every bit but the sign of zeros, which a sum that begins at +0 loses; and a
damaged byte must show in its row and nowhere else. Needs FlashMLA's extension as vLLM ships it (`vllm._flashmla_C`).
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import time
from types import SimpleNamespace

import torch

from kvfold_client.entries import decode_rows
from kvfold_kernels.compressor import Compressor
from kvfold_kernels.geometry import PageLayout
from tests.cases import DTYPES, Holder, make_compressor, make_rows
from tests.gpu.check_cute import on_gpu

CASES = (("csa", 64, 8192), ("csa", 64, 5), ("hca", 2, 65_536), ("hca", 64, 65_536), ("hca", 2, 128))
"""(kind, entries a page, tokens)."""
INDEX_LIST = 64
"""FlashMLA takes index lists in multiples of this, padded with −1."""


def flash_mla():
    import vllm._flashmla_C  # noqa: F401

    return torch.ops._flashmla_C.sparse_decode_fwd


def as_keys(pages: torch.Tensor, layout: PageLayout) -> torch.Tensor:
    """Pages as FlashMLA wants them: `[num_pages, entries, 1, entry_bytes]`; it finds rows and scales by itself."""
    size = layout.format.entry_bytes
    shape, strides = (len(pages), layout.entries, 1, size), (pages.stride(0), size, size, 1)
    return torch.as_strided(pages, shape, strides, pages.storage_offset())


def attend(op, pages: torch.Tensor, layout: PageLayout, slots: torch.Tensor, extra: bool) -> torch.Tensor:
    """bf16 `[num_slots, heads, head_dim]`: one query a slot, which sees that slot alone, as a main or an extra key."""
    num, heads, dim = len(slots), 64, 512
    generator = torch.Generator(device="cuda").manual_seed(1)
    query = torch.randn(num, 1, heads, dim, generator=generator, device="cuda").to(torch.bfloat16)
    nothing = torch.full((num, 1, INDEX_LIST), -1, dtype=torch.int32, device="cuda")
    indices, one = nothing.clone(), torch.ones(num, dtype=torch.int32, device="cuda")
    indices[:, 0, 0] = slots.int().cuda()
    keys = as_keys(pages, layout)
    if extra:
        empty = torch.zeros_like(pages[:1])
        seen = (as_keys(empty, layout), nothing, one * 0, None, None, None, keys, indices, one)
    else:
        seen = (keys, indices, one, None, None, None, None, None, None)
    return op(query, *seen, dim, dim**-0.5, None)[0][:, 0]


def fill(backend, compressor: Compressor, total: int, given: str) -> Holder:
    """Pages with a request of `total` tokens whose kv spans 26 powers of two from block to block."""
    device = on_gpu(compressor)

    def compress(windows, appends, rows, rings, pages, _):
        return backend.compress(windows.cuda(), appends.cuda(), rows.cuda(), rings, pages, device)

    geometry, layout = compressor.geometry, compressor.layout
    num_pages = -(-geometry.num_entries(total) // layout.entries) + 5
    holder = Holder(compressor, SimpleNamespace(compress=compress), 2, num_pages, ring_dtype=DTYPES[given])
    holder.rings, holder.pages = holder.rings.cuda(), holder.pages.cuda()
    rows = make_rows(geometry, total, dtype="fp32")
    gains = torch.randint(-18, 8, (geometry.half_width // 64, 1), generator=torch.Generator().manual_seed(2))
    rows[:, : geometry.half_width].unflatten(1, (-1, 64)).mul_(torch.exp2(gains.float()))
    holder.step([(1, total)], rows.to(DTYPES[given]))
    return holder


def check(op, backend, kind: str, entries: int, total: int, given: str, extra: bool) -> dict:
    compressor = make_compressor(kind, page_entries=entries, max_position=max(8192, total))
    holder, layout = fill(backend, compressor, total, given), compressor.layout
    slots = holder.slots_of(1)
    got = attend(op, holder.pages, layout, slots, extra)
    want = torch.from_numpy(decode_rows(holder.entries(1).cpu().numpy(), layout.format.name)).to(torch.bfloat16).cuda()
    wrong = int((got != want[:, None]).any(-1).any(-1).sum())
    signs = int((torch.signbit(got) != torch.signbit(want)[:, None]).any(1).sum())
    victim = len(slots) // 2
    page, entry = divmod(int(slots[victim]), layout.entries)
    holder.pages[page, layout.value_slice(entry).start + 7] ^= 0x11
    damaged = attend(op, holder.pages, layout, slots, extra)
    seen = (damaged != got).any(-1).any(-1).nonzero()[:, 0].tolist()
    return {
        "rows": len(slots),
        "rows_wrong": wrong,
        "zeros_without_sign": signs,
        "damage_seen_in_its_row_only": seen == [victim],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton", choices=("triton", "cute"))
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    backend, op = importlib.import_module(f"kvfold_kernels.compress.{args.backend}"), flash_mla()
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "backend": args.backend,
        "cases": {},
    }
    bad = 0
    for kind, entries, total in CASES:
        for given in DTYPES:
            for extra in (False, True):
                name = f"{kind} page {entries} tokens {total} {given}{' extra' if extra else ''}"
                case = result["cases"][name] = check(op, backend, kind, entries, total, given, extra)
                bad += bool(case["rows_wrong"]) or not case["damage_seen_in_its_row_only"]
                print(f"{name:44s} {case}", flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))
    print(f"FlashMLA read-back, {args.backend}: {bad} bad of {len(result['cases'])}")
    raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
