"""transfer: export, import and verify. A request that moves goes on bit for bit as one that never moved."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import xxhash

from kvfold_client import Client
from kvfold_service.caches import CompressorCache
from kvfold_service.calls import parse_import
from kvfold_service.worker import Worker
from tests.service_cases import (
    CSA,
    HCA,
    INDEXER,
    INDEXER_POOL,
    NAMES,
    PACKED_POOL,
    RATIO,
    REAL,
    REAL_NAMES,
    SMALL,
    Process,
    alone,
    assert_entries,
    bf16,
    committed,
    entries_of,
    export,
    feed,
    import_,
    open_positions,
    page_entries,
    parts_of,
    read,
    refused,
    rows_of,
    run,
    snapshot,
    stream,
    tensor,
    whole_workers,
)

Start = Callable[..., Worker]
start = pytest.fixture(whole_workers)

PAGES = {HCA: (1, 512), CSA: (5, 1520), INDEXER: (2, None), "real.hca": (1, 512), "real.csa": (3, 256)}


def elsewhere(manifest: dict[str, Any], draft_slack: int = 1, **changes: Any) -> dict[str, Any]:
    """The manifest of a worker of the same compat: other pages, other rings."""
    parts = [
        part | {"page_entries": PAGES[part["name"]][0], "page_bytes": PAGES[part["name"]][1]} | changes
        for part in manifest["compressors"]
    ]
    return manifest | {"draft_slack": draft_slack, "max_position": 384, "compressors": parts}


def pages(worker: Worker, name: str, id: str = "r") -> list[str]:
    return worker.request(id)["compressors"][name]["pages"]


@pytest.fixture(params=["host", "device"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`device`: pages are read and written as those of a GPU are, a few entries at a time."""
    monkeypatch.setattr(CompressorCache, "in_host_memory", request.param == "host")
    monkeypatch.setattr("kvfold_service.caches._ENTRIES_AT_A_TIME", 7)


# -- moving on -----------------------------------------------------------------------------------------------------


def assert_exported(worker: Worker, names: tuple[str, ...], num_tokens: int) -> dict[str, Any]:
    """Entries and open rows are those of the request's first tokens, however it came here; the export."""
    exported = export(worker, "r")
    assert exported.keys() == {"version", "compat", "compressors"}
    assert list(exported["compressors"]) == list(names)
    for name, part in exported["compressors"].items():
        positions = open_positions(name, num_tokens)
        assert part.keys() == {"committed", "entries", "open_rows", "open_positions"}
        assert (part["committed"], part["open_positions"]) == (num_tokens, list(positions))
        np.testing.assert_array_equal(rows_of(part["open_rows"]), stream(name, "r")[positions.start : positions.stop])
        num_entries = num_tokens // worker.rules.parts[name].ratio
        np.testing.assert_array_equal(rows_of(part["entries"]), alone(worker.backend, "r", name)[:num_entries])
    return exported


def move(start: Start, manifest: dict[str, Any], names: tuple[str, ...], before: list[int], after: list[int]) -> None:
    """From a worker to one of other pages and rings, where it lies in another slot, and back to a third."""
    giver = start(manifest=manifest)
    feed(giver, "r", before, names)
    exported, num_tokens = assert_exported(giver, names, sum(before)), sum(before)
    for made, lengths in ((elsewhere(manifest), after[:2]), (elsewhere(manifest, 12), after[2:])):
        taker = start(manifest=made, max_requests=3, pages=120)
        assert taker.compat == giver.compat
        feed(taker, "neighbour", [11], names)
        import_(taker, "r", exported)
        taker.check_integrity()
        for length in lengths:
            assert_exported(taker, names, num_tokens)
            feed(taker, "r", [length], names)
            num_tokens += length
        exported = assert_exported(taker, names, num_tokens)
        for name in names:
            assert_entries(taker, "r", name)
            assert_entries(taker, "neighbour", name)


