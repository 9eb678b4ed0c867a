"""What every kernel of this backend shares: its operands, pooling and norm in the canonical order, and the append.

The order is `reference`'s. exp(x) is ex2.approx(x · log2 e), O / L is div.approx, 1 / √ is rsqrt.approx: the same
sequence in every kernel here, so a request that is served by several of them keeps its bits.
"""

from __future__ import annotations

from dataclasses import dataclass

from cutlass import Float32, Int32, Int64

from kvfold_kernels import plan as p
from kvfold_kernels.compress.cute import ops
from kvfold_kernels.compress.cute.encode import Floors, Place

LANES = 32
VECTOR_BYTES = 16


@dataclass(frozen=True)
class Rows:
    """Compile-time: element sizes of the input and of the rings, columns of a row."""

    input_bytes: int
    ring_bytes: int
    width: int

    @property
    def input_vectors(self) -> int:
        """16-byte vectors of an input row."""
        return self.width * self.input_bytes // VECTOR_BYTES

    @property
    def ring_vectors(self) -> int:
        """16-byte vectors of a ring row: a lane writes whole ones, also where its bf16 columns widen."""
        return self.width * self.ring_bytes // VECTOR_BYTES

    @property
    def mixed(self) -> bool:
        return self.input_bytes != self.ring_bytes


@dataclass
class Operands:
    """Run-time: base addresses and numbers, the same for a launch's every block."""

    windows: Int64
    window_stride: Int32
    appends: Int64
    append_stride: Int32
    counts: Int64
    max_windows: Int32
    max_appends: Int32
    inputs: Int64
    rings: Int64
    ring_rows: Int32
    pages: Int64
    page_stride: Int64
    page_entries: Int32
    ape: Int64
    norm_weight: Int64
    cos_sin: Int64
    eps: Float32
    floors: Floors

    @classmethod
    def of(cls, tensors, numbers) -> Operands:
        """tensors: windows, appends, counts, kv_score, rings, pages, ape, norm_weight, cos_sin."""
        max_windows, max_appends, page_entries, eps, amax_floor, exponent_floor, inverse_scale = numbers
        address = [tensor.iterator.toint() for tensor in tensors]
        return cls(
            windows=address[0],
            window_stride=Int32(tensors[0].shape[1]),
            appends=address[1],
            append_stride=Int32(tensors[1].shape[1]),
            counts=address[2],
            max_windows=max_windows,
            max_appends=max_appends,
            inputs=address[3],
            rings=address[4],
            ring_rows=Int32(tensors[4].shape[1]),
            pages=address[5],
            page_stride=Int64(tensors[5].stride[0]),
            page_entries=page_entries,
            ape=address[6],
            norm_weight=address[7],
            cos_sin=address[8],
            eps=eps,
            floors=Floors(amax_floor, exponent_floor, inverse_scale),
        )

    def limits(self) -> tuple:
        """How many windows and appends the plan has."""
        both = ((self.counts, self.max_windows), (self.counts + 4, self.max_appends))
        return tuple(ops.asm("min.s32 $0, $1, $2;", [Int32], [ops.load_int(at), most]) for at, most in both)

    def existing(self, window):
        """A window index that lies in the plan's array."""
        return ops.asm("min.s32 $0, $1, $2;", [Int32], [window, self.max_windows - 1])

    def closes(self, window):
        """Whether the plan has this window: below the device's count and the host's bound."""
        return Int32(window < ops.load_int(self.counts)) & Int32(window < self.max_windows)

    def keeps(self, append):
        return Int32(append < ops.load_int(self.counts + 4)) & Int32(append < self.max_appends)

    def field(self, name: int, window):
        return ops.load_int(self.windows + 4 * Int64(name * self.window_stride + window))

    def place(self, slot, value_bytes: int, scale_bytes: int) -> Place:
        page = slot // self.page_entries
        entry = slot - page * self.page_entries
        start = self.pages + Int64(page) * self.page_stride
        scales = Int64(self.page_entries) * value_bytes + Int64(entry) * scale_bytes
        return Place(start + Int64(entry) * value_bytes, start + scales)


def ring_row(first, offset, ring_rows):
    """Ring index of the row `offset` behind `first`; offset < ring_rows."""
    index = first + offset
    return index - ring_rows * Int32(index >= ring_rows)


def exponential(score, maximum):
    return ops.exp2(ops.mul(ops.sub(score, maximum), ops.LOG2_E))


