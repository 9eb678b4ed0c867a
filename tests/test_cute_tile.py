"""The `cute` kernels' tile of a long window in shared memory, with its copies carried out one byte at a time.

`tile` needs the compiler; its arithmetic does not. So it is imported over stand-ins, and its numbers are Python's.
"""

from __future__ import annotations

import importlib
import itertools
import sys
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import pytest

from kvfold_kernels.compress import cute
from kvfold_kernels.compress.cute.variants import DTYPE_PAIRS
from kvfold_kernels.geometry import INPUT_ITEM_BYTES, KINDS, Geometry

KIND = KINDS["hca"]
GEOMETRY = Geometry("hca", KIND.ratio, KIND.head_dim)
ROWS, HALF, TILE = GEOMETRY.window_rows, GEOMETRY.half_width, 64
BASE, TILE_IDX = 1 << 20, 3
RINGS, INPUTS = 1 << 40, 1 << 41
STAND_INS = ("cuda", "cuda.bindings", "cuda.bindings.driver", "cutlass", "cutlass._mlir", "cutlass._mlir.dialects")
STAND_INS += ("cutlass.cute", "cutlass.cute.nvgpu")
DEVICE_CODE = tuple(f"kvfold_kernels.compress.cute.{name}" for name in ("tile", "step", "encode", "ops"))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in STAND_INS:
        monkeypatch.setitem(sys.modules, name, MagicMock())
    for name in DEVICE_CODE:
        monkeypatch.setitem(sys.modules, name, MagicMock(LANES=32))
    monkeypatch.delitem(sys.modules, DEVICE_CODE[0])
    monkeypatch.setattr(cute, "tile", None, raising=False)  # taken away again afterwards, like the modules
    module: Any = importlib.import_module(DEVICE_CODE[0])
    monkeypatch.setitem(sys.modules, DEVICE_CODE[0], module)
    module.Int32 = module.Int64 = int
    return module


class Piece(NamedTuple):
    target: int
    offset: int
    num_bytes: int


class Copies:
    """Shared memory as the copies leave it: which byte of which row and column of which source lies where."""

    def __init__(self, module: Any, given: str, ring: str) -> None:
        self.memory: dict[int, tuple[str, int, int, int]] = {}
        self.num_bytes = 0
        self.item = {"input": INPUT_ITEM_BYTES[given], "ring": INPUT_ITEM_BYTES[ring]}
        rows = SimpleNamespace(
            input_bytes=self.item["input"], ring_bytes=self.item["ring"], mixed=given != ring, width=GEOMETRY.row_width
        )
        self.tile = module.Tile(GEOMETRY, rows)
        self.box: tuple[str, int] = ("input", ROWS)
        module.ops = SimpleNamespace(
            asm=lambda text, results, operands: min(operands),
            select_int=lambda condition, a, b: a if condition else b,
            fetch_box=self.land,
            copy_row=self.copy,
            Piece=Piece,
            shared_words=lambda address, count: [address] * count,
            shared_mixed2=lambda wide, address, i, num_wide: [wide if i < num_wide else address] * 2,
            unpack_bf16=lambda address: [address] * 2,
            from_bits=lambda address: address,
        )

    def land(self, landing: tuple, tensor_map: Any, start: tuple[int, int], taken: int, *, once: bool) -> None:
        """A bulk copy of `box`: rows and columns of a source become adjacent bytes."""
        if not taken:
            return
        source, num_rows = self.box
        item = self.item[source]
        for row, column, byte in itertools.product(range(num_rows), range(TILE), range(item)):
            at = landing[0] + (row * TILE + column) * item + byte
            self.memory[at] = (source, start[1] + row, start[0] + column, byte)
        self.num_bytes += num_rows * TILE * item

    def copy(self, origin: Any, row: int, of_ring: Piece, given: Piece) -> None:
        """A lane's copy of a few adjacent bytes."""
        from_ring = row < origin.num_ring
        kept = origin.ring if row < origin.until_wrap else origin.wrapped
        piece = of_ring if from_ring else given
        source, start = ("ring", kept - RINGS) if from_ring else ("input", origin.given - INPUTS)
        item = self.item[source]
        for byte in range(piece.num_bytes):
            element, part = divmod(start + piece.offset + byte, item)
            self.memory[piece.target + byte] = (source, *divmod(element, GEOMETRY.row_width), part)
        self.num_bytes += piece.num_bytes

    def fetch_groups(self, window: Any) -> None:
        """As each warp does for a group of its own."""
        operands = SimpleNamespace(ring_rows=GEOMETRY.ring_rows, rings=RINGS, inputs=INPUTS)
        for group, lane in itertools.product(range(8), range(32)):
            origin = self.tile.origin(operands, window, TILE_IDX, group, lane)
            self.tile.fetch_group(BASE, origin, group, lane)

    def fetch(self, window: Any) -> None:
        """As a producing warp does: by lane, run and size of box."""
        operands = SimpleNamespace(ring_rows=GEOMETRY.ring_rows)
        for lane in range(32):
            run, bit = divmod(lane, 8)
            self.box = ("ring" if run < 2 else "input", 1 << bit)
            self.tile.fetch((BASE, None), None, self.tile.box(operands, window, lane), TILE_IDX)

    def fetch_whole(self, window: Any) -> None:
        self.box = ("input", ROWS)
        for lane in range(32):
            self.tile.fetch_window((BASE, None), None, window, TILE_IDX, lane)


