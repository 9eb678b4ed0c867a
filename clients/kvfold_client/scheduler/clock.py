"""Two clocks with one face: a virtual one, where work takes as long as a model says, and the real one.

pending = clock.start(work, took_us)      # a worker's step, a move from one worker to another
clock.wait([pending, …], until_us)        # those that have ended, in the order of their ends
"""

import math
import time
from collections.abc import Callable, Collection
from concurrent import futures
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, Self


@dataclass(slots=True, eq=False)
class Pending:
    """Work that has begun. `done_us` is when it ended or, on the virtual clock, will end."""

    number: int
    future: futures.Future[Any]
    done_us: float = math.inf

    def result(self) -> Any:
        """What the work gave, or raised."""
        return self.future.result()


class Clock(Protocol):
    def now_us(self) -> float: ...

    def start(self, work: Callable[[], Any], took_us: Callable[[Any], float]) -> Pending:
        """Begins work that takes `took_us(its result)` by the model; the real clock takes no notice of it."""
        ...

    def wait(self, pending: Collection[Pending], until_us: float) -> list[Pending]:
        """Until the first of these has ended, or until a time; inf: no time."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *exc_info: Any) -> None: ...


class VirtualClock:
    """Time passes only in `wait`. Work runs at once, in the order in which it is started: the same run every time."""

    def __init__(self) -> None:
        self._now_us = 0.0
        self._numbers = count()

    def now_us(self) -> float:
        return self._now_us

    def start(self, work: Callable[[], Any], took_us: Callable[[Any], float]) -> Pending:
        future: futures.Future[Any] = futures.Future()
        pending = Pending(next(self._numbers), future, self._now_us)
        try:
            result = work()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(result)
            pending.done_us += took_us(result)
        return pending

    def wait(self, pending: Collection[Pending], until_us: float) -> list[Pending]:
        first_us = min([until_us, *(work.done_us for work in pending)])
        assert first_us < math.inf, "nothing is left to wait for"
        self._now_us = max(self._now_us, first_us)
        ended = [work for work in pending if work.done_us <= self._now_us]
        return sorted(ended, key=lambda work: (work.done_us, work.number))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        pass


class RealClock:
    """Work runs on threads, at most `num_threads` at a time, and takes as long as it takes."""

    def __init__(self, num_threads: int) -> None:
        self._pool = futures.ThreadPoolExecutor(num_threads, thread_name_prefix="kvfold-simulate")
        self._numbers = count()
        self._began = time.perf_counter()

    def now_us(self) -> float:
        return (time.perf_counter() - self._began) * 1e6

    def start(self, work: Callable[[], Any], took_us: Callable[[Any], float]) -> Pending:
        pending = Pending(next(self._numbers), futures.Future())

        def timed() -> Any:
            try:
                return work()
            finally:
                pending.done_us = self.now_us()

        pending.future = self._pool.submit(timed)
        return pending

    def wait(self, pending: Collection[Pending], until_us: float) -> list[Pending]:
        timeout_s = None if until_us == math.inf else max(0.0, (until_us - self.now_us()) / 1e6)
        if pending:
            running = [work.future for work in pending]
            futures.wait(running, timeout_s, return_when=futures.FIRST_COMPLETED)
        else:
            assert timeout_s is not None, "nothing is left to wait for"
            time.sleep(timeout_s)
        return sorted((work for work in pending if work.future.done()), key=lambda work: (work.done_us, work.number))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._pool.shutdown()
