"""The whole worker in any order of calls, beside a model that keeps rows; and one process under many clients at once.

The model knows no ring, no plan and no page byte: entries it has from a worker that runs a request's rows in one step.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from kvfold_client import AsyncClient, Client, errors
from kvfold_kernels import backends
from kvfold_kernels.backends import Backend
from kvfold_service.worker import Worker
from tests.service_cases import (
    CSA,
    HCA,
    INDEXER,
    NAMES,
    RATIO,
    SMALL,
    STREAM_TOKENS,
    Process,
    alone,
    bf16,
    entries_of,
    export,
    import_,
    make_worker,
    open_positions,
    page_entries,
    parts_of,
    read,
    refused,
    rows_of,
    send,
    step_body,
    stream,
    tensor,
)

IDS, MOST_TOKENS, LEASE, MAX_REQUESTS, PAGES = ("a", "b", "c", "d"), 100, 20.0, 3, 12
OTHER = SMALL | {
    "draft_slack": 6,
    "compressors": [
        part | {"page_entries": entries, "page_bytes": page_bytes}
        for part, (entries, page_bytes) in zip(SMALL["compressors"], ((3, 608), (3, 608), (1, 100)), strict=True)
    ],
}
"""The same compressors in other rings and pages."""


@dataclass
class Tokens:
    """A request in one compressor: the rows it was fed, how many may go again, and what is held of its entries."""

    rows: np.ndarray
    drafts: int = 0
    with_it: tuple[str, ...] = ()
    first_entry: int = 0
    handles: dict[int, str] = field(default_factory=dict)

    @property
    def committed(self) -> int:
        return len(self.rows)


@dataclass
class Sequence:
    expires: float
    of: dict[str, Tokens]


class Model:
    """What one worker must hold and answer."""

    def __init__(self, worker: Worker, now: Callable[[], float]) -> None:
        self.now, self.slack = now, worker.manifest.draft_slack
        self.layout = {name: part.layout() for name, part in worker.rules.parts.items()}
        self.sequences: dict[str, Sequence] = {}
        self.dead: set[str] = set()

    def fresh(self) -> Sequence:
        return Sequence(0, {name: Tokens(stream(name, "")[:0]) for name in NAMES})

    def release(self, id: str) -> None:
        for tokens in self.sequences.pop(id).of.values():
            self.dead.update(tokens.handles.values())

    def expire(self) -> None:
        for id in [id for id, sequence in self.sequences.items() if sequence.expires <= self.now()]:
            self.release(id)

    def use(self, id: str) -> None:
        sequence = self.sequences[id]
        sequence.expires = max(sequence.expires, self.now() + LEASE)

    def num_pages(self, name: str, num_tokens: int, first_entry: int) -> int:
        n = self.layout[name].entries
        return -(-(num_tokens // RATIO[name]) // n) - first_entry // n

    def lacks(self, new: int, pages: list[tuple[str, int]]) -> bool:
        """Whether so many requests, and pages of compressors, are more than what is free."""
        for layout in set(self.layout.values()):
            members = [name for name in NAMES if self.layout[name] == layout]
            used = sum(
                self.num_pages(name, sequence.of[name].committed, sequence.of[name].first_entry)
                for sequence in self.sequences.values()
                for name in members
            )
            if sum(count for name, count in pages if name in members) > PAGES * len(members) - used:
                return True
        return new > MAX_REQUESTS - len(self.sequences)

    def of_step(self, requests: list[tuple[str, int, int]], names: list[str]) -> str | None:
        """What such a step is refused with."""
        have = {id: self.sequences.get(id) or self.fresh() for id, _, _ in requests}
        for id, start, _ in requests:
            for name in names:
                if start != have[id].of[name].committed:
                    return "position_gap" if start > have[id].of[name].committed else "position_conflict"
        pages = [
            (name, self.num_pages(name, start + length, 0) - self.num_pages(name, start, 0))
            for _, start, length in requests
            for name in names
        ]
        new = sum(bool(length) and id not in self.sequences for id, _, length in requests)
        return "pool_exhausted" if self.lacks(new, pages) else None

    def feed(self, id: str, rows: dict[str, np.ndarray], drafts: int) -> None:
        if any(map(len, rows.values())):
            sequence = self.sequences.setdefault(id, self.fresh())
            for name, more in rows.items():
                old = sequence.of[name]
                old.rows, old.drafts, old.with_it = np.concatenate([old.rows, more]), drafts, tuple(rows)
        if id in self.sequences:
            self.use(id)

    def can_truncate(self, id: str, length: int) -> bool:
        of = self.sequences[id].of
        longer = [tokens for tokens in of.values() if tokens.committed > length]
        return (bool(longer) or any(tokens.committed == length for tokens in of.values())) and all(
            tokens.committed - length <= tokens.drafts
            and {of[name].committed for name in tokens.with_it} <= {tokens.committed}
            for tokens in longer
        )

    def truncate(self, id: str, length: int) -> None:
        for name, tokens in self.sequences[id].of.items():
            if (gone := tokens.committed - length) > 0:
                before, after = tokens.committed // RATIO[name], length // RATIO[name]
                tokens.rows, tokens.drafts = tokens.rows[:length], tokens.drafts - gone
                if after < before:
                    for page in [page for page in tokens.handles if page >= after // self.layout[name].entries]:
                        self.dead.add(tokens.handles.pop(page))
        self.use(id)


class Everything(RuleBasedStateMachine):
    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.clock, self.serial = [0.0], make_worker(backend, max_requests=1)
        limits = {"max_requests": MAX_REQUESTS, "lease_seconds": LEASE, "clock": lambda: self.clock[0]}
        self.workers = [make_worker(backend, manifest, pages=PAGES, **limits) for manifest in (SMALL, OTHER)]
        self.models = [Model(worker, lambda: self.clock[0]) for worker in self.workers]

    which, seeds = st.integers(0, 1), st.integers(0, 2**32)
    names = st.sampled_from([list(NAMES)] * 5 + [[HCA, CSA], [INDEXER, CSA], [HCA], [INDEXER]])

    def busy(self) -> bool:
        return any(model.sequences for model in self.models)

    def pick(self, w: int, data: st.DataObject) -> str:
        """An id, mostly of a request that is known."""
        self.models[w].expire()
        known = sorted(self.models[w].sequences)
        return data.draw(st.sampled_from(known * 4 + ["d"])) if known else "d"

    def entries(self, name: str, tokens: Tokens) -> np.ndarray:
        """All entries of these rows, held or not, by a worker that sees them at once."""
        if not tokens.committed:
            return np.empty((0, self.serial.entry_bytes[name]), np.uint8)
        body = step_body([("x", 0, tokens.committed)], []) | {"tensors": [tensor(tokens.rows, name)]}
        send(self.serial, body)
        entries = entries_of(self.serial, "x", name)
        self.serial.release("x")
        return entries

    def check(self, w: int, id: str, told: dict[str, Any], new_pages: bool = False) -> None:
        """What is told of a request; its handles are as they were, and new ones were never seen."""
        model = self.models[w]
        for name, part in told.items():
            tokens, n = model.sequences[id].of[name], model.layout[name].entries
            assert (part["num_entries"], part["open_tokens"]) == divmod(tokens.committed, RATIO[name])
            assert (part["committed"], part.get("first_entry", 0)) == (tokens.committed, tokens.first_entry)
            first = max(tokens.first_entry, part["new_entries"][0] if new_pages else 0)
            held = range(first // n, -(-part["num_entries"] // n)) if first < part["num_entries"] else ()
            for page, handle in zip(held, part["pages"], strict=True):
                assert tokens.handles.setdefault(page, handle) == handle
                assert handle not in model.dead

    @rule(
        w=which,
        lengths=st.dictionaries(st.sampled_from(IDS), st.integers(0, 14), min_size=1, max_size=3),
        names=names,
        drafts=st.integers(0, 6),
        pad=st.integers(0, 2),
        shift=st.sampled_from([0] * 8 + [1, -1]),
        spoilt=st.sampled_from([False] * 6 + [True]),
        dtype=st.sampled_from(["fp32", "bf16"]),
        seed=seeds,
    )
    def step(self, w, lengths, names, drafts, pad, shift, spoilt, dtype, seed):
        """Any step, good or bad."""
        self.run_step(w, lengths, names, drafts, pad, shift, spoilt, dtype, seed)

    @rule(w=which, data=st.data(), length=st.integers(1, 9), names=names, back=st.integers(0, 4), seed=seeds)
    def guess(self, w, data, length, names, back, seed):
        """A request goes on, with as many drafts as there may be, and is often cut back at once."""
        id = self.pick(w, data)
        self.run_step(w, {id: length}, names, 9, 0, 0, False, "fp32", seed)
        if back and id in self.models[w].sequences:
            self.cut(w, id, max(0, self.models[w].sequences[id].of[names[0]].committed - back))

    def run_step(self, w, lengths, names, drafts, pad, shift, spoilt, dtype, seed):
        worker, model, rng = self.workers[w], self.models[w], np.random.default_rng(seed)
        requests, rows = [], {}
        for id, length in lengths.items():
            known = model.sequences.get(id)
            at = max(0, (known.of[names[0]].committed if known else 0) + shift)
            length = min(length, MOST_TOKENS - at)
            requests.append((id, at, max(length, 0)))
            rows[id] = {name: _rows(rng, name, max(length, 0), dtype) for name in names}
        guessed = [min(drafts, model.slack, length) for _, _, length in requests]
        body = step_body(
            requests, [], positions=[at + i for _, at, length in requests for i in range(length)] + [0] * pad
        )
        body |= {"draft_tokens": guessed, "pages": "all" if seed % 2 else "new", "tensors": []}
        for name in names:
            together = np.concatenate(
                [*(part[name] for part in rows.values()), _rows(rng, name, pad, dtype) * math.nan]
            )
            if spoilt:
                together[:1] = math.nan
            body["tensors"].append(tensor(bf16(together) if dtype == "bf16" else together, name, dtype))
        model.expire()
        any_token = any(length for _, _, length in requests)
        if expected := model.of_step(requests, names) or ("non_finite" if spoilt and any_token else None):
            with refused(expected):
                send(worker, body)
            return
        reply = send(worker, body)
        for (id, start, length), some in zip(requests, guessed, strict=True):
            model.feed(id, rows[id], some)
            for name, part in parts_of(reply, id).items():
                assert part["new_entries"] == [start // RATIO[name], (start + length) // RATIO[name]]
            if id in model.sequences:
                self.check(w, id, parts_of(reply, id), new_pages=seed % 2 == 0)

    @precondition(busy)
    @rule(w=which, data=st.data(), name=st.sampled_from(NAMES), back=st.integers(-1, 4))
    def truncate(self, w, data, name, back):
        id = self.pick(w, data)
        if id in self.models[w].sequences:
            self.cut(w, id, max(0, self.models[w].sequences[id].of[name].committed - back))
        else:
            with refused("unknown_request"):
                self.workers[w].truncate(id, 0)

    def cut(self, w: int, id: str, length: int) -> None:
        worker, model = self.workers[w], self.models[w]
        if not model.can_truncate(id, length):
            with refused("truncate_too_far"):
                worker.truncate(id, length)
            return
        told = worker.truncate(id, length)
        model.truncate(id, length)
        self.check(w, id, told["compressors"])

    @precondition(busy)
    @rule(w=which, data=st.data())
    def release(self, w, data):
        id = self.pick(w, data)
        self.workers[w].release(id)
        if id in self.models[w].sequences:
            self.models[w].release(id)

    @precondition(busy)
    @rule(w=which, data=st.data(), renewing=st.booleans())
    def look(self, w, data, renewing):
        """Entries and digests of all that a request has, by the handles that it was ever told and has still."""
        worker, model = self.workers[w], self.models[w]
        id = self.pick(w, data)
        if id not in model.sequences:
            with refused("unknown_request"):
                worker.request(id)
            return
        self.check(w, id, worker.request(id)["compressors"])
        if not renewing:
            return
        for name, tokens in model.sequences[id].of.items():
            if tokens.handles:
                model.use(id)
            entries, n = self.entries(name, tokens), model.layout[name].entries
            np.testing.assert_array_equal(entries_of(worker, id, name), entries[tokens.first_entry :], strict=True)
            for page, digest in zip(tokens.handles, worker.verify(list(tokens.handles.values()))["pages"], strict=True):
                held = entries[max(page * n, tokens.first_entry) : (page + 1) * n]
                assert digest["xxh3_64"] == xxhash.xxh3_64_hexdigest(np.ascontiguousarray(held))

    @precondition(busy)
    @rule(w=which, data=st.data(), tenant=st.booleans())
    def look_at_what_is_not_theirs(self, w, data, tenant):
        worker, model = self.workers[w], self.models[w]
        model.expire()
        live = [h for s in model.sequences.values() for t in s.of.values() for h in t.handles.values()]
        if tenant and live:
            with refused("unknown_handle"):
                read(worker, [data.draw(st.sampled_from(live))], "tenant")
        if model.dead:
            with refused("stale_handle"):
                read(worker, [*live, data.draw(st.sampled_from(sorted(model.dead)))])

    @precondition(busy)
    @rule(
        w=which,
        v=which,
        data=st.data(),
        names=st.lists(st.sampled_from(NAMES), min_size=1, unique=True) | st.none(),
        entries=st.booleans(),
        drop=st.integers(0, 4),
        bad=st.sampled_from([False] * 5 + [True]),
    )
    def move(self, w, v, data, names, entries, drop, bad):
        """Export from one worker, import into one under any id: without entries, or without the first `drop`."""
        giver, model = self.workers[w], self.models[w]
        id, new = self.pick(w, data), data.draw(st.sampled_from(IDS))
        if id not in model.sequences:
            with refused("unknown_request"):
                export(giver, id)
            return
        of = model.sequences[id].of
        names = names or [name for name in NAMES if of[name].committed]
        exported = export(giver, id, compressors=names, entries=entries)
        model.use(id)
        for name in names:
            of[name].drafts = 0
        moved = self.models[v].fresh()
        for name, part in exported["compressors"].items():
            tokens, positions = of[name], open_positions(name, of[name].committed)
            assert (part["committed"], part["open_positions"]) == (tokens.committed, list(positions))
            np.testing.assert_array_equal(rows_of(part["open_rows"]), tokens.rows[positions.start :])
            first = tokens.committed // RATIO[name]
            if entries:
                rows = rows_of(part["entries"])
                np.testing.assert_array_equal(rows, self.entries(name, tokens)[tokens.first_entry :])
                part["entries"] = tensor(rows[drop:], dtype="uint8")
                first -= len(rows[drop:])
                part["first_entry"] = first
            moved.of[name] = Tokens(tokens.rows, 0, tuple(names), first)
        if names:
            self.take(v, new, exported, moved, bad)

    def take(self, v: int, new: str, exported: dict[str, Any], moved: Sequence, bad: bool) -> None:
        model = self.models[v]
        model.expire()
        pages = [(name, model.num_pages(name, t.committed, t.first_entry)) for name, t in moved.of.items()]
        if bad:
            next(iter(exported["compressors"].values()))["committed"] += 1
            with refused("bad_shape"):
                import_(self.workers[v], new, exported)
        elif new in model.sequences:
            with refused("request_exists"):
                import_(self.workers[v], new, exported)
        elif model.lacks(1, pages):
            with refused("pool_exhausted"):
                import_(self.workers[v], new, exported)
        else:
            told = import_(self.workers[v], new, exported)
            model.sequences[new] = moved
            model.use(new)
            self.check(v, new, told["compressors"])

    @precondition(busy)
    @rule(w=which, data=st.data(), seconds=st.sampled_from([0.5, 5, 60]))
    def lease(self, w, data, seconds):
        id, model = self.pick(w, data), self.models[w]
        if id in model.sequences:
            self.workers[w].lease(id, seconds)
            model.sequences[id].expires = self.clock[0] + seconds
        else:
            with refused("unknown_request"):
                self.workers[w].lease(id, seconds)

    @precondition(busy)
    @rule(seconds=st.sampled_from([0.1, 0.5, 1, 12]), reaps=st.booleans())
    def tick(self, seconds, reaps):
        self.clock[0] += seconds
        if reaps:
            for worker in self.workers:
                worker.reap()

    @invariant()
    def whole(self):
        for worker, model in zip(self.workers, self.models, strict=True):
            worker.check_integrity()
            known = {id for (_, id), request in worker.requests.items() if request.expires > self.clock[0]}
            assert known == {id for id, sequence in model.sequences.items() if sequence.expires > self.clock[0]}


def _rows(rng: np.random.Generator, name: str, count: int, dtype: str) -> np.ndarray:
    rows = rng.standard_normal((count, stream(name, "").shape[1]), np.float32)
    return (bf16(rows).astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else rows


def test_any_order_of_all_calls(backend):
    """Not shrunk, which may take longer than a test has: the calls up to the failure are printed as they were."""
    short = settings(max_examples=100, stateful_step_count=30, phases=[Phase.generate])
    run_state_machine_as_test(lambda: Everything(backend), settings=short)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_any_order_of_all_calls_at_length(backend):
    run_state_machine_as_test(lambda: Everything(backend), settings=settings(max_examples=1000, stateful_step_count=80))


# -- many clients at once ------------------------------------------------------------------------------------------

NUM_SHARED, NUM_OWN, NUM_THREADS = 4, 6, 2


class Crowd:
    """Clients of one process, and the entries that must come of what they do to each other."""

    def __init__(self, url: str) -> None:
        self.url = url
        backend = backends.load("cpu")
        self.caches = make_worker(backend).caches.by_name
        self.expected = functools.partial(alone, backend)
        self.reads = 0

    def rows(self, names: tuple[str, ...], id: str, at: int, length: int) -> dict[str, np.ndarray]:
        return {name: stream(name, id)[at : at + length] for name in names}

    async def push(self, client: AsyncClient, id: str, seed: int) -> None:
        """One of several that feed the same request, each from where it believes it stands; often twice at once."""
        rng, at = random.Random(seed), 0
        while at < STREAM_TOKENS:
            length = min(rng.randint(1, 9), STREAM_TOKENS - at)
            step_id = f"{id}-{seed}-{at}-{length}-{rng.random()}"
            step = functools.partial(client.step, [(id, at, length)], self.rows(NAMES, id, at, length), step_id=step_id)
            try:
                first, *again = await asyncio.gather(*(step() for _ in range(rng.choice((1, 1, 3)))))
                assert all(reply == first for reply in again)
                at = first.requests[id][HCA].committed
            except (errors.PositionConflict, errors.PositionGap) as error:
                at = error.details["expected"]

    async def speculate(self, client: AsyncClient, id: str, seed: int) -> None:
        """Its own request: guesses, of which it keeps some, in a step of all compressors or in one of each."""
        rng, at = random.Random(seed), 0
        while at < STREAM_TOKENS:
            length = min(rng.randint(1, 7), STREAM_TOKENS - at)
            wrong = rng.randint(0, min(3, length))
            for names in (NAMES,) if rng.random() < 0.5 else ((HCA,), (CSA,), (INDEXER,)):
                rows = self.rows(names, id, at, length)
                for name in names:
                    rows[name] = np.concatenate([rows[name][: length - wrong], stream(name, "wrong")[:wrong]])
                await client.step([(id, at, length)], rows, draft_tokens=[wrong])
            at += length - wrong
            if wrong:
                await client.truncate(id, at)

    async def watch(self, client: AsyncClient, ids: list[str], done: asyncio.Event) -> None:
        """Whatever is read at any time is a beginning of what must come of it, if its handle still stands."""
        rng = random.Random(1)
        while not done.is_set():
            id, name = rng.choice(ids), rng.choice(NAMES)
            try:
                await self.look(client, id, name)
            except (errors.UnknownRequest, errors.StaleHandle):
                await asyncio.sleep(0.01)

    async def look(self, client: AsyncClient, id: str, name: str, final: bool = False) -> int:
        """How many entries can be read; they are the beginning of the request's, unless they may be of guesses."""
        state = (await client.request(id))[name]
        entries = [
            page_entries(self.caches[name], {"num_entries": p.num_entries, "shape": [p.data.size], "data": p.data})
            for p in await client.read_pages(state.pages)
        ]
        self.reads += 1
        num_entries = sum(map(len, entries))
        if num_entries and (final or not id.startswith("own")):
            np.testing.assert_array_equal(np.concatenate(entries), self.expected(id, name)[:num_entries], strict=True)
        return num_entries

    def push_from_thread(self, id: str, failed: list[BaseException]) -> None:
        """A client without an event loop, one token a step."""
        try:
            with Client(self.url, retries=10) as client:
                for at in range(STREAM_TOKENS // 2):
                    client.step([(id, at, 1)], self.rows(NAMES, id, at, 1))
        except BaseException as error:
            failed.append(error)

    async def run(self) -> None:
        shared = [f"shared-{i}" for i in range(NUM_SHARED)]
        own = [f"own-{i}" for i in range(NUM_OWN)]
        failed: list[BaseException] = []
        threads = [
            threading.Thread(target=self.push_from_thread, args=(f"thread-{i}", failed)) for i in range(NUM_THREADS)
        ]
        for thread in threads:
            thread.start()
        async with AsyncClient(self.url, retries=10) as client, AsyncClient(self.url, encoding="msgpack") as other:
            done = asyncio.Event()
            watching = [asyncio.create_task(self.watch(client, shared + own, done)) for _ in range(2)]
            await asyncio.gather(
                *(self.push(c, id, seed) for id in shared for seed, c in enumerate((client, other, client))),
                *(self.speculate(client, id, seed) for seed, id in enumerate(own)),
            )
            done.set()
            await asyncio.gather(*watching)
            await asyncio.to_thread(lambda: [thread.join() for thread in threads])
            assert not failed
            reads = self.reads
            for id in [*shared, *own, *(f"thread-{i}" for i in range(NUM_THREADS))]:
                tokens = STREAM_TOKENS // 2 if id.startswith("thread") else STREAM_TOKENS
                for name in NAMES:
                    assert await self.look(client, id, name, final=True) == tokens // RATIO[name]
            assert reads > 20


def test_many_clients_at_once(tmp_path):
    """Shared requests, own ones with guesses, readers, threads: in the end all is as if each had been alone."""
    process = Process(tmp_path, "--max-requests=20", "--pages=700")
    try:
        asyncio.run(Crowd(process.url).run())
    finally:
        assert process.end() == 0
    assert "ERROR" not in (tmp_path / "log").read_text()
