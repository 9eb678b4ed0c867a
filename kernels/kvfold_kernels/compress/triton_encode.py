"""Device code, second half: pooled rows → normed, rotated, and stored as the bytes of their entries.

Formulas and order are `reference`'s and `entry`'s; a tile is fp32 `[windows, head_dim]`. Every sum is a chain or a tree
of explicit steps, and nothing is contracted, so no layout decides an order: a sum over an axis of two has only one.
Codes of bf16, e4m3 and e2m1 are made from integers: the same bits on every target.
"""
# ruff: noqa: N803, N806, SIM108  constants are in capitals

import triton
import triton.language as tl

from kvfold_kernels import geometry as g
from kvfold_kernels import plan as p

POSITION = tl.constexpr(p.POSITION)
SLOT = tl.constexpr(p.SLOT)
FP8_BLOCK = tl.constexpr(g.FP8_BLOCK)
MXFP4_BLOCK = tl.constexpr(g.MXFP4_BLOCK)
E4M3_MAX = tl.constexpr(g.E4M3_MAX)
E2M1_MAX = tl.constexpr(g.E2M1_MAX)
BIAS = tl.constexpr(g.UE8M0_BIAS)


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.jit
def _bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def _from_bits(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _negative(x):
    """−x; Triton's own is 0 − x, which is +0 for +0."""
    return _from_bits(_bits(x) ^ 0x80000000)


@triton.jit
def _shift_to_nearest(bits, DROPPED: tl.constexpr):
    """bits >> DROPPED, ties to even."""
    return (bits + ((bits >> DROPPED) & 1) + ((1 << (DROPPED - 1)) - 1)) >> DROPPED


@triton.jit
def _bf16_bits(x):
    return _shift_to_nearest(_bits(x), 16)


@triton.jit
def _bf16_rounded(x):
    return _from_bits(_bf16_bits(x) << 16)


@triton.jit
def _code(x, TOP: tl.constexpr, MANTISSA: tl.constexpr, EXPONENT_BIAS: tl.constexpr):
    """fp32 → code of a float of MANTISSA bits and largest value TOP, without the sign; nearest even, saturating.

    Below the smallest normal number, adding a power of two rounds to a multiple of the smallest subnormal number.
    """
    size = tl.minimum(tl.abs(x), TOP)
    normal = _shift_to_nearest(_bits(size), 23 - MANTISSA) - ((BIAS - EXPONENT_BIAS) << MANTISSA)
    subnormal = _bits(size + 2.0 ** (24 - EXPONENT_BIAS - MANTISSA)) & 0xFF
    return tl.where(size >= 2.0 ** (1 - EXPONENT_BIAS), normal, subnormal)


@triton.jit
def _e4m3(x):
    return (_code(x, E4M3_MAX, 3, 7) | ((_bits(x) >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _e2m1(x):
    return _code(x, E2M1_MAX, 1, 1) | ((_bits(x) >> 28) & 8)


@triton.jit
def _biased_exponent(amax, CARRY: tl.constexpr, EXPONENT: tl.constexpr, FLOOR: tl.constexpr):
    """127 + ⌈log2(amax / limit)⌉, limit = m·2^EXPONENT: a mantissa above m's carries, with CARRY, into the exponent."""
    biased = ((_bits(amax) + CARRY) >> 23).to(tl.int32) - EXPONENT
    return tl.maximum(biased, FLOOR)


@triton.jit
def _inverse_power(biased):
    return _from_bits(((-biased + 2 * BIAS) << 23).to(tl.uint32))


@triton.jit
def _block_max(x, BLOCK: tl.constexpr):
    """max |x| over blocks of adjacent columns, `[windows, blocks]`."""
    return tl.max(tl.reshape(tl.abs(x), (x.shape[0], x.shape[1] // BLOCK, BLOCK)), axis=2)


@triton.jit
def _per_column(scale, BLOCK: tl.constexpr):
    """`[windows, blocks]` → `[windows, blocks·BLOCK]`."""
    WINDOWS: tl.constexpr = scale.shape[0]
    BLOCKS: tl.constexpr = scale.shape[1]
    return tl.reshape(tl.broadcast_to(scale[:, :, None], (WINDOWS, BLOCKS, BLOCK)), (WINDOWS, BLOCKS * BLOCK))


@triton.jit
def _sum_of_squares(c):
    """Leaves of 4 adjacent columns by a chain of fma, then a binary tree over adjacent leaves; `[windows]`."""
    WINDOWS: tl.constexpr = c.shape[0]
    LEAVES: tl.constexpr = c.shape[1] // 4
    even, odd = tl.split(tl.reshape(c, (WINDOWS, LEAVES, 2, 2)))
    c0, c2 = tl.split(even)
    c1, c3 = tl.split(odd)
    q = tl.fma(c3, c3, tl.fma(c2, c2, tl.fma(c1, c1, c0 * c0)))
    for level in tl.static_range(_log2(LEAVES)):
        q = tl.sum(tl.reshape(q, (WINDOWS, LEAVES >> (level + 1), 2)), axis=2)
    return tl.reshape(q, (WINDOWS,))


@triton.jit
def _rotated(x, cos, sin, ROPE: tl.constexpr):
    """Interleaved pairs of the last ROPE columns: e' = fma(e, cos, −(o·sin)), o' = fma(e, sin, o·cos)."""
    WINDOWS: tl.constexpr = x.shape[0]
    PAIRS: tl.constexpr = x.shape[1] // 2
    turns = tl.broadcast_to(tl.arange(0, PAIRS)[None, :] >= PAIRS - ROPE // 2, (WINDOWS, PAIRS))
    even, odd = tl.split(tl.reshape(x, (WINDOWS, PAIRS, 2)))
    new_even = tl.where(turns, tl.fma(even, cos, _negative(odd * sin)), even)
    new_odd = tl.where(turns, tl.fma(even, sin, odd * cos), odd)
    return tl.reshape(tl.join(new_even, new_odd), (WINDOWS, 2 * PAIRS))


@triton.jit
def _hadamard(x):
    """H·x / √n in Sylvester order: butterflies with ascending distance, one scaling last."""
    WINDOWS: tl.constexpr = x.shape[0]
    N: tl.constexpr = x.shape[1]
    for level in tl.static_range(_log2(N)):
        pairs = tl.reshape(x, (WINDOWS, N >> (level + 1), 2, 1 << level))
        a, b = tl.split(tl.permute(pairs, (0, 1, 3, 2)))
        x = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 1, 3, 2)), (WINDOWS, N))
    return x * (1.0 / N**0.5)


@triton.jit
def _store_packed(x, values, scales, NOPE: tl.constexpr, AMAX_FLOOR: tl.constexpr, LOWEST: tl.constexpr):
    column = tl.arange(0, x.shape[1])[None, :]
    block = tl.arange(0, x.shape[1] // FP8_BLOCK)[None, :]
    bf16 = _bf16_bits(x)
    y = _from_bits(bf16 << 16)
    biased = _biased_exponent(tl.maximum(_block_max(y, FP8_BLOCK), AMAX_FLOOR), 0x1FFFFF, 8, LOWEST)
    code = _e4m3(y * _per_column(_inverse_power(biased), FP8_BLOCK))
    tl.store(values + column, code, mask=tl.broadcast_to(column < NOPE, code.shape))
    rope = (values + NOPE).to(tl.pointer_type(tl.uint16)) + (column - NOPE)
    tl.store(rope, bf16.to(tl.uint16), mask=tl.broadcast_to(column >= NOPE, code.shape))
    tl.store(scales + block, tl.where(block < NOPE // FP8_BLOCK, biased, 0).to(tl.uint8))


@triton.jit
def _store_indexer_fp8(x, values, scales, SGLANG: tl.constexpr, AMAX_FLOOR: tl.constexpr, LOWEST: tl.constexpr):
    column = tl.arange(0, x.shape[1])[None, :]
    if SGLANG:
        y = _hadamard(x)
        scale = tl.div_rn(tl.maximum(_block_max(y, x.shape[1]), AMAX_FLOOR), E4M3_MAX)
        y = tl.div_rn(y, tl.broadcast_to(scale, y.shape))
    else:
        y = _bf16_rounded(x)
        biased = _biased_exponent(tl.maximum(_block_max(y, x.shape[1]), AMAX_FLOOR), 0x1FFFFF, 8, LOWEST)
        scale = _from_bits((biased << 23).to(tl.uint32))
        y = y * _inverse_power(biased)
    tl.store(values + column, _e4m3(y))
    tl.store(scales.to(tl.pointer_type(tl.float32)), scale)


@triton.jit
def _store_indexer_mxfp4(x, values, scales, SGLANG: tl.constexpr, AMAX_FLOOR: tl.constexpr):
    WINDOWS: tl.constexpr = x.shape[0]
    PAIRS: tl.constexpr = x.shape[1] // 2
    if SGLANG:
        y = _hadamard(x)
    else:
        y = _bf16_rounded(x)
    biased = _biased_exponent(tl.maximum(_block_max(y, MXFP4_BLOCK), AMAX_FLOOR), 0x3FFFFF, 2, 0)
    code = _e2m1(y * _per_column(_inverse_power(biased), MXFP4_BLOCK))
    low, high = tl.split(tl.reshape(code, (WINDOWS, PAIRS, 2)))
    tl.store(values + tl.arange(0, PAIRS)[None, :], (low | (high << 4)).to(tl.uint8))
    tl.store(scales + tl.arange(0, 2 * PAIRS // MXFP4_BLOCK)[None, :], biased.to(tl.uint8))


@triton.jit
def entry_operands(
    windows,
    stride,
    window,
    norm_weight,
    cos_sin,
    pages,
    page_stride,
    page_entries,
    DIM: tl.constexpr,
    ROPE: tl.constexpr,
    VALUE_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
):
    """What `finish` needs but the pooled rows, for windows `[X]`: weight, cos and sin, places of values and scales."""
    PAIRS: tl.constexpr = DIM // 2
    position = tl.load(windows + POSITION * stride + window).to(tl.int64)
    slot = tl.load(windows + SLOT * stride + window)
    weight = tl.load(norm_weight + tl.arange(0, DIM)[None, :])
    pair = tl.arange(0, PAIRS)[None, :] - (PAIRS - ROPE // 2)
    turns = tl.broadcast_to(pair >= 0, (window.shape[0], PAIRS))
    at = cos_sin + position[:, None] * ROPE + pair
    cos = tl.load(at, mask=turns, other=1.0)
    sin = tl.load(at + ROPE // 2, mask=turns, other=0.0)
    page = slot // page_entries
    entry = slot - page * page_entries
    page_at = pages + page.to(tl.int64) * page_stride
    values = (page_at + entry * VALUE_BYTES)[:, None]
    scales = (page_at + page_entries * VALUE_BYTES + entry * SCALE_BYTES)[:, None]
    return weight, cos, sin, values, scales


@triton.jit
def finish(
    c,
    operands,
    rms_eps,
    inverse_scale,
    FORMAT: tl.constexpr,
    SGLANG: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    LOWEST: tl.constexpr,
    ROPE: tl.constexpr,
):
    """Pooled rows c fp32 `[windows, head_dim]` → entries at their places."""
    DIM: tl.constexpr = c.shape[1]
    column = tl.arange(0, DIM)[None, :]
    weight, cos, sin, values, scales = operands
    mean = _sum_of_squares(c) * (1.0 / DIM)
    factor = tl.div_rn(1.0, tl.sqrt_rn(mean + rms_eps))
    x = _rotated((c * factor[:, None]) * weight, cos, sin, ROPE)
    if FORMAT == "fp8_ds_mla":
        _store_packed(x, values, scales, DIM - ROPE, AMAX_FLOOR, LOWEST)
    elif FORMAT == "indexer_fp8":
        _store_indexer_fp8(x, values, scales, SGLANG, AMAX_FLOOR, LOWEST)
    elif FORMAT == "indexer_mxfp4":
        _store_indexer_mxfp4(x, values, scales, SGLANG, AMAX_FLOOR)
    elif FORMAT == "fp8":
        tl.store(values + column, _e4m3(_bf16_rounded(x) * inverse_scale))
    elif FORMAT == "bf16":
        tl.store(values.to(tl.pointer_type(tl.uint16)) + column, _bf16_bits(x).to(tl.uint16))
    else:
        tl.static_assert(FORMAT == "fp32")
        tl.store(values.to(tl.pointer_type(tl.float32)) + column, x)
