"""Decoded bodies of the smaller calls → validated arguments; `step` has its own module."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from kvfold_client import wire
from kvfold_service.arrivals import ImportCall, ImportPart
from kvfold_service.errors import ServiceError
from kvfold_service.step import (
    StepRules,
    compat_mismatch,
    expect_fields,
    expect_id,
    expect_int,
    expect_tensor,
    expect_version,
    input_tensor,
    integers,
    malformed,
    wire_tensor,
)
from kvfold_service.transfer import EntriesCall, ExportCall

_MAX_HANDLES: Final = 65536
MAX_LEASE_SECONDS: Final = 86400


def parse_handles(body: Mapping[str, Any]) -> list[str]:
    expect_fields(body, "the call", {"version", "handles"})
    handles = body["handles"]
    if not isinstance(handles, list) or len(handles) > _MAX_HANDLES or not set(map(type, handles)) <= {str}:
        raise malformed(f"handles must be a list of at most {_MAX_HANDLES} strings")
    expect_version(body)
    return handles


def parse_truncate(body: Mapping[str, Any]) -> int:
    expect_fields(body, "the call", {"version", "length"})
    length = expect_int(body["length"], "length", 0)
    expect_version(body)
    return length


def parse_lease(body: Mapping[str, Any]) -> float:
    expect_fields(body, "the call", {"version", "seconds"})
    seconds = body["seconds"]
    if type(seconds) not in (int, float) or not 0 < seconds <= MAX_LEASE_SECONDS or math.isnan(seconds):
        raise malformed(f"seconds must be a number above 0 and at most {MAX_LEASE_SECONDS}")
    expect_version(body)
    return seconds


def parse_export(body: Mapping[str, Any]) -> ExportCall:
    expect_fields(body, "the call", {"version"}, {"compressors", "entries", "from_entry"})
    names, entries = body.get("compressors"), body.get("entries", True)
    if names is not None and (
        not isinstance(names, list) or not set(map(type, names)) <= {str} or len(set(names)) != len(names)
    ):
        raise malformed("compressors must be a list of different names")
    if type(entries) is not bool:
        raise malformed("entries must be true or false")
    from_entry = expect_int(body.get("from_entry", 0), "from_entry", 0)
    expect_version(body)
    return ExportCall(None if names is None else tuple(names), entries, from_entry)


def parse_entries(body: Mapping[str, Any]) -> EntriesCall:
    expect_fields(body, "the call", {"version", "compressor", "from_entry", "to_entry"})
    if not isinstance(body["compressor"], str):
        raise malformed("compressor must be a string")
    first = expect_int(body["from_entry"], "from_entry", 0)
    end = expect_int(body["to_entry"], "to_entry", first)
    expect_version(body)
    return EntriesCall(body["compressor"], first, end)


def parse_import(body: Mapping[str, Any], rules: StepRules, entry_bytes: Mapping[str, int]) -> ImportCall:
    """In the order of a step's checks: malformed, version, compat, names, shapes and dtypes, positions."""
    expect_fields(body, "the call", {"version", "id", "compat", "compressors"})
    request_id = expect_id(body["id"], "id")
    if not isinstance(body["compat"], str):
        raise malformed("compat must be a string")
    parts = body["compressors"]
    if not isinstance(parts, dict) or not parts:
        raise malformed("compressors must be a map of at least one compressor")
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise malformed("a compressor must be a map of committed, open_rows, open_positions and entries")
        expect_fields(part, "a compressor", {"committed", "open_rows", "open_positions"}, {"entries", "first_entry"})
        expect_int(part.get("first_entry", 0), f"first_entry of {name[:128]}", 0)
        if "first_entry" in part and "entries" not in part:
            raise malformed("first_entry says with which entry entries begin, and there are none")
        expect_int(part["committed"], f"committed of {name[:128]}", 0)
        for field in {"open_rows", "entries"} & part.keys():
            expect_tensor(part[field], f"{field} of {name[:128]}")
    expect_version(body)
    if body["compat"] != rules.compat:
        raise compat_mismatch(rules.compat)
    for name in parts:
        if name not in rules.parts:
            shown = name[:128]
            raise ServiceError("unknown_compressor", f"this worker serves no compressor {shown}", compressor=shown)
    return ImportCall(
        request_id, body["compat"], {name: _import_part(name, part, rules, entry_bytes) for name, part in parts.items()}
    )


def _import_part(name: str, part: Mapping[str, Any], rules: StepRules, entry_bytes: Mapping[str, int]) -> ImportPart:
    committed = part["committed"]
    if committed > rules.max_position:
        raise ServiceError("bad_positions", f"{name} has {committed} tokens; this worker takes {rules.max_position}")
    geometry = rules.parts[name].geometry(rules.draft_slack)
    first = geometry.live_start(committed)
    rows = input_tensor(name, part["open_rows"], committed - first, rules)
    num_entries, entries = geometry.num_entries(committed), None
    if "entries" in part:
        entries = _entries(name, part, num_entries, entry_bytes[name])
    first_entry = num_entries - (entries.shape[0] if entries else 0)
    positions = integers(part["open_positions"], "open_positions", "bad_positions")
    if not np.array_equal(positions, np.arange(first, committed)):
        raise ServiceError("bad_positions", f"open_positions of {name} must be {first} to {committed - 1}")
    return ImportPart(committed, first_entry, entries, rows, positions)


def _entries(name: str, part: Mapping[str, Any], num_entries: int, entry_bytes: int) -> wire.Tensor:
    """The entries of a part, all from its first_entry on (0 if it names none)."""
    tensor = wire_tensor(part["entries"], f"the entries of {name}")
    expected = [max(0, num_entries - part.get("first_entry", 0)), entry_bytes]
    if tensor.dtype != "uint8":
        raise ServiceError("bad_dtype", f"the entries of {name} must be uint8, not {tensor.dtype}", compressor=name)
    if list(tensor.shape) != expected:
        raise ServiceError(
            "bad_shape",
            f"the entries of {name} must have shape {expected}, not {list(tensor.shape)}",
            compressor=name,
            expected=expected,
        )
    return tensor