def check_reads(copies: Copies, window: Any) -> None:
    """Every lane of every group finds its two columns of every row, scores and values."""
    for group, lane in itertools.product(range(8), (0, 1, 31)):
        parts = copies.tile.read(BASE, group, lane, window.num_ring)
        for part, i in itertools.product(range(2), range(ROWS // 8)):
            row, address = group * (ROWS // 8) + i, parts[part][i][0]
            from_ring = row < window.num_ring
            source = "ring" if from_ring else "input"
            held = (window.ring_first + row) % GEOMETRY.ring_rows + window.ring_slot * GEOMETRY.ring_rows
            wanted = held if from_ring else window.end - (ROWS - 1) + row
            column, item = TILE_IDX * TILE + (1 - part) * HALF + 2 * lane, copies.item[source]
            assert address % (2 * item) == 0
            found = [copies.memory[address + offset] for offset in range(2 * item)]
            assert found == [(source, wanted, column + offset // item, offset % item) for offset in range(2 * item)]


@pytest.mark.parametrize(("given", "ring"), DTYPE_PAIRS)
@pytest.mark.parametrize("num_ring", [0, 1, 16, 100, 127])
@pytest.mark.parametrize("way", ["fetch", "fetch_groups"])
def test_a_tile_holds_every_row_once_where_it_is_read(module, way, given, ring, num_ring):
    rng = np.random.default_rng(num_ring)
    for first in (0, GEOMETRY.ring_rows - 50):
        copies = Copies(module, given, ring)
        window = module.Source(int(rng.integers(ROWS, 9999)), num_ring, int(rng.integers(5)), first)
        getattr(copies, way)(window)
        assert copies.num_bytes == len(copies.memory) == copies.tile.landing_bytes(num_ring)
        assert min(copies.memory) >= BASE
        assert max(copies.memory) < BASE + copies.tile.num_bytes
        check_reads(copies, window)


@pytest.mark.parametrize(("given", "ring"), DTYPE_PAIRS)
def test_a_window_of_the_input_comes_in_two_copies(module, given, ring):
    copies, window = Copies(module, given, ring), module.Source(1000, 0, 0, 0)
    copies.fetch_whole(window)
    assert copies.num_bytes == len(copies.memory) == copies.tile.landing_bytes(0)
    check_reads(copies, window)
