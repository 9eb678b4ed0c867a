"""Leases that last as long as a `with`: each request is renewed for `seconds`, three times in each.

    with client.heartbeat("r1", "r2") as beats:
        …                       # the requests live on, whatever happens in between
        beats.add("r3")
        beats.lost              # those that the worker does not know any more

A beat that fails for any other reason is made up for by the next one.
"""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from .errors import KvfoldError, UnknownRequest

BEATS_PER_LEASE = 3


class _Beats:
    """Which requests are renewed, and which are lost."""

    def __init__(self, ids: Iterable[str], seconds: float) -> None:
        if not seconds > 0:
            raise ValueError(f"seconds must be above 0, not {seconds}")
        self.seconds = seconds
        self.pause = seconds / BEATS_PER_LEASE
        self._ids = set(ids)
        self.lost: set[str] = set()

    def add(self, id: str) -> None:
        """Renew this request too, from the next beat on."""
        self.lost.discard(id)
        self._ids.add(id)

    def discard(self, id: str) -> None:
        """Renew it no longer; its lease ends by itself."""
        self._ids.discard(id)

    def _due(self) -> list[str]:
        return sorted(self._ids)

    @contextmanager
    def _beat(self, id: str) -> Iterator[None]:
        try:
            yield
        except UnknownRequest:
            if id in self._ids:
                self._ids.discard(id)
                self.lost.add(id)
        except (KvfoldError, RuntimeError):  # RuntimeError: the client was closed
            pass


class Heartbeat(_Beats):
    """Beats on a thread of its own, from entering the `with` until leaving it."""

    def __init__(self, lease: Callable[[str, float], Any], ids: Iterable[str], seconds: float) -> None:
        super().__init__(ids, seconds)
        self._lease = lease
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvfold-heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            for id in self._due():
                with self._beat(id):
                    self._lease(id, self.seconds)
            if self._over.wait(self.pause):
                return


class AsyncHeartbeat(_Beats):
    """Beats as a task, from entering the `async with` until leaving it."""

    def __init__(self, lease: Callable[[str, float], Awaitable[Any]], ids: Iterable[str], seconds: float) -> None:
        super().__init__(ids, seconds)
        self._lease = lease
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc_info: Any) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            for id in self._due():
                with self._beat(id):
                    await self._lease(id, self.seconds)
            await asyncio.sleep(self.pause)
