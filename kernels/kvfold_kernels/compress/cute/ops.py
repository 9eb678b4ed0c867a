"""One PTX instruction a function, on fp32 and integer scalars. Roundings are spelled out: no compiler contracts them.

Addresses are 64-bit integers; shared-memory addresses 32-bit. A row piece is 4 or 8 adjacent columns of one lane.
"""

from __future__ import annotations

from typing import NamedTuple

from cutlass import Float32, Int32, Int64, Uint16
from cutlass._mlir import ir
from cutlass._mlir.dialects import cute as _cute_ir
from cutlass._mlir.dialects import cute_nvgpu, llvm
from cutlass.cute import AddressSpace

MAX_FP32 = 3.4028234663852886e38
LOG2_E = 1.4426950408889634

_LETTER = {Float32: "f", Int32: "r", Int64: "l", Uint16: "h"}


def asm(text: str, results: list, operands: list, *, effects: bool = False, early: bool = False):
    """Inline PTX: `$0…` are the results, then the operands. `effects`: keep it in place among its like.
    `early`: results are written before the last operand is read."""
    kinds = [_LETTER[type(operand)] for operand in operands]
    constraints = ",".join(
        [
            *(("=&" if early else "=") + _LETTER[result] for result in results),
            *kinds,
            *(["~{memory}"] if effects else []),
        ]
    )
    types = [result.mlir_type for result in results]
    result_type = types[0] if len(types) == 1 else llvm.StructType.get_literal(types) if types else None
    value = llvm.inline_asm(
        result_type,
        [operand.ir_value() for operand in operands],
        text,
        constraints,
        has_side_effects=effects,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )
    if not types:
        return None
    if len(types) == 1:
        return results[0](value)
    position = ir.DenseI64ArrayAttr.get
    return [kind(llvm.extractvalue(kind.mlir_type, value, position([i]))) for i, kind in enumerate(results)]


