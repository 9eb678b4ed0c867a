"""Bytes from strangers: whatever is sent, the parser says what the contract says and nothing else, and soon.

10^5 inputs here, 10^6 in `make test-long`. Inputs are true messages, damaged: flipped, cut, spliced, lengths and
offsets replaced by the values that break parsers. Seeded, so a failure can be run again.
"""

from __future__ import annotations

import random
import struct
import time
from typing import Any

import numpy as np
import pytest

from kvfold_client import wire
from kvfold_client.wire import FRAME, MSGPACK, STATUS, WireError
from kvfold_service.calls import parse_export, parse_handles, parse_import, parse_lease, parse_truncate
from kvfold_service.compat import compat_hash
from kvfold_service.errors import ServiceError
from kvfold_service.manifest import load
from kvfold_service.step import StepRules, parse_step
from kvfold_service.weights import seeded

NASTY = [
    0,
    1,
    -1,
    63,
    64,
    127,
    128,
    255,
    256,
    2**15,
    2**16 - 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
]
VALUES = [
    *NASTY,
    -(2**63),
    None,
    True,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "x" * 200,
    "bf16",
    b"",
    b"\0" * 64,
    [],
    {},
    [[]],
    {"dtype": 1},
]


@pytest.fixture(scope="module")
def rules() -> StepRules:
    manifest = load("tiny")
    widths = {part.name: part.geometry(8).row_width for part in manifest.compressors}
    parts = {part.name: part for part in manifest.compressors}
    return StepRules(compat_hash(manifest, seeded(manifest, 0)), parts, widths, 8192, 1024, 8)


def bodies(rules: StepRules) -> list[dict[str, Any]]:
    """True messages of every call with a body."""
    rows = np.ones((3, 512), np.float32)
    step = {
        "version": 1,
        "step_id": "s",
        "requests": [{"id": "r", "start": 0, "num_tokens": 2}, {"id": "q", "start": 5, "num_tokens": 1}],
        "query_start_loc": [0, 2, 3],
        "positions": wire.tensor_map("int32", [3], np.array([0, 1, 5], np.int32).data),
        "tensors": [wire.tensor_map("fp32", [3, 512], rows.data, compressor="layers.1.indexer")],
        "draft_tokens": [1, 0],
        "pages": "all",
        "compat": rules.compat,
    }
    part = {
        "committed": 9,
        "entries": wire.tensor_map("uint8", [2, 132], bytes(264)),
        "open_rows": wire.tensor_map("fp32", [5, 512], np.ones((5, 512), np.float32).data),
        "open_positions": [4, 5, 6, 7, 8],
    }
    return [
        step,
        {"version": 1, "id": "r", "compat": rules.compat, "compressors": {"layers.1.indexer": part}},
        {"version": 1, "handles": ["h" * 52]},
        {"version": 1, "length": 5},
        {"version": 1, "seconds": 5},
        {"version": 1, "compressors": ["layers.1.indexer"], "entries": True, "from_entry": 0},
    ]


def parse_all(body: dict[str, Any], rules: StepRules) -> None:
    """Every call's parser on one body; the only exception that may come out is the contract's."""
    entry_bytes = {"layers.0.hca": 584, "layers.1.csa": 584, "layers.1.indexer": 132}
    parsers = (
        lambda: parse_step(body, rules),
        lambda: parse_import(body, rules, entry_bytes),
        lambda: parse_handles(body),
        lambda: parse_truncate(body),
        lambda: parse_lease(body),
        lambda: parse_export(body),
    )
    for parse in parsers:
        try:
            parse()
        except ServiceError as error:
            assert error.code in STATUS


def damaged_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) or 1)
        if at >= len(changed):
            break
        match rng.randrange(6):
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at] = rng.choice((0x00, 0x7F, 0xC1, 0xC9, 0xD4, 0xDD, 0xDF, 0xFF))
            case 2:
                del changed[at : at + rng.randint(1, 16)]
            case 3:
                changed[at:at] = rng.randbytes(rng.randint(1, 16))
            case 4:
                changed[at : at + 4] = struct.pack(">I", rng.choice(NASTY) & 0xFFFFFFFF)
            case 5:
                changed = changed[: max(1, at)]
    return bytes(changed)


def damaged_tree(rng: random.Random, node: Any) -> Any:
    """A copy with one value, somewhere, replaced, dropped or renamed."""
    if isinstance(node, dict) and node and rng.random() < 0.9:
        key = rng.choice(list(node))
        kind = rng.random()
        if kind < 0.1:
            return {name: value for name, value in node.items() if name != key}
        if kind < 0.15:
            return {name if name != key else "other": value for name, value in node.items()}
        return node | {key: damaged_tree(rng, node[key])}
    if isinstance(node, list) and node and rng.random() < 0.8:
        at = rng.randrange(len(node))
        return [*node[:at], damaged_tree(rng, node[at]), *node[at + 1 :]]
    return rng.choice(VALUES)


def fuzz(rules: StepRules, inputs: int, seed: int) -> float:
    """Runs that many damaged messages; the longest took so many seconds."""
    rng = random.Random(seed)
    trees = bodies(rules)
    encoded = [(media_type, wire.encode(media_type, tree)) for tree in trees for media_type in (MSGPACK, FRAME)]
    slowest = 0.0
    for i in range(inputs):
        media_type, data = rng.choice(encoded)
        data = damaged_bytes(rng, data) if i % 2 else reencoded(rng, media_type, rng.choice(trees), data)
        began = time.perf_counter()
        try:
            parse_all(wire.decode(media_type, data), rules)
        except WireError as error:
            assert error.code in STATUS
        slowest = max(slowest, time.perf_counter() - began)
    return slowest


def reencoded(rng: random.Random, media_type: str, tree: Any, otherwise: bytes) -> bytes:
    """A damaged tree as bytes, if our own encoder has words for it."""
    try:
        return wire.encode(media_type, damaged_tree(rng, tree))
    except (TypeError, OverflowError, WireError):
        return otherwise


def test_true_messages_are_not_refused(rules: StepRules) -> None:
    step, imported, handles, length, seconds, exported = bodies(rules)
    for media_type in (MSGPACK, FRAME):
        decoded = [wire.decode(media_type, wire.encode(media_type, tree)) for tree in bodies(rules)]
        assert parse_step(decoded[0], rules).num_tokens == 3
        assert parse_import(decoded[1], rules, {"layers.1.indexer": 132}).request_id == "r"
        assert parse_handles(decoded[2]) == handles["handles"]
        assert (parse_truncate(decoded[3]), parse_lease(decoded[4])) == (length["length"], seconds["seconds"])
        assert parse_export(decoded[5]).entries is exported["entries"]
    assert step["version"] == imported["version"] == 1


def test_fuzz(rules: StepRules) -> None:
    assert fuzz(rules, 100_000, seed=1) < 1.0


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fuzz_at_length(rules: StepRules) -> None:
    assert fuzz(rules, 1_000_000, seed=2) < 1.0
