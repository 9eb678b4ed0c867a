"""A tile of a long window: 64 columns of all its rows, scores and values, in shared memory.

    fetch    bulk tensor copies, as few boxes as the sources of the rows allow; or each warp a group's rows
    read     a group's rows of a lane's columns
    merge    the groups' partial softmaxes

A landing is two shared addresses: where the tile goes, `[score | kv][rows][64]`, and the barrier that counts bytes.

With bf16 input and fp32 rings both lie in one part of rows·64·4 bytes: ring row i from byte i·256 on, input row i from
rows·128 + i·128 on. The rows of the ring are a window's first ones, k ≤ rows, so they end at k·256 ≤ rows·128 + k·128.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cutlass import Int32, Int64, cute
from cutlass.cute.nvgpu import cpasync

from kvfold_kernels import plan as p
from kvfold_kernels.compress.cute import ops
from kvfold_kernels.compress.cute.step import LANES, Operands, Rows, merge_groups
from kvfold_kernels.geometry import GROUPS, LEAF, Geometry

TILE = 64
"""Columns of a block: a quantiser block of the packed format."""
RUN_LANES = 8
"""Lanes that fetch a run of rows; a window has at most 2^8 − 1 rows, as a box has."""
KEPT_INPUT_BYTES, KEPT_RING_BYTES = 192 << 20, 48 << 20
"""A launch that reads more than this from input, or from rings, reads past the L2 (50 MiB). Measured: 256 MiB of input
gain 1%, 128 MiB lose 2%, what fits the L2 loses 25%; 64 MiB of rings gain 7%."""
PIECE_BYTES = 16
"""What a lane copies at once."""
COLUMNS = TILE // LANES
"""Columns of a lane while it pools."""


class Source(NamedTuple):
    """The plan's fields of where a window's rows come from."""

    end: object
    num_ring: object
    ring_slot: object
    ring_first: object


class Origin(NamedTuple):
    """Where a lane finds its pieces of a group: addresses that the first one would have in the ring, there behind the
    wrap, and in the input; from which row on it is none of the ring's, or lies behind the wrap."""

    ring: object
    wrapped: object
    given: object
    num_ring: object
    until_wrap: object


class Box(NamedTuple):
    """A lane's part of a window: its bytes' place in a part, row of the source, whether there is one."""

    place: object
    origin: object
    taken: object