@pytest.mark.parametrize("num_tokens", [*range(1, 19), 23, 24, 25])
def test_a_request_moves_at_any_phase_of_its_windows(start, num_tokens):
    ragged = [1, 4, 2] if num_tokens > 7 else []
    move(start, SMALL, NAMES, [*ragged, num_tokens - sum(ragged)], [1, 5, 3, 40])


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("num_tokens", [127, 128, 129, 130, 255, 256, 257])
def test_a_request_moves_around_a_window_of_128(start, num_tokens):
    move(start, REAL, REAL_NAMES, [100, num_tokens - 100], [1, 3, 1, 25])


@pytest.mark.usefixtures("memory")
def test_rings_that_have_turned(start):
    """Thirty tokens one by one, then to and fro between two workers at every token."""
    here, there = start(), start(manifest=elsewhere(SMALL, 0))
    feed(here, "r", [1] * 30)
    for num_tokens in range(30, 60):
        import_(there, "r", assert_exported(here, NAMES, num_tokens))
        here.release("r")
        feed(there, "r", [1])
        here, there = there, here


def test_a_copy_goes_its_own_way(start):
    """Export changes nothing but drafts: both go on, here under two ids of one worker."""
    worker = start()
    feed(worker, "r", [13])
    before = snapshot(worker)
    exported = export(worker, "r")
    assert snapshot(worker) == before
    import_(worker, "copy", exported)
    feed(worker, "r", [20])
    run(worker, [("copy", 13, 3)], wrong=3)
    for name in NAMES:
        assert not set(pages(worker, name)) & set(pages(worker, name, "copy"))
        assert_entries(worker, "r", name)
        whole = 13 // RATIO[name]
        np.testing.assert_array_equal(
            entries_of(worker, "copy", name)[:whole], alone(worker.backend, "r", name)[:whole]
        )
    assert not np.array_equal(entries_of(worker, "copy", CSA)[3], entries_of(worker, "r", CSA)[3])
    worker.release("copy")
    for name in NAMES:
        assert_entries(worker, "r", name)


def test_each_compressor_moves_from_where_it_stands(start):
    """One with tokens beyond a window, one within its first, one untouched."""
    giver, taker = start(), start(manifest=elsewhere(SMALL))
    feed(giver, "r", [21], [HCA])
    feed(giver, "r", [3], [INDEXER])
    exported = export(giver, "r")
    assert list(exported["compressors"]) == [HCA, INDEXER]
    told = import_(taker, "r", exported)
    assert {name: part["committed"] for name, part in told["compressors"].items()} == {HCA: 21, CSA: 0, INDEXER: 3}
    for name, length in ((HCA, 20), (CSA, 41), (INDEXER, 38)):
        feed(taker, "r", [length], [name])
        assert_entries(taker, "r", name)


def test_a_compressor_without_tokens_by_name(start):
    giver, taker = start(), start()
    feed(giver, "r", [5], [HCA])
    exported = export(giver, "r", compressors=[CSA])
    part = exported["compressors"][CSA]
    assert (part["committed"], part["open_positions"]) == (0, [])
    assert rows_of(part["entries"]).shape == (0, giver.entry_bytes[CSA])
    import_(taker, "r", exported)
    assert committed(taker, "r", CSA) == 0
    feed(taker, "r", [40])
    for name in NAMES:
        assert_entries(taker, "r", name)


def test_drafts_move_as_what_they_are(start):
    """Committed, with the rows that their windows need; the taker cannot withdraw them."""
    giver, taker = start(), start(manifest=elsewhere(SMALL))
    feed(giver, "r", [6])
    run(giver, [("r", 6, 3)], draft_tokens=[3])
    import_(taker, "r", assert_exported(giver, NAMES, 9))
    for worker in (giver, taker):
        with refused("truncate_too_far", draft_tokens=0):
            worker.truncate("r", 8)
        feed(worker, "r", [30])
        for name in NAMES:
            assert_entries(worker, "r", name)


