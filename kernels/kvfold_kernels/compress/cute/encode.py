"""An entry's bytes, from the columns that one lane holds. The formulas are those of `kvfold_kernels.entry`.

A lane holds `len(x)` adjacent columns of a row, 4 or 8; adjacent lanes hold adjacent columns; a whole quantiser block
lies in one warp. Every lane of the warp takes part; a lane that is not `live` stores nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cutlass import Float32, Int32

from kvfold_kernels import geometry as g
from kvfold_kernels.compress.cute import ops


@dataclass(frozen=True)
class Writer:
    """Compile-time: the format and its options. `profile` is the indexer's."""

    format: g.EntryFormat
    profile: str = "vllm"

    @property
    def nope(self) -> int:
        return self.format.head_dim - g.ROPE_DIM

    def write(self, x: list, column, live, place, floors) -> None:
        """x: normed and rotated fp32. place: value and scale addresses of the entry. floors: see `Floors`."""
        getattr(self, "_" + self.format.name)(x, column, live, place, floors)

    def _fp32(self, x, column, live, place, floors) -> None:
        for start in range(0, len(x), 4):
            words = [ops.bits(value) for value in x[start : start + 4]]
            ops.store_words(place.values + 4 * (column + start), words, live)

    def _bf16(self, x, column, live, place, floors) -> None:
        ops.store_words(place.values + 2 * column, _bf16_words(x), live)

    def _fp8(self, x, column, live, place, floors) -> None:
        y = [ops.mul(value, floors.inverse_scale) for value in _rounded(x)]
        ops.store_words(place.values + column, _e4m3_words(y), live)

    def _fp8_ds_mla(self, x, column, live, place, floors) -> None:
        y = _rounded(x)
        biased = ceil_exponent(_block_max(y, g.FP8_BLOCK), g.E4M3_MAX, floors)
        inverse = _inverse_power(biased)
        rope = column >= self.nope
        quantised = _e4m3_words([ops.mul(value, inverse) for value in y])
        ops.store_words(place.values + column, quantised, live & Int32(column < self.nope))
        ops.store_words(place.values + 2 * column - self.nope, _bf16_words(x), live & Int32(rope))
        scale = biased * Int32(column < self.nope)
        ops.store_byte(place.scales + column // g.FP8_BLOCK, scale, live & Int32(column % g.FP8_BLOCK == 0))

    def _indexer_fp8(self, x, column, live, place, floors) -> None:
        first = live & Int32(column == 0)
        if self.profile == "sglang":
            y = hadamard(x, self.format.head_dim)
            amax = ops.fmax(_block_max(y, self.format.head_dim), floors.amax)
            scale = ops.exact_quotient(amax, g.E4M3_MAX)
            y = [ops.exact_quotient(value, scale) for value in y]
            word = ops.bits(scale)
        else:
            y = _rounded(x)
            biased = ceil_exponent(_block_max(y, self.format.head_dim), g.E4M3_MAX, floors)
            inverse = _inverse_power(biased)
            y = [ops.mul(value, inverse) for value in y]
            word = biased << 23
        ops.store_words(place.values + column, _e4m3_words(y), live)
        ops.store_words(place.scales, [word], first)

    def _indexer_mxfp4(self, x, column, live, place, floors) -> None:
        y = hadamard(x, self.format.head_dim) if self.profile == "sglang" else _rounded(x)
        biased = ceil_exponent(_block_max(y, g.MXFP4_BLOCK), g.E2M1_MAX, floors)
        inverse = _inverse_power(biased)
        word = Int32(0)
        for i, value in enumerate(y):
            word = word | (_e2m1(ops.mul(value, inverse)) << (4 * i))
        if len(x) == 8:
            ops.store_words(place.values + column // 2, [word], live)
        else:
            ops.store_half(place.values + column // 2, word, live)
        ops.store_byte(place.scales + column // g.MXFP4_BLOCK, biased, live & Int32(column % g.MXFP4_BLOCK == 0))


@dataclass(frozen=True)
class Floors:
    """Run-time numbers of the quantisers: floor of a block's maximum, floor of the biased exponent, 1 / fp8_scale."""

    amax: Float32
    exponent: Int32
    inverse_scale: Float32


@dataclass(frozen=True)
class Place:
    """Addresses of an entry's values and scales."""

    values: object
    scales: object


def ceil_exponent(amax, limit: float, floors: Floors):
    """127 + ⌈log2(amax / limit)⌉ from the bits, floored.

    limit = m · 2^k: a mantissa above m's carries into the exponent.
    """
    mantissa, exponent = math.frexp(limit)
    carry = 0x7FFFFF - int((2 * mantissa - 1) * 2**23)
    biased = ((ops.bits(ops.fmax(amax, floors.amax)) + carry) >> 23) - (exponent - 1)
    return ops.asm("max.s32 $0, $1, $2;", [Int32], [biased, floors.exponent])


def rotate(x: list, cos: list, sin: list, rope) -> list:
    """Interleaved pairs, where `rope`: e' = fma(e, cos, −(o·sin)), o' = fma(e, sin, o·cos)."""
    result = []
    for i in range(0, len(x), 2):
        even, odd = x[i], x[i + 1]
        new_even = ops.fma(even, cos[i // 2], ops.neg(ops.mul(odd, sin[i // 2])))
        new_odd = ops.fma(even, sin[i // 2], ops.mul(odd, cos[i // 2]))
        result += [ops.select(rope, new_even, even), ops.select(rope, new_odd, odd)]
    return result


def hadamard(x: list, dim: int) -> list:
    """H·x / √dim in Sylvester order: butterflies with ascending distance, first within a lane, then between lanes."""
    y = list(x)
    distance = 1
    while distance < len(y):
        y = [ops.sub(y[i - distance], y[i]) if i & distance else ops.add(y[i], y[i + distance]) for i in range(len(y))]
        distance *= 2
    lane = ops.asm("mov.u32 $0, %laneid;", [Int32], [])
    distance = 1
    while distance * len(x) < dim:
        upper = lane & distance
        other = [ops.shuffle(value, distance) for value in y]
        y = [ops.add(ops.select(upper, b, a), ops.select(upper, ops.neg(a), b)) for a, b in zip(y, other, strict=True)]
        distance *= 2
    return [ops.mul(value, 1.0 / math.sqrt(dim)) for value in y]


def _bf16_words(x: list) -> list:
    return [ops.pack_bf16(x[i], x[i + 1]) for i in range(0, len(x), 2)]


def _rounded(x: list) -> list:
    return [value for word in _bf16_words(x) for value in ops.unpack_bf16(word)]


def _e4m3_words(y: list) -> list:
    return [ops.pack_e4m3(y[i : i + 4]) for i in range(0, len(y), 4)]


def _block_max(y: list, block: int):
    """max |y| over a quantiser block of `block` adjacent columns."""
    amax = ops.fabs(y[0])
    for value in y[1:]:
        amax = ops.fmax(amax, ops.fabs(value))
    distance = 1
    while distance * len(y) < block:
        amax = ops.fmax(amax, ops.shuffle(amax, distance))
        distance *= 2
    return amax


def _inverse_power(biased):
    return ops.from_bits((Int32(2 * g.UE8M0_BIAS) - biased) << 23)


def _e2m1(value):
    """4-bit code: sign, then how many midpoints the size passes; a midpoint itself goes to the even code."""
    size = ops.fabs(value)
    code = (ops.bits(value) >> 28) & 8
    for i, midpoint in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)):
        compare = "ge" if i % 2 else "gt"
        text = f"{{.reg .pred p; setp.{compare}.f32 p, $1, $2; selp.b32 $0, 1, 0, p;}}"
        code = code + ops.asm(text, [Int32], [size, Float32(midpoint)])
    return code
