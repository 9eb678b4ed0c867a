"""Steps of a profile, or of a trace, as `traffic` sends them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator, Sequence

from ..errors import ApiError, KvfoldError, ReplyError
from ..scheduler.trace import Arrival
from .held import Held
from .rows import Rows
from .sample import BAD_REPLY, OK, UNFINISHED, UNREACHABLE, Sample
from .sessions import Session, Sessions
from .shape import Shape
from .workers import Worker, Workers

Request = tuple[str, int, int]
"""(id, start, tokens)."""

_STANDS = {OK, "pool_exhausted", "queue_full", "quota_exceeded", "not_ready", "draining", "step_failed"}
"""After these it is known where a session's requests stand."""


class Load:
    """Sends one step a sample and says in it what became of the step."""

    def __init__(self, workers: Workers, held: Held, rows: Rows, seed: int) -> None:
        self.workers, self.held, self.rows = workers, held, rows
        self._chance = random.Random(seed)

    async def step(
        self, sample: Sample, worker: Worker, requests: Sequence[Request], drafts: list[int] | None = None
    ) -> bool:
        """Whether the worker took it."""
        sample.worker = worker.url
        sample.num_tokens = sum(length for _, _, length in requests)
        sample.row_bytes = self.rows.row_bytes(sample.num_tokens)
        tensors = self.rows.take(sample.num_tokens)
        sample.begin()
        try:
            reply = await worker.client.step(requests, tensors, step_id=self.held.new_id(), draft_tokens=drafts)
        except asyncio.CancelledError:
            sample.end(UNFINISHED)
            raise
        except KvfoldError as error:
            sample.end(outcome_of(error))
        else:
            sample.timings_us = reply.timings_us
            sample.end(OK)
        return sample.outcome == OK

    async def truncate(self, sample: Sample, worker: Worker, request_id: str, length: int) -> bool:
        sample.worker = worker.url
        sample.begin()
        try:
            await worker.client.truncate(request_id, length)
        except KvfoldError as error:
            sample.end(outcome_of(error))
        else:
            sample.end(OK)
        return sample.outcome == OK


class ShapedLoad(Load):
    """Every step has the same shape."""

    def __init__(self, workers: Workers, held: Held, rows: Rows, seed: int, shape: Shape, sessions: Sessions) -> None:
        super().__init__(workers, held, rows, seed)
        self._shape, self._sessions = shape, sessions

    async def send(self, sample: Sample) -> None:
        try:
            session = await self._sessions.take() if self._shape.decode_requests else None
        except KvfoldError as error:
            sample.begin()
            sample.end(outcome_of(error))
            return
        try:
            await self._send(sample, session)
        except asyncio.CancelledError:
            if session is not None:
                self._sessions.discard(session)
            raise

    async def _send(self, sample: Sample, session: Session | None) -> None:
        shape = self._shape
        each = 1 + shape.draft_tokens
        requests: list[Request] = []
        if session is not None:
            requests = [(id, start, each) for id, start in zip(session.ids, session.committed, strict=True)]
        worker = session.worker if session is not None else None
        prompt_id = self.held.new_id()
        if shape.prompt_tokens:
            worker = worker or self.workers.place(prompt_id)
            self.held.hold(prompt_id, worker)
            requests.append((prompt_id, 0, shape.prompt_tokens))
        assert worker is not None, "a shape has requests"
        drafts = [shape.draft_tokens] * len(requests) if shape.draft_tokens else None
        stands = await self.step(sample, worker, requests, drafts)
        if shape.prompt_tokens:
            self.held.release_soon(prompt_id)
        if session is None:
            return
        if stands:
            session.committed = [start + each for start in session.committed]
            stands = not shape.draft_tokens or await self._withdraw(sample, session)
        if stands or sample.outcome in _STANDS:
            self._sessions.give_back(session, each)
        else:
            self._sessions.discard(session)

    async def _withdraw(self, sample: Sample, session: Session) -> bool:
        """What was rejected of each request's guesses; whether all could be."""
        calls = []
        for i, request_id in enumerate(session.ids):
            if rejected := self._shape.rejected(self._chance):
                session.committed[i] -= rejected
                truncated = sample.traffic.due(op="truncate")
                calls.append(self.truncate(truncated, session.worker, request_id, session.committed[i]))
        return all(await asyncio.gather(*calls))


class TraceLoad(Load):
    """A request of a trace at each arrival: its prompt in chunks, then a step for each token that is fed back.

    Steps behind the first one are due `pace_s` after the answer to the one before.
    """

    def __init__(
        self,
        workers: Workers,
        held: Held,
        rows: Rows,
        seed: int,
        arrivals: Iterable[Arrival],
        *,
        chunk_tokens: int,
        pace_s: float,
    ) -> None:
        super().__init__(workers, held, rows, seed)
        self._arrivals, self._chunk, self._pace_s = iter(arrivals), chunk_tokens, pace_s

    async def send(self, sample: Sample) -> None:
        arrival = next(self._arrivals)
        request_id = self.held.new_id()
        try:
            worker = self.workers.place(request_id)
        except KvfoldError as error:
            sample.begin()
            sample.end(outcome_of(error))
            return
        self.held.hold(request_id, worker)
        try:
            await self._replay(sample, worker, request_id, self._lengths(arrival))
        finally:
            self.held.release_soon(request_id)

    def _lengths(self, arrival: Arrival) -> Iterator[int]:
        """Tokens of each of its steps."""
        prompt = arrival.input_length
        for start in range(0, prompt, self._chunk):
            yield min(self._chunk, prompt - start)
        yield from (1 for _ in range(arrival.num_rows - prompt))

    async def _replay(self, sample: Sample, worker: Worker, request_id: str, lengths: Iterator[int]) -> None:
        start, traffic = 0, sample.traffic
        for length in lengths:
            if start:
                at = traffic.now() + self._pace_s
                if not await traffic.reached(at):
                    return
                sample = traffic.due(at)
            if not await self.step(sample, worker, [(request_id, start, length)]):
                return
            start += length


def outcome_of(error: KvfoldError) -> str:
    """The code of a refusal, or why there is none."""
    if isinstance(error, ApiError):
        return error.code
    return BAD_REPLY if isinstance(error, ReplyError) else UNREACHABLE