def add(a, b):
    return asm("add.rn.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)])


def sub(a, b):
    return asm("sub.rn.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)])


def mul(a, b):
    return asm("mul.rn.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)])


def fma(a, b, c):
    return asm("fma.rn.f32 $0, $1, $2, $3;", [Float32], [Float32(a), Float32(b), Float32(c)])


def fmax(a, b):
    return asm("max.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)])


def fmin(a, b):
    return asm("min.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)])


def fabs(a):
    return asm("abs.f32 $0, $1;", [Float32], [Float32(a)])


def neg(a):
    return asm("neg.f32 $0, $1;", [Float32], [Float32(a)])


def exp2(a):
    return asm("ex2.approx.ftz.f32 $0, $1;", [Float32], [Float32(a)])


def rsqrt(a):
    return asm("rsqrt.approx.f32 $0, $1;", [Float32], [Float32(a)])


def quotient(a, b):
    """a / b within 2 units in the last place, for 2^-126 ≤ |b| ≤ 2^126."""
    return asm("div.approx.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)])


def exact_quotient(a, b):
    return asm("div.rn.f32 $0, $1, $2;", [Float32], [Float32(a), Float32(b)])


def clamp(a):
    """To ±max fp32."""
    return fmax(fmin(a, MAX_FP32), -MAX_FP32)


def select(condition, a, b):
    """condition ? a : b for fp32; condition a 32-bit integer."""
    text = "{.reg .pred p; setp.ne.b32 p, $3, 0; selp.f32 $0, $1, $2, p;}"
    return asm(text, [Float32], [Float32(a), Float32(b), Int32(condition)])


def bits(a):
    return asm("mov.b32 $0, $1;", [Int32], [Float32(a)])


def from_bits(a):
    return asm("mov.b32 $0, $1;", [Float32], [Int32(a)])


def pack_bf16(low, high):
    """Two fp32, rounded, in one word; `low` in the low half."""
    return asm("cvt.rn.bf16x2.f32 $0, $1, $2;", [Int32], [Float32(high), Float32(low)])


def unpack_bf16(word):
    """A word's two bf16 as fp32, low half first."""
    low = asm("shl.b32 $0, $1, 16;", [Int32], [word])
    high = asm("and.b32 $0, $1, 0xffff0000;", [Int32], [word])
    return [from_bits(low), from_bits(high)]


def pack_e4m3(values: list):
    """Four fp32, rounded to e4m3 and saturated at ±448, in one word, first in the lowest byte."""
    text = (
        "{.reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, $2, $1; cvt.rn.satfinite.e4m3x2.f32 h, $4, $3;"
        " mov.b32 $0, {l, h};}"
    )
    return asm(text, [Int32], values)


def shuffle(value, distance: int):
    text = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
    return asm(text, [Float32], [Float32(value)], effects=True)


# Memory. L1::no_allocate: what is read once should not push the shared tables out of L1.


def load_words(address, count: int, *, once: bool = True) -> list:
    hint = "L1::no_allocate." if once else ""
    if count == 1:
        return [asm(f"ld.global.{hint}b32 $0, [$1];", [Int32], [address], effects=True)]
    targets = ", ".join(f"${i}" for i in range(count))
    return asm(f"ld.global.{hint}v{count}.b32 {{{targets}}}, [${count}];", [Int32] * count, [address], effects=True)


def load_fp32(address, count: int) -> list:
    """Adjacent fp32 values of a table that no kernel writes, so it may be read before the grid dependency is met.
    Not `.nc`: the assembler moves such loads behind the wait."""
    values = []
    for start in range(0, count, 4):
        n = min(4, count - start)
        targets = f"{{{', '.join(f'${i}' for i in range(n))}}}" if n > 1 else "$0"
        vector = f"v{n}." if n > 1 else ""
        loaded = asm(f"ld.global.{vector}f32 {targets}, [${n}];", [Float32] * n, [address + start * 4], effects=True)
        values += loaded if n > 1 else [loaded]
    return values


def load_int(address):
    """A word of the plan: written by a copy, never by a kernel, so it too may be read early."""
    return asm("ld.global.b32 $0, [$1];", [Int32], [address], effects=True)


def store_words(address, words: list, predicate=None) -> None:
    n = len(words)
    operands = [address, *words]
    guard = ""
    if predicate is not None:
        operands.append(Int32(predicate))
        guard = f"setp.ne.b32 p, ${n + 1}, 0; @p "
    values = f"{{{', '.join(f'${i + 1}' for i in range(n))}}}" if n > 1 else "$1"
    vector = f"v{n}." if n > 1 else ""
    asm(f"{{.reg .pred p; {guard}st.global.{vector}b32 [$0], {values};}}", [], operands, effects=True)


def store_byte(address, value, predicate=None) -> None:
    guard = "" if predicate is None else "setp.ne.b32 p, $2, 0; @p "
    operands = [address, Int32(value)] + ([] if predicate is None else [Int32(predicate)])
    asm(f"{{.reg .pred p; {guard}st.global.b8 [$0], $1;}}", [], operands, effects=True)


def store_half(address, value, predicate=None) -> None:
    guard = "" if predicate is None else "setp.ne.b32 p, $2, 0; @p "
    operands = [address, Int32(value)] + ([] if predicate is None else [Int32(predicate)])
    asm(f"{{.reg .pred p; .reg .b16 h; cvt.u16.u32 h, $1; {guard}st.global.b16 [$0], h;}}", [], operands, effects=True)


def shared_store(address, values: list) -> None:
    n = len(values)
    targets = f"{{{', '.join(f'${i + 1}' for i in range(n))}}}" if n > 1 else "$1"
    vector = f"v{n}." if n > 1 else ""
    asm(f"st.shared.{vector}f32 [$0], {targets};", [], [address, *values], effects=True)


def shared_fp32(address, count: int) -> list:
    if count == 1:
        return [asm("ld.shared.f32 $0, [$1];", [Float32], [address], effects=True)]
    targets = ", ".join(f"${i}" for i in range(count))
    return asm(f"ld.shared.v{count}.f32 {{{targets}}}, [${count}];", [Float32] * count, [address], effects=True)


def shared_words(address, count: int) -> list:
    if count == 1:
        return [asm("ld.shared.b32 $0, [$1];", [Int32], [address], effects=True)]
    targets = ", ".join(f"${i}" for i in range(count))
    return asm(f"ld.shared.v{count}.b32 {{{targets}}}, [${count}];", [Int32] * count, [address], effects=True)


def shared_mixed2(wide_address, address, index: int, num_wide) -> list:
    """2 columns as fp32 words, from fp32 at `wide_address` where index < num_wide, else from bf16 at `address`."""
    text = (
        f"{{.reg .pred p; setp.gt.s32 p, $4, {index}; @p ld.shared.v2.b32 {{$0, $1}}, [$2];"
        " @!p ld.shared.b32 $1, [$3]; @!p shl.b32 $0, $1, 16; @!p and.b32 $1, $1, 0xffff0000;}"
    )
    return asm(text, [Int32] * 2, [wide_address, address, num_wide], effects=True, early=True)


def barrier(name, num_threads: int) -> None:
    asm(f"bar.sync $0, {num_threads};", [], [Int32(name)], effects=True)


def wait_for_earlier_grids() -> None:
    """Every block calls it before it ends, also one without work: else a later grid could overtake an earlier one."""
    asm("griddepcontrol.wait;", [], [], effects=True)


def let_next_grid_start() -> None:
    asm("griddepcontrol.launch_dependents;", [], [], effects=True)


def load_words_if(address, count: int, predicate) -> list:
    """`count` words, or zeros where the predicate is 0."""
    targets = ", ".join(f"${i}" for i in range(count))
    zeros = " ".join(f"mov.b32 ${i}, 0;" for i in range(count))
    text = (
        f"{{.reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {zeros}"
        f" @p ld.global.L1::no_allocate.v{count}.b32 {{{targets}}}, [${count}];}}"
    )
    # The address must not share a register with a result: results are early-clobbered by the zeros.
    return asm(text, [Int32] * count, [address, Int32(predicate)], effects=True, early=True)


def select64(condition, a, b):
    """condition ? a : b for 64-bit integers."""
    text = "{.reg .pred p; setp.ne.b32 p, $3, 0; selp.b64 $0, $1, $2, p;}"
    return asm(text, [Int64], [Int64(a), Int64(b), Int32(condition)])


def load_mixed_words(address, wide) -> list:
    """4 columns as they lie in memory: 4 words of fp32 where `wide`, else 2 of bf16 and 2 that mean nothing."""
    text = (
        "{.reg .pred p; setp.ne.b32 p, $5, 0; @p ld.global.L1::no_allocate.v4.b32 {$0, $1, $2, $3}, [$4];"
        " @!p ld.global.L1::no_allocate.v2.b32 {$0, $1}, [$4];}"
    )
    return asm(text, [Int32] * 4, [address, Int32(wide)], effects=True, early=True)


def widen(words: list, wide) -> list:
    """What `load_mixed_words` gave, as 4 words of fp32."""
    text = (
        "{.reg .pred p; .reg .b32 a, b, c, d; setp.ne.b32 p, $8, 0;"
        " shl.b32 a, $4, 16; and.b32 b, $4, 0xffff0000; shl.b32 c, $5, 16; and.b32 d, $5, 0xffff0000;"
        " selp.b32 $0, $4, a, p; selp.b32 $1, $5, b, p; selp.b32 $2, $6, c, p; selp.b32 $3, $7, d, p;}"
    )
    return asm(text, [Int32] * 4, [*words, Int32(wide)], early=True)


# Copies into shared memory that a lane waits for by itself.


class Piece(NamedTuple):
    """Where a copy goes, how far from row 0 of its source it comes from, and its bytes (8 or 16)."""

    target: object
    offset: int
    num_bytes: int


def copy_row(origin: tuple, row: int, of_ring: Piece, given: Piece) -> None:
    """A lane's piece of a row. origin: addresses of row 0 in the ring, there behind the wrap, and in the input; how
    many rows lie in the ring, and how many before the wrap."""
    where = f"setp.gt.s32 r, $3, {row}; setp.gt.s32 w, $4, {row}; selp.b64 a, $0, $1, w;"
    if of_ring[1:] == given[1:]:
        copies = f"selp.b64 a, a, $2, r; {_copy('$5', f'a + {given.offset}', given.num_bytes)}"
        targets = [given.target]
    else:
        copies = (
            f"@r {_copy('$5', f'a + {of_ring.offset}', of_ring.num_bytes)}"
            f" @!r {_copy('$6', f'$2 + {given.offset}', given.num_bytes)}"
        )
        targets = [of_ring.target, given.target]
    asm(f"{{.reg .pred r, w; .reg .b64 a; {where} {copies}}}", [], [*origin, *targets], effects=True)


def _copy(target: str, address: str, num_bytes: int) -> str:
    """Through L1: past it (`cg`, 16 bytes) took half as long again."""
    return f"cp.async.ca.shared.global [{target}], [{address}], {num_bytes};"


def wait_for_copies() -> None:
    """Until this lane's copies have arrived."""
    asm("cp.async.wait_all;", [], [], effects=True)


# Clusters and asynchronous barriers.


def cluster_arrive() -> None:
    asm("barrier.cluster.arrive.relaxed;", [], [], effects=True)


def cluster_wait() -> None:
    asm("barrier.cluster.wait.acquire;", [], [], effects=True)


def barrier_init(address, arrivals: int) -> None:
    text = f"mbarrier.init.shared::cta.b64 [$0], {arrivals}; fence.mbarrier_init.release.cluster;"
    asm(text, [], [address], effects=True)


def barrier_expect_if(address, num_bytes, predicate) -> None:
    """Arrive, and expect so many bytes; they may have come before."""
    text = "{.reg .pred p; setp.ne.b32 p, $2, 0; @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;}"
    asm(text, [], [address, Int32(num_bytes), predicate], effects=True)


def barrier_arrive(address, predicate) -> None:
    text = "{.reg .pred p; setp.ne.b32 p, $1, 0; @p mbarrier.arrive.shared::cta.b64 _, [$0];}"
    asm(text, [], [address, predicate], effects=True)


def barrier_wait(address, phase, scope: str = "cta") -> None:
    text = (
        f"{{.reg .pred p; AGAIN_${{:uid}}: mbarrier.try_wait.parity.acquire.{scope}.shared::cta.b64 p, [$0], $1;"
        " @p bra DONE_${:uid}; bra AGAIN_${:uid}; DONE_${:uid}:}"
    )
    asm(text, [], [address, Int32(phase)], effects=True)


def send_to_peer(address, barrier_address, value, rank, predicate) -> None:
    """Put fp32 `value` at the same shared address of the cluster's block `rank`; its barrier counts the 4 bytes."""
    text = (
        "{.reg .pred p; .reg .b32 a, b; setp.ne.b32 p, $4, 0;"
        " @p mapa.shared::cluster.u32 a, $0, $3; @p mapa.shared::cluster.u32 b, $1, $3;"
        " @p st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [a], $2, [b];}"
    )
    asm(text, [], [address, barrier_address, bits(value), Int32(rank), Int32(predicate)], effects=True)


# Bulk copies into shared memory; a barrier counts their bytes.


def descriptor(atom):
    """Address of a copy atom's tensor map."""
    pointer = _cute_ir.PtrType.get(Int64.mlir_type, AddressSpace.generic, 64)
    return Int64(cute_nvgpu.get_tma_desc_addr(pointer, cute_nvgpu.atom_make_exec_tma(atom._trait.value)).toint())


def prefetch_map(tensor_map, predicate) -> None:
    text = "{.reg .pred p; setp.ne.b32 p, $1, 0; @p prefetch.tensormap [$0];}"
    asm(text, [], [tensor_map, predicate], effects=True)


EVICT_FIRST = 0x12F0000000000000
"""L2 policy, as createpolicy.fractional makes it."""


def fetch_box(landing: tuple, tensor_map, coordinates: tuple, predicate, *, once: bool) -> None:
    """landing: target and barrier. coordinates: column and row of the box's first element. once: read past the L2."""
    hint, policy = (".L2::cache_hint", ", $6") if once else ("", "")
    text = (
        "{.reg .pred p; setp.ne.b32 p, $5, 0; @p cp.async.bulk.tensor.2d.shared::cluster.global.tile"
        f".mbarrier::complete_tx::bytes{hint} [$0], [$1, {{$2, $3}}], [$4]{policy};}}"
    )
    column, row = coordinates
    operands = [landing[0], tensor_map, Int32(column), Int32(row), landing[1], Int32(predicate)]
    asm(text, [], operands + [Int64(EVICT_FIRST)] * once, effects=True)


def warp_sync() -> None:
    asm("bar.warp.sync 0xffffffff;", [], [], effects=True)


def select_int(condition, a, b):
    text = "{.reg .pred p; setp.ne.b32 p, $3, 0; selp.b32 $0, $1, $2, p;}"
    return asm(text, [Int32], [Int32(a), Int32(b), Int32(condition)])


def lower(address, value, predicate) -> None:
    """*address = min(*address, value), 64 bits."""
    text = "{.reg .pred p; setp.ne.b32 p, $2, 0; @p red.relaxed.gpu.global.min.s64 [$0], $1;}"
    asm(text, [], [address, Int64(value), Int32(predicate)], effects=True)
