"""The kv-score rows of simulated tokens: counter-based random bits, so that a position's row is the same in any chunk.

    row(seed, request, compressor, position)   Philox of a key for the first three, at counter position · counters a row

Values lie in ±[0.5, 2): all of the exponent but its last bit is fixed, the rest is random. A guessed token has rows of
its own key: whatever is left of one after its withdrawal shows in the entries.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_COUNTER_BYTES = 32  # one Philox4x64 counter gives four words of 64 bits
_HALVES = {"hca": 1, "csa": 2, "indexer": 2}
_DEFAULT_DRAFT_SLACK = 8


@dataclass(frozen=True, slots=True)
class Shape:
    """What a step has to know of one compressor, from the manifest."""

    name: str
    kind: str
    ratio: int
    row_width: int
    """[kv | score], each halves·head_dim."""
    dtype: str
    """bf16, or fp32 where the manifest takes nothing else."""

    @property
    def row_bytes(self) -> int:
        return self.row_width * _item_bytes(self.dtype)

    def num_open(self, num_tokens: int) -> int:
        """Rows that later windows still need: since the last closed window, or the one before it where two overlap."""
        return num_tokens - max(0, self.ratio * (num_tokens // self.ratio - (_HALVES[self.kind] - 1)))


@dataclass(frozen=True, slots=True)
class Group:
    """Compressors that close their windows together and take the same time: a model has a few, each of many layers."""

    kind: str
    ratio: int
    names: tuple[str, ...]
    row_bytes: int
    """Of one row in all of them."""


def groups_of(shapes: Iterable[Shape]) -> tuple[Group, ...]:
    members: dict[tuple[str, int], list[Shape]] = {}
    for shape in shapes:
        members.setdefault((shape.kind, shape.ratio), []).append(shape)
    return tuple(
        Group(kind, ratio, tuple(shape.name for shape in own), sum(shape.row_bytes for shape in own))
        for (kind, ratio), own in members.items()
    )


def shapes_of(manifest: Mapping[str, Any]) -> tuple[Shape, ...]:
    """The compressors of a manifest, as `/v1/manifest` tells it."""
    return tuple(
        Shape(
            part["name"],
            part["kind"],
            part["ratio"],
            2 * _HALVES[part["kind"]] * part["head_dim"],
            "fp32" if part.get("input_dtype") == "fp32" else "bf16",
        )
        for part in manifest["compressors"]
    )


def draft_slack_of(manifest: Mapping[str, Any]) -> int:
    return manifest.get("draft_slack", _DEFAULT_DRAFT_SLACK)


class RowSource:
    """Rows of all requests of one seed."""

    def __init__(self, seed: int, shapes: Sequence[Shape]) -> None:
        self.seed = seed
        self.shapes = {shape.name: shape for shape in shapes}
        self.groups = groups_of(shapes)

    def rows(self, request: int, name: str, start: int, stop: int, *, guessed: bool = False) -> np.ndarray:
        """Rows of positions [start, stop) of a request: uint16 (bf16 bits) or float32 `[stop − start, row_width]`."""
        shape = self.shapes[name]
        key = _key(self.seed, request, name, "guess" if guessed else "token")
        counters = -(-shape.row_bytes // _COUNTER_BYTES)
        words = np.random.Philox(key=key, counter=start * counters).random_raw((stop - start) * counters * 4)
        rows = words.view("u1").reshape(stop - start, counters * _COUNTER_BYTES)[:, : shape.row_bytes]
        bits = np.ascontiguousarray(rows).view("<u2" if shape.dtype == "bf16" else "<u4")
        sign_and_mantissa, exponent = (0x80FF, 0x3F00) if shape.dtype == "bf16" else (0x80FFFFFF, 0x3F000000)
        bits &= sign_and_mantissa
        bits |= exponent
        return bits if shape.dtype == "bf16" else bits.view("<f4")

    def accepted(self, request: int, start: int, num_guesses: int, acceptance: float) -> int:
        """How many of the guesses at positions start … are right, up to the first wrong one; each has its own draw."""
        draws = (_key(self.seed, request, "accept", str(start + i)) / 2.0**128 for i in range(num_guesses))
        return next((i for i, draw in enumerate(draws) if draw >= acceptance), num_guesses)


def _key(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=16).digest(), "little")


def _item_bytes(dtype: str) -> int:
    return 2 if dtype == "bf16" else 4