# -- dtypes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [7, 8, 13])
@pytest.mark.parametrize(("mine", "yours"), [("bf16", "bf16"), ("bf16", "any"), ("any", "any"), ("any", "fp32")])
def test_rows_move_in_the_ring_s_own_dtype(start, mine, yours, num_tokens):
    """bf16 rows go into a ring of fp32 as the numbers that they are."""
    giver = start(manifest=elsewhere(SMALL, input_dtype=mine))
    feed(giver, "r", [5, num_tokens - 5], dtype="bf16")
    exported = export(giver, "r")
    for name, part in exported["compressors"].items():
        positions = open_positions(name, num_tokens)
        rows = bf16(stream(name, "r")[positions.start : positions.stop])
        assert part["open_rows"]["dtype"] == ("bf16" if mine == "bf16" else "fp32")
        expected = rows if mine == "bf16" else (rows.astype(np.uint32) << 16).view(np.float32)
        np.testing.assert_array_equal(rows_of(part["open_rows"]), expected)
    taker, one = start(manifest=SMALL | {"compressors": _typed(yours)}), start()
    import_(taker, "r", exported)
    if yours == "fp32":  # it takes no more bf16
        run(taker, [("r", num_tokens, 19)])
        feed(one, "r", [num_tokens], dtype="bf16")
        feed(one, "r", [19])
    else:
        feed(taker, "r", [19], dtype="bf16")
        feed(one, "r", [num_tokens + 19], dtype="bf16")
    for name in NAMES:
        np.testing.assert_array_equal(entries_of(taker, "r", name), entries_of(one, "r", name), strict=True)


def _typed(input_dtype: str) -> list[dict[str, Any]]:
    return [part | {"input_dtype": input_dtype} for part in SMALL["compressors"]]


@pytest.mark.parametrize(("mine", "yours"), [("any", "bf16"), ("bf16", "fp32")])
def test_rows_that_a_worker_would_not_take_in_a_step(start, mine, yours):
    giver = start(manifest=SMALL | {"compressors": _typed(mine)})
    feed(giver, "r", [9], dtype="bf16")
    taker = start(manifest=SMALL | {"compressors": _typed(yours)})
    assert taker.compat == giver.compat
    with refused("bad_dtype", compressor=HCA):
        import_(taker, "r", export(giver, "r"))
    assert not taker.requests


# -- without all entries -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("entries", [True, False])
@pytest.mark.parametrize("num_tokens", [3, 11, 12, 21, 37])
def test_export_from_an_entry_on(start, num_tokens, entries):
    """What was left out is said, reads as zero, has no page, and is not missed."""
    giver = start()
    feed(giver, "r", [num_tokens])
    for name in NAMES:
        total = num_tokens // RATIO[name]
        for first in range(total + 1) if entries else [total]:
            wanted = {"from_entry": first} if entries else {"entries": False}
            exported = export(giver, "r", compressors=[name], **wanted)
            assert ("entries" in exported["compressors"][name]) is entries
            if entries:
                assert exported["compressors"][name].get("first_entry", 0) == first
                got = rows_of(exported["compressors"][name]["entries"])
                np.testing.assert_array_equal(got, alone(giver.backend, "r", name)[first:total], strict=True)
            for manifest in (SMALL, elsewhere(SMALL)):
                taker = start(manifest=manifest)
                for group in taker.caches.groups:
                    group.pages.fill_(0xFF)
                _goes_on(taker, name, exported, first)


