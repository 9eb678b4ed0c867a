"""The documents name what the code has, and their examples' bytes are what the code reads and writes."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from kvfold_client import wire
from kvfold_client.entries import decode_page
from kvfold_kernels import backends
from kvfold_kernels import plan as p
from kvfold_kernels.entry import encode
from kvfold_kernels.geometry import KINDS, Geometry, entry_format
from kvfold_kernels.pages import write_entries
from kvfold_service import manifest as manifests
from kvfold_service import weights as weight_files
from kvfold_service.auth import ROLES
from kvfold_service.openapi import CALLS
from kvfold_service.quotas import NAMES as QUOTAS
from kvfold_service.settings import Settings
from kvfold_service.step import parse_step
from kvfold_service.worker import Worker
from tests.cases import make_compressor

DOCS = Path(__file__).parents[1] / "docs"
CONTRACT, COMPRESSOR = ((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("contract", "compressor"))
TINY = manifests.load("tiny")


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next of any level outside of code."""
    body = text.split(f"\n{heading}\n", 1)[1]
    return re.split(r"\n#{2,} ", body, maxsplit=1)[0]


def code(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def cells(text: str) -> list[list[str]]:
    """Rows of the tables in a text, heads included."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]


def hexdump(text: str) -> bytes:
    """`hexdump -C`, with or without its right column; * repeats the line before."""
    data, repeat = bytearray(), False
    for line in text.splitlines():
        if line == "*":
            repeat = True
            continue
        offset, _, rest = line.partition("  ")
        while repeat and len(data) < int(offset, 16):
            data += data[-16:]
        repeat = False
        assert len(data) == int(offset, 16), line
        data += bytes.fromhex(rest.partition("|")[0])
    return bytes(data)


def tiny_worker() -> Worker:
    weights = weight_files.seeded(TINY, 1)
    return Worker(TINY, weights, backends.load("reference"), max_requests=2, pages=2, handle_key=b"k" * 32)


@pytest.mark.parametrize("name", wire.STATUS)
def test_every_code_stands_under_its_status(name):
    rows = [row for row in cells(section(CONTRACT, "## Errors")) if row[1] == f"`{name}`"]
    assert [row[0] for row in rows] == [str(wire.STATUS[name])]


def test_retryable_codes_are_named():
    sentence = section(CONTRACT, "## Errors").split("\nRetryable", 1)[1].split(". ", 1)[0]
    assert set(re.findall(r"`([a-z_]+)`", sentence)) - {"step_id"} == wire.RETRYABLE


@pytest.mark.parametrize(("method", "path"), CALLS)
def test_every_call_is_named(method, path):
    assert f"`{method} {path}`" in CONTRACT


def test_every_option_is_named_with_its_default():
    rows = {row[0]: row[1].replace("`", "") for row in cells(section(CONTRACT, "### kvfold serve"))}
    words = {1 << 30: "1 GiB", 20.0: "20", 30.0: "30", 60.0: "60", False: "off"}
    computed = {"staging_bytes": "2 · max body", "worker_id": "HOST:PORT"}
    for name, option in Settings.model_fields.items():
        default = "needed" if option.is_required() else words.get(option.default, str(option.default).lower())
        assert rows.pop(f"`--{name.replace('_', '-')}`") == computed.get(name, default)
    assert list(rows) == ["option"]


def test_names_of_the_manifest():
    text = section(CONTRACT, "## Manifest")
    parts = (manifests.Manifest, manifests.CompressorPart)
    for name in {name for part in parts for name in part.model_fields} - {"rope"}:
        assert f"`{name}`" in text
    for name in manifests.PRESETS:
        assert f"`{name}`" in CONTRACT
    example = manifests.parse(json.loads(code(text, "json")[0]), "example")
    assert example.rope == TINY.rope
    assert example.compressors == tuple(
        part.model_copy(update={"page_entries": part.layout().entries}) for part in TINY.compressors
    )
    told = {row[0].strip("`") for row in cells(section(CONTRACT, "### Token file"))} - {"role", "quota"}
    assert told == {*ROLES, *QUOTAS}


def test_lines_and_links():
    for text in (CONTRACT, COMPRESSOR):
        assert max(map(len, text.splitlines())) <= 120
    slugs = {}
    for name, text in (("", CONTRACT), ("contract.md", CONTRACT), ("compressor.md", COMPRESSOR)):
        heads = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        slugs[name] = {re.sub(r"[^a-z0-9_ -]", "", head.lower()).replace(" ", "-") for head in heads}
    for own, text in (("contract.md", CONTRACT), ("compressor.md", COMPRESSOR)):
        for file, anchor in re.findall(r"\]\(([a-z]*(?:\.md)?)#([^)]*)\)", text):
            assert anchor in slugs[file or own]


def test_the_frame_is_a_step():
    frame = hexdump(code(section(CONTRACT, "### A frame, byte by byte"), "text")[0])
    message = wire.decode(wire.FRAME, frame)
    assert wire.encode(wire.FRAME, message) == frame
    step = parse_step(message, tiny_worker().rules)
    assert [(r.id, r.start, r.num_tokens) for r in step.requests] == [("r1", 0, 1)]
    rows = np.frombuffer(step.tensors["layers.1.indexer"].data, "<u2")
    assert rows.tolist() == [0x3F80] + [0] * 511


def test_the_step_gives_the_reply():
    sent, expected = code(section(CONTRACT, "### Example"), "python")
    worker = tiny_worker()
    message = eval(sent, {"__builtins__": {}, "list": list, "range": range, "bytes": bytes})
    body = wire.encode(wire.MSGPACK, message)
    reply = worker.step(parse_step(wire.decode(wire.MSGPACK, body), worker.rules))
    expected = ast.literal_eval(expected)
    assert reply["compat"] == expected["compat"]
    assert reply["timings_us"].keys() | {"recv", "queue"} == expected["timings_us"].keys()
    for body in (reply, expected):
        (state,) = body["requests"][0]["compressors"].values()
        assert [len(handle) for handle in state.pop("pages")] == [52]
        assert len(body.pop("epoch")) == 16
        del body["timings_us"]
    assert reply == expected


def test_the_packed_page():
    text = section(COMPRESSOR, "## A packed page, byte by byte")
    page = hexdump(code(text, "text")[0])
    rows = torch.zeros(2, 512)
    rows[1, 0:64] = 1.0
    rows[1, 1] = -0.5
    rows[1, 64:128] = 2.0
    rows[1, 64], rows[1, 192], rows[1, 256], rows[1, 320], rows[1, 321] = 3.52, 1e-5, 448.0, 450.0, 3.0
    rows[1, 384:448] = -1 / 3
    rows[1, 448], rows[1, 449] = 1.0, -2.0
    compressor = make_compressor("hca", "fp8_ds_mla", page_entries=2)
    expected = torch.zeros(1, compressor.layout.page_bytes, dtype=torch.uint8)
    write_entries(expected, torch.arange(2), compressor.layout, *encode(rows, compressor))
    assert page == expected.numpy().tobytes()
    read = decode_page(np.frombuffer(page, np.uint8), "fp8_ds_mla", 2, 2)
    assert read[1, [0, 1, 64, 65, 256, 320, 321, 384, 448, 449]].tolist() == [
        *(1.0, -0.5, 3.5, 2.0, 448.0, 448.0, 3.0, -352 / 1024, 1.0, -2.0)
    ]
    blocks = [row for row in cells(text) if re.fullmatch(r"\d+ … \d+", row[0])][:7]
    scales = page[compressor.layout.scale_slice(1)]
    assert [int(row[4], 16) for row in blocks] == list(scales[:7])
    assert [int(row[3].replace("−", "-")) + 127 for row in blocks] == list(scales[:7])


def test_the_mxfp4_bytes():
    row = torch.zeros(1, 128)
    row[0, :4] = torch.tensor([1.0, -3.0, 6.0, 2.5])
    values, scales = encode(row, make_compressor("indexer", "indexer_mxfp4"))
    assert values[0, :2].numpy().tobytes() == bytes.fromhex(re.search(r"`(d2 [0-9a-f]{2})`", COMPRESSOR)[1])
    assert scales[0].tolist() == [0x7F, 1, 1, 1]


def test_sizes_of_the_formats():
    rows = {row[0].strip("`"): row for row in cells(section(COMPRESSOR, "## Byte layouts"))[1:]}
    for name, row in rows.items():
        kind = "indexer" if name.startswith("indexer") else "csa"
        form = entry_format(name, Geometry(kind, KINDS[kind].ratio, KINDS[kind].head_dim))
        said = [int(cell.split("=")[-1]) for cell in row[1:4]]
        assert said == [form.value_bytes, form.scale_bytes, form.entry_bytes]
    assert len(rows) == 6


def test_the_running_index():
    table = [row for row in cells(section(COMPRESSOR, "### The running index")) if " token" in row[0]]
    geometry, state = Geometry("csa", 4, 512), p.empty_state(1)
    pages = np.zeros((1, 8), np.int32)
    for row in table:
        length, drafts = (
            int(found[1]) if (found := re.search(rf"(\d+) {word}", row[0])) else 0 for word in ("token", "draft")
        )
        loc, given = np.array([0, length]), np.array([drafts]) if drafts else None
        p.make_plan(geometry, state, np.zeros(1, np.int64), loc, pages, 64, given).commit(state)
        assert state[:, 0].tolist() == [int(number) for number in row[3].split(",")]
    assert len(table) == 4


def test_the_boundary_rule():
    rows = cells(section(COMPRESSOR, "### Boundary rule"))[1:]
    for starts, loc, answer in (map(ast.literal_eval, row) for row in rows):
        assert p.has_boundary(starts, loc) is answer
    assert len(rows) == 6