@dataclass(frozen=True)
class Tile:
    """Compile-time: the window and the row."""

    geometry: Geometry
    rows: Rows

    @property
    def group_rows(self) -> int:
        return self.geometry.window_rows // GROUPS

    @property
    def input_row_bytes(self) -> int:
        return TILE * self.rows.input_bytes

    @property
    def ring_row_bytes(self) -> int:
        return TILE * self.rows.ring_bytes

    @property
    def part_bytes(self) -> int:
        """The score (or kv) part."""
        return self.geometry.window_rows * self.ring_row_bytes

    @property
    def input_start(self) -> int:
        """Where row 0 of the input would lie in a part."""
        return self.geometry.window_rows * (self.ring_row_bytes - self.input_row_bytes)

    @property
    def num_bytes(self) -> int:
        return 2 * self.part_bytes

    def landing_bytes(self, num_ring):
        """What a window of so many ring rows brings."""
        if not self.rows.mixed:
            return self.num_bytes
        more = num_ring * (2 * (self.ring_row_bytes - self.input_row_bytes))
        return more + 2 * self.geometry.window_rows * self.input_row_bytes

    @property
    def sizes(self) -> list[int]:
        """Rows of the boxes that a run of rows is taken apart into: the powers of two up to the window."""
        return [1 << bit for bit in range(self.geometry.window_rows.bit_length())]

    def copy_atoms(self, kv_score, rings) -> tuple:
        """Tensor maps of every box size, of the input and then of the rings seen as one list of rows."""
        width = self.geometry.row_width
        layout = cute.make_layout((rings.shape[0] * rings.shape[1], width), stride=(width, 1))
        flat = cute.make_tensor(rings.iterator, layout)
        operation = cpasync.CopyBulkTensorTileG2SOp()
        return tuple(
            cpasync.make_tiled_tma_atom(operation, tensor, cute.make_layout((n, TILE), stride=(TILE, 1)), (n, TILE))[0]
            for tensor in (kv_score, flat)
            for n in self.sizes
        )

    def window_map(self, atoms: tuple):
        """The tensor map of a whole window of the input."""
        return ops.descriptor(atoms[len(self.sizes) - 1])

    def lane_map(self, atoms: tuple, lane):
        """The tensor map of a lane: lane 8·run + bit fetches box `bit` of a run; runs 0 and 1 are from the ring."""
        run, bit = lane // RUN_LANES, lane % RUN_LANES
        maps = [ops.descriptor(atom) for atom in atoms]
        chosen = maps[0]
        for i, address in enumerate(maps):
            from_ring, size = divmod(i, len(self.sizes))
            wanted = Int32(bit == size) & (Int32(run < 2) if from_ring else Int32(run >= 2))
            chosen = ops.select64(wanted, address, chosen)
        return chosen

    def ape_rows(self, operands: Operands, group, column) -> list:
        """A group's ape rows of a lane's columns."""
        rows = [group * self.group_rows + i for i in range(self.group_rows)]
        width = self.geometry.half_width
        return [ops.load_fp32(operands.ape + 4 * Int64(row * width + column), COLUMNS) for row in rows]

    def source(self, operands: Operands, window) -> Source:
        """Where a window's rows come from."""
        window = operands.existing(window)
        names = (p.INPUT_END, p.NUM_RING, p.RING_SLOT, p.RING_FIRST)
        return Source(*(operands.field(name, window) for name in names))

    def box(self, operands: Operands, source: Source, lane) -> Box:
        """What a lane fetches of a window. Its rows are up to three runs: ring, ring after its wrap, input; a run of n
        rows is taken apart by n's binary digits, large boxes first."""
        run, bit = lane // RUN_LANES, lane % RUN_LANES
        until_wrap = operands.ring_rows - source.ring_first
        before = ops.asm("min.s32 $0, $1, $2;", [Int32], [source.num_ring, until_wrap])
        after = source.num_ring - before
        flat = source.ring_slot * operands.ring_rows
        given = source.end - (self.geometry.window_rows - 1) + source.num_ring
        first, second, third = Int32(run == 0), Int32(run == 1), Int32(run == 2)
        rows = first * before + second * after + third * (self.geometry.window_rows - source.num_ring)
        larger = rows - (rows & ((Int32(2) << bit) - 1))
        row = second * before + third * source.num_ring + larger
        place = row * self.ring_row_bytes
        if self.rows.mixed:
            place = ops.select_int(third, row * self.input_row_bytes + self.input_start, place)
        return Box(
            place=place,
            origin=first * (flat + source.ring_first) + second * flat + third * given + larger,
            taken=(rows >> bit) & 1,
        )

    def past_l2(self, operands: Operands, item_bytes: int, kept_bytes: int):
        """Whether the launch reads more than `kept_bytes`, so that little of it would be found in the L2 again."""
        most = kept_bytes // (self.geometry.window_rows * self.rows.width * item_bytes)
        return Int32(operands.max_windows > most)

    def fetch(self, landing: tuple, lane_map, box: Box, index, *, once: bool = False) -> None:
        """Scores and values of a lane's box."""
        target = landing[0] + box.place
        for part in range(2):
            column = index * TILE + (1 - part) * self.geometry.half_width
            at = (target + part * self.part_bytes, landing[1])
            ops.fetch_box(at, lane_map, (column, box.origin), box.taken, once=once)

    def fetch_window(self, landing: tuple, window_map, source: Source, index, lane, *, once: bool = False) -> None:
        """All rows from the input: lane 0 fetches the scores, lane 1 the values."""
        column = index * TILE + (1 - lane) * self.geometry.half_width
        at = (landing[0] + self.input_start + lane * self.part_bytes, landing[1])
        row = source.end - (self.geometry.window_rows - 1)
        ops.fetch_box(at, window_map, (column, row), Int32(lane < 2), once=once)

    @property
    def row_lanes(self) -> int:
        """Lanes that copy a row, 16 bytes each where it is as wide as the ring's."""
        return self.ring_row_bytes // PIECE_BYTES

    def origin(self, operands: Operands, source: Source, index, group, lane) -> Origin:
        """Where a lane finds its pieces of a group: of each row that no lane before it copies at the same time."""
        rows, width = self.rows, self.geometry.row_width
        row, piece = group * self.group_rows + lane // self.row_lanes, lane % self.row_lanes * PIECE_BYTES
        ring_row = source.ring_first + row
        flat = Int64(source.ring_slot * operands.ring_rows + ring_row) * width + Int64(index * TILE)
        given = Int64(source.end - (self.geometry.window_rows - 1) + row) * width + Int64(index * TILE)
        ring = operands.rings + flat * rows.ring_bytes + Int64(piece)
        return Origin(
            ring=ring,
            wrapped=ring - Int64(operands.ring_rows) * (width * rows.ring_bytes),
            given=operands.inputs + given * rows.input_bytes + Int64(piece * rows.input_bytes // rows.ring_bytes),
            num_ring=source.num_ring - row,
            until_wrap=operands.ring_rows - ring_row,
        )

    def fetch_group(self, landing, origin: Origin, group, lane) -> None:
        """Scores and values of a lane's pieces of a group."""
        rows, first_row = self.rows, group * self.group_rows
        given_bytes = PIECE_BYTES * rows.input_bytes // rows.ring_bytes
        ring = landing + first_row * self.ring_row_bytes + lane * PIECE_BYTES
        given = landing + self.input_start + first_row * self.input_row_bytes + lane * given_bytes
        for part in range(2):
            for i in range(0, self.group_rows, LANES // self.row_lanes):
                offset = i * self.geometry.row_width + (1 - part) * self.geometry.half_width
                place = part * self.part_bytes
                of_ring = ops.Piece(ring + place + i * self.ring_row_bytes, offset * rows.ring_bytes, PIECE_BYTES)
                of_input = ops.Piece(given + place + i * self.input_row_bytes, offset * rows.input_bytes, given_bytes)
                ops.copy_row(origin, i, of_ring, of_input)

    def read(self, start, group, lane, num_ring) -> tuple:
        """Scores and values of a group, a list of a lane's columns for each row."""
        read = self._mixed if self.rows.mixed else self._uniform
        return tuple(read(start + part * self.part_bytes, group * self.group_rows, lane, num_ring) for part in range(2))

    def _uniform(self, start, first_row, lane, _) -> list:
        at = start + first_row * self.input_row_bytes + lane * (COLUMNS * self.rows.input_bytes)
        return [self._fp32(at + i * self.input_row_bytes) for i in range(self.group_rows)]

    def _mixed(self, start, first_row, lane, num_ring) -> list:
        ring = start + first_row * self.ring_row_bytes + lane * (COLUMNS * self.rows.ring_bytes)
        given = start + self.input_start + first_row * self.input_row_bytes + lane * (COLUMNS * self.rows.input_bytes)
        rows = []
        for i in range(self.group_rows):
            addresses = ring + i * self.ring_row_bytes, given + i * self.input_row_bytes
            words = ops.shared_mixed2(*addresses, i, num_ring - first_row)
            rows.append([ops.from_bits(word) for word in words])
        return rows

    def _fp32(self, address) -> list:
        loaded = ops.shared_words(address, COLUMNS * self.rows.input_bytes // 4)
        loaded = loaded if isinstance(loaded, list) else [loaded]
        if self.rows.input_bytes == 4:
            return [ops.from_bits(word) for word in loaded]
        return [value for word in loaded for value in ops.unpack_bf16(word)]


def merge_tile(groups, local) -> list:
    """c of 4 columns of a tile, from shared `[3, groups, tile]`."""
    parts = [
        [ops.shared_fp32(groups + 4 * ((part * GROUPS + group) * TILE + local), LEAF) for group in range(GROUPS)]
        for part in range(3)
    ]
    return [merge_groups(*([row[i] for row in part] for part in parts)) for i in range(LEAF)]