def pool_rows(scores: list, values: list) -> tuple:
    """m, l, o of one column's consecutive rows. A maximum of −∞ becomes −max, which no weight survives either."""
    maximum = scores[0]
    for score in scores[1:]:
        maximum = ops.fmax(maximum, score)
    reference = ops.fmax(maximum, -ops.MAX_FP32)
    total, output = Float32(0.0), Float32(0.0)
    for score, value in zip(scores, values, strict=True):
        weight = exponential(score, reference)
        total = ops.add(total, weight)
        output = ops.fma(weight, value, output)
    return maximum, total, ops.clamp(output)


def merge_groups(maxima: list, totals: list, outputs: list):
    """c of one column from its groups, ascending."""
    maximum = maxima[0]
    for m in maxima[1:]:
        maximum = ops.fmax(maximum, m)
    reference = ops.fmax(maximum, -ops.MAX_FP32)
    total, output = Float32(0.0), Float32(0.0)
    for m, group_total, group_output in zip(maxima, totals, outputs, strict=True):
        weight = exponential(m, reference)
        total = ops.fma(group_total, weight, total)
        output = ops.fma(group_output, weight, output)
    return divide(output, total)


def divide(output, total):
    """O / L; 0 for a column without weight."""
    positive = ops.asm("{.reg .pred p; setp.gt.f32 p, $1, 0f00000000; selp.b32 $0, 1, 0, p;}", [Int32], [total])
    return ops.clamp(ops.select(positive, ops.quotient(output, total), 0.0))


def leaf_squares(c: list):
    """Sum of squares of a lane's columns: leaves of 4 in order, then adjacent leaves."""
    leaves = []
    for start in range(0, len(c), 4):
        q = ops.mul(c[start], c[start])
        for value in c[start + 1 : start + 4]:
            q = ops.fma(value, value, q)
        leaves.append(q)
    return tree(leaves)


def tree(values: list):
    while len(values) > 1:
        values = [ops.add(values[i], values[i + 1]) for i in range(0, len(values), 2)]
    return values[0]


def lane_sum(q, lanes: int = LANES):
    """Tree over adjacent lanes."""
    distance = 1
    while distance < lanes:
        q = ops.add(q, ops.shuffle(q, distance))
        distance *= 2
    return q


def normalise(c: list, squares, weight: list, head_dim: int, eps) -> list:
    scale = ops.rsqrt(ops.add(ops.mul(squares, 1.0 / head_dim), eps))
    return [ops.mul(ops.mul(value, scale), w) for value, w in zip(c, weight, strict=True)]


def window_fields(operands: Operands, window) -> dict:
    names = (p.INPUT_END, p.NUM_PAD, p.NUM_RING, p.RING_SLOT, p.RING_FIRST, p.POSITION, p.SLOT)
    return {name: operands.field(name, window) for name in names}


def append_blocks(rows: Rows, max_appends, num_threads: int):
    """Blocks that copy `max_appends` rows, one 16-byte vector of the ring a thread."""
    return (max_appends * rows.ring_vectors + num_threads - 1) // num_threads


def append_vectors(rows: Rows, operands: Operands, vectors: list) -> None:
    """Copy vectors of rows that stay, from the input to their rings. Vectors are counted over all rows to keep."""
    moves = [_append_move(rows, operands, vector) for vector in vectors]
    ops.wait_for_earlier_grids()
    ops.let_next_grid_start()
    num_words = VECTOR_BYTES * rows.input_bytes // rows.ring_bytes // 4
    loaded = [ops.load_words_if(source, num_words, live) for source, _, live in moves]
    for words, (_, target, live) in zip(loaded, moves, strict=True):
        if rows.mixed:
            words = [ops.bits(value) for word in words for value in ops.unpack_bf16(word)]
        ops.store_words(target, words, live)


def _append_move(rows: Rows, operands: Operands, vector) -> tuple:
    """Source and target address of a vector, and whether the plan has it."""
    append = vector // rows.ring_vectors
    piece = vector - append * rows.ring_vectors
    live = operands.keeps(append)
    column = operands.appends + 4 * Int64(append * live)
    source_row = ops.load_int(column + 4 * p.APPEND_INPUT * Int64(operands.append_stride))
    target_row = ops.load_int(column + 4 * p.APPEND_RING * Int64(operands.append_stride))
    source = operands.inputs + Int64(source_row) * (rows.width * rows.input_bytes)
    target = operands.rings + Int64(target_row) * (rows.width * rows.ring_bytes) + Int64(piece * VECTOR_BYTES)
    return source + Int64(piece * (VECTOR_BYTES * rows.input_bytes // rows.ring_bytes)), target, live