def _goes_on(taker: Worker, name: str, exported: dict[str, Any], first: int) -> None:
    """Held are entries from `first` on, here and after more tokens."""
    told, n = import_(taker, "r", exported)["compressors"][name], taker.caches.by_name[name].page_entries
    for _ in range(3):
        assert ("first_entry" in told, told.get("first_entry", 0)) == (first > 0, first)
        end = told["num_entries"]
        read_pages = read(taker, told["pages"])
        assert len(read_pages) == (-(-end // n) - first // n if end > first else 0)
        assert [page.get("first_entry", 0) for page in read_pages[:1]] == [first % n] * (end > first)
        assert not any("first_entry" in page for page in read_pages[1:])
        assert_entries(taker, "r", name)  # and zeros before the first
        taker.check_integrity()
        reply = run(taker, [("r", told["committed"], 5)], [name], draft_tokens=[1], pages="all")
        told = parts_of(reply, "r")[name]
    end = told["num_entries"]
    for wanted, begin in ((0, first), (max(0, first - 1), first), (end, end), (end + 1, end), (2**70, end)):
        part = export(taker, "r", compressors=[name], from_entry=wanted)["compressors"][name]
        assert part.get("first_entry", 0) == begin
        expected = alone(taker.backend, "r", name)[begin:end]
        np.testing.assert_array_equal(rows_of(part["entries"]), expected, strict=True)
    taker.release("r")
    assert all(group.pool.num_used == 0 for group in taker.caches.groups)


def test_drafts_behind_an_import_without_entries(start):
    """An entry that closes and is withdrawn in a page that holds none of the imported: 12 tokens are 3 csa entries."""
    giver, taker = start(), start()
    feed(giver, "r", [11])
    import_(taker, "r", export(giver, "r", entries=False))
    run(taker, [("r", 11, 3)], wrong=3, draft_tokens=[3])
    old = pages(taker, CSA) + pages(taker, INDEXER)
    assert len(old) == 2
    taker.truncate("r", 11)
    for handle in old:
        with refused("stale_handle"):
            read(taker, [handle])
    assert pages(taker, CSA) == pages(taker, INDEXER) == []
    feed(taker, "r", [29])
    for name in NAMES:
        assert_entries(taker, "r", name)


# -- refused -------------------------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], Any]


def _part(name: str, **fields: Any) -> Change:
    return lambda body: body["compressors"][name].update(fields)


def _first(body: dict[str, Any]) -> None:
    body["compressors"][CSA]["first_entry"] = 1


def _tensor(name: str, field: str, **fields: Any) -> Change:
    return lambda body: body["compressors"][name][field].update(fields)


def _rows(name: str, count: int) -> np.ndarray:
    return np.zeros((count, stream(name, "r").shape[1]), np.float32)


def _bytes(*shape: int) -> dict[str, Any]:
    return tensor(np.zeros(shape, np.uint8), dtype="uint8")


def _spoilt(name: str, row: int, column: int, value: float) -> Change:
    def change(body: dict[str, Any]) -> None:
        rows = rows_of(body["compressors"][name]["open_rows"]).copy()
        rows[row, column] = value
        body["compressors"][name]["open_rows"] = tensor(rows)

    return change


REFUSED: dict[str, tuple[str, Change]] = {
    "no id": ("malformed", lambda body: body.pop("id")),
    "bad id": ("malformed", lambda body: body.update(id="a b")),
    "unknown field": ("malformed", lambda body: body.update(entries=[])),
    "compat of another type": ("malformed", lambda body: body.update(compat=7)),
    "no compressors": ("malformed", lambda body: body.update(compressors={})),
    "unknown field of a part": ("malformed", _part(CSA, num_entries=3)),
    "negative first entry": ("malformed", _part(CSA, first_entry=-1)),
    "first entry of another type": ("malformed", _part(CSA, first_entry=True)),
    "first entry of none": ("malformed", lambda body: body["compressors"][CSA].pop("entries") and _first(body)),
    "negative committed": ("malformed", _part(CSA, committed=-1)),
    "committed of another type": ("malformed", _part(CSA, committed=13.0)),
    "open rows no tensor": ("malformed", _part(CSA, open_rows=[])),
    "version": ("unsupported_version", lambda body: body.update(version=2)),
    "compat": ("compat_mismatch", lambda body: body.update(compat="0" * 32)),
    "compressor": ("unknown_compressor", lambda body: body["compressors"].update(none=body["compressors"][CSA])),
    "past max_position": ("bad_positions", _part(CSA, committed=257)),
    "huge committed": ("bad_positions", _part(CSA, committed=2**63)),
    "another phase": ("bad_shape", _part(CSA, committed=14)),
    "another window": ("bad_positions", _part(HCA, committed=21, first_entry=1)),
    "a row too few": ("bad_shape", _part(INDEXER, open_rows=tensor(_rows(INDEXER, 4)))),
    "a row too many": ("bad_shape", _part(INDEXER, open_rows=tensor(_rows(INDEXER, 6)))),
    "rows of another width": ("bad_shape", _part(INDEXER, open_rows=tensor(_rows(CSA, 5)))),
    "bytes not of the shape": ("bad_shape", _tensor(INDEXER, "open_rows", shape=[6, 256])),
    "rows of integers": ("bad_dtype", _tensor(INDEXER, "open_rows", dtype="int32")),
    "rows of an unknown dtype": ("bad_dtype", _tensor(INDEXER, "open_rows", dtype="fp16")),
    "an entry too many": ("bad_shape", _part(INDEXER, entries=_bytes(4, 68))),
    "an entry too few": ("bad_shape", _part(INDEXER, entries=_bytes(2, 68))),
    "a first entry too many": ("bad_shape", _part(INDEXER, first_entry=1)),
    "a first entry past the last": ("bad_shape", _part(INDEXER, first_entry=7)),
    "entries of another width": ("bad_shape", _part(INDEXER, entries=_bytes(3, 69))),
    "entries of one dimension": ("bad_shape", _part(INDEXER, entries=_bytes(204))),
    "entries of another dtype": ("bad_dtype", _part(INDEXER, entries=tensor(np.zeros((3, 17), np.float32)))),
    "a position missing": ("bad_positions", _part(CSA, open_positions=[8, 9, 10, 11])),
    "positions from elsewhere": ("bad_positions", _part(CSA, open_positions=[9, 10, 11, 12, 13])),
    "positions past int64": ("bad_positions", _part(CSA, open_positions=[2**64 - 1] * 5)),
    "positions no numbers": ("malformed", _part(CSA, open_positions=["8"] * 5)),
    "NaN in the last compressor": ("non_finite", _spoilt(INDEXER, 4, 200, math.nan)),
    "infinite kv": ("non_finite", _spoilt(HCA, 0, 127, -math.inf)),
    "infinite score": ("non_finite", _spoilt(CSA, 3, 300, math.inf)),
}  # fmt: skip


@pytest.mark.parametrize(("code", "change"), REFUSED.values(), ids=REFUSED)
def test_an_import_that_is_refused_changes_nothing(start, code, change):
    """13 tokens: open rows 8 … 12; 1 entry of hca, 3 of the others. Then the true one, whose rows may be −inf."""
    giver, worker = start(), start()
    feed(giver, "r", [13])
    feed(worker, "s", [21])
    good = export(giver, "r") | {"id": "r"}
    body, before = copy.deepcopy({**good, "compressors": _copied(good)}), snapshot(worker)
    change(body)
    with refused(code):
        worker.import_(parse_import(body, worker.rules, worker.entry_bytes))
    assert snapshot(worker) == before
    worker.check_integrity()
    _spoilt(CSA, 4, 256, -math.inf)(good)
    import_(worker, "r", good)
    assert committed(worker, "r", INDEXER) == 13


def _copied(body: dict[str, Any]) -> dict[str, Any]:
    """Its compressors, with bytes instead of views, which cannot be copied."""
    return {
        name: {
            field: value | {"data": bytes(value["data"])} if isinstance(value, dict) else value
            for field, value in part.items()
        }
        for name, part in body["compressors"].items()
    }


def test_where_a_non_finite_row_was(start):
    giver, worker = start(), start()
    feed(giver, "r", [13])
    exported = export(giver, "r")
    _spoilt(INDEXER, 4, 200, math.nan)(exported)
    with refused("non_finite", compressor=INDEXER, row=4, column=200):
        import_(worker, "r", exported)


def test_an_id_that_exists(start):
    """It is said before capacity; another tenant's of the same name is another request."""
    giver, worker = start(), start(max_requests=2)
    feed(giver, "r", [13])
    exported = export(giver, "r")
    feed(worker, "r", [5])
    import_(worker, "r", exported, "tenant")
    before = snapshot(worker)
    for tenant in ("", "tenant"):
        with refused("request_exists"):
            import_(worker, "r", exported, tenant)
    with refused("pool_exhausted", pool="requests", needed=1, free=0):
        import_(worker, "new", exported)
    assert snapshot(worker) == before
    assert_entries(worker, "r", HCA)
    assert_entries(worker, "r", HCA, "tenant")


def test_capacity(start):
    """21 tokens need 1 page of hca and 3 of csa, which share a pool of 4, and 2 of the indexer."""
    giver = start()
    feed(giver, "r", [21])
    exported = export(giver, "r")
    worker = start(pages=2)
    feed(worker, "s", [4], [CSA])
    before = snapshot(worker)
    with refused("pool_exhausted", pool=PACKED_POOL, needed=4, free=3) as caught:
        import_(worker, "r", exported)
    assert caught.value.retry_after
    worker.release("s")
    feed(worker, "s", [4], [INDEXER])
    before = snapshot(worker)
    with refused("pool_exhausted", pool=INDEXER_POOL, needed=2, free=1):
        import_(worker, "r", exported)
    assert snapshot(worker) == before
    import_(worker, "r", exported | {"compressors": {n: exported["compressors"][n] for n in (HCA, CSA)}})
    with refused("pool_exhausted", pool=PACKED_POOL, needed=1, free=0):
        feed(worker, "r", [3], [HCA, CSA])


def test_other_weights_or_numbers_are_another_compat(start):
    giver = start()
    feed(giver, "r", [13])
    for change in ({"rms_eps": 1e-5}, {"rope": {"theta": 10000.0}}):
        with refused("compat_mismatch"):
            import_(start(manifest=SMALL | change), "r", export(giver, "r"))


@pytest.mark.parametrize(
    "body", [{"entries": 1}, {"from_entry": -1}, {"from_entry": True}, {"compressors": HCA}, {"all": True}]
)
def test_an_export_that_is_malformed(start, body):
    worker = start()
    feed(worker, "r", [13])
    with refused("malformed"):
        export(worker, "r", **body)
    with refused("unknown_request"):
        export(worker, "s")
    with refused("unknown_request"):
        export(worker, "r", "tenant")


# -- verify --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("memory")
def test_digests_are_of_page_free_rows(start):
    """Partly filled pages, pages without their first entries, and of workers with other page bytes."""
    giver, taker, third = start(), start(manifest=elsewhere(SMALL)), start(manifest=elsewhere(SMALL, page_bytes=3200))
    feed(giver, "r", [45])
    import_(taker, "r", export(giver, "r"))
    import_(third, "r", export(giver, "r", from_entry=4))
    seen = {}
    for worker in (giver, taker, third):
        for name in NAMES:
            handles, n = pages(worker, name), worker.caches.by_name[name].page_entries
            held = worker.request("r")["compressors"][name].get("first_entry", 0)
            entries = alone(worker.backend, "r", name)
            for i, page in enumerate(worker.verify(handles)["pages"], held // n):
                first, end = max(held, i * n), min((i + 1) * n, 45 // RATIO[name])
                assert page.pop("xxh3_64") == xxhash.xxh3_64_hexdigest(np.ascontiguousarray(entries[first:end]))
                expected = {"handle": handles[i - held // n], "compressor": name, "num_entries": end - i * n}
                assert page == expected | ({"first_entry": first - i * n} if first > i * n else {})
            seen[worker, name] = worker.verify(handles)["pages"]
    same = {page["xxh3_64"] for page in seen[taker, INDEXER][2:]} & {page["xxh3_64"] for page in seen[third, INDEXER]}
    assert len(same) == len(seen[third, INDEXER])
    assert seen[giver, CSA][0]["xxh3_64"] != seen[taker, CSA][0]["xxh3_64"]


def test_verify_is_all_or_nothing(start):
    worker = start()
    feed(worker, "r", [21])
    feed(worker, "gone", [8])
    stale, handles = pages(worker, CSA, "gone"), pages(worker, CSA)
    worker.release("gone")
    for wrong, code in ((stale, "stale_handle"), (["A" * 52], "unknown_handle")):
        with refused(code):
            worker.verify([*handles, *wrong])
    with refused("unknown_handle"):
        worker.verify(handles, "tenant")
    assert worker.verify([]) == {"version": 1, "pages": []}
    twice = worker.verify([*handles, handles[0]])["pages"]
    assert [page["handle"] for page in twice] == [*handles, handles[0]]
    assert twice[0] == twice[-1]


def test_a_changed_byte_is_another_digest(start):
    worker = start()
    feed(worker, "r", [8], [CSA])
    (page,) = worker.verify(pages(worker, CSA))["pages"]
    cache = worker.caches.by_name[CSA]
    cache.group.pages[cache.page_table[0, 0], cache.group.layout.page_bytes - 1] ^= 1  # padding
    assert worker.verify(pages(worker, CSA))["pages"] == [page]
    cache.group.pages[cache.page_table[0, 0], 0] ^= 1
    (other,) = worker.verify(pages(worker, CSA))["pages"]
    assert other["xxh3_64"] != page["xxh3_64"]
    np.testing.assert_array_equal(
        page_entries(cache, read(worker, pages(worker, CSA))[0])[1], alone(worker.backend, "r", CSA)[1]
    )


# -- a long request, over HTTP -------------------------------------------------------------------------------------

LONG_TOKENS = 65536
LONG = {
    "max_position": LONG_TOKENS,
    "compressors": [{"name": "csa", "kind": "csa", "ratio": 4, "head_dim": 512, "cache_format": "fp8_ds_mla"}],
}
ENTRIES_BYTES = LONG_TOKENS // 4 * 584


class Memory:
    """Resident memory of a process, and the most it was since `reset`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def reset(self) -> int:
        with open(f"/proc/{self.pid}/clear_refs", "w") as file:
            file.write("5")
        return self._read("VmRSS")

    def peak(self) -> int:
        return self._read("VmHWM")

    def _read(self, what: str) -> int:
        with open(f"/proc/{self.pid}/status") as file:
            (kib,) = (line.split()[1] for line in file if line.startswith(what))
        return int(kib) * 1024


@pytest.fixture(scope="module")
def long_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    """Two workers whose large blocks go back to the system when they are freed, so that a peak is this call's."""
    flags = ("--pages=300", "--max-requests=2", "--max-step-tokens=8192", "--max-body-bytes=40000000")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
        workers = [Process(tmp_path_factory.mktemp("worker"), *flags, manifest=LONG) for _ in range(2)]
    yield workers
    for worker in workers:
        worker.end()


def test_a_long_request_moves_without_a_second_copy(long_workers):
    """65,536 tokens, 9.6 MB of entries. An export may hold them once besides their pages, an import only the body.

    A first time round touches the memory that is there for any call: staging and pages.
    """
    rows = np.random.default_rng(1).integers(0x3E00, 0x4000, (8192, 2048), np.uint16)
    rows |= np.random.default_rng(2).integers(0, 2, rows.shape, np.uint16) << 15
    here, there = (Client(worker.url, timeout=120) for worker in long_workers)
    giver, taker = (Memory(worker.process.pid) for worker in long_workers)
    with here, there:
        there.step([("warm", 0, 8192)], {"csa": rows})
        there.release("warm")
        for at in range(0, LONG_TOKENS, 8192):
            mine = here.step([("r", at, 8192)], {"csa": rows}, pages="all").requests["r"]["csa"].pages
        for _ in range(2):
            there.release("r")
            before = giver.reset()
            exported = here.export("r")
            exporting = (giver.peak() - before) / ENTRIES_BYTES
            before = taker.reset()
            theirs = there.import_("r", exported)["csa"].pages
            importing = (taker.peak() - before) / ENTRIES_BYTES
        assert exported.compressors["csa"].entries.nbytes == ENTRIES_BYTES
        digests = [[page.xxh3_64 for page in c.verify(pages)] for c, pages in ((here, mine), (there, theirs))]
        assert len(digests[0]) == 256
        assert digests[0] == digests[1]
        for client, pages in ((here, mine), (there, theirs)):
            assert len(client.read_pages(pages)) == 256
    print(f"peak of resident memory: export {exporting:.2f}, import {importing:.2f} times the entries")
    assert exporting < 1.4
    assert importing < 0.4
