"""loadtest.traffic, schedule, summary: open and closed loops against a service whose behaviour is known exactly."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time

import pytest

from kvfold_client.loadtest import OK, UNFINISHED, Sample, Traffic, even, percentile, poisson, precise_loop, summarise

TICK_S = 0.001


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when everybody waits, and then at once: the loops' arithmetic is exact here, on any machine."""

    virtual_s = 0.0

    def time(self) -> float:
        return self.virtual_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.virtual_s = max(self.virtual_s, self._scheduled[0].when())
        super()._run_once()


def run(main):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class Service:
    """Answers one step at a time, each after `service_s`, and does nothing in [stall_from, stall_until)."""

    def __init__(self, service_s: float = TICK_S, stall_from: float = 9e9, stall_until: float = 9e9) -> None:
        self.service_s, self.stall_from, self.stall_until = service_s, stall_from, stall_until
        self.lock = asyncio.Lock()
        self.most_at_once = self.at_once = 0

    async def send(self, sample: Sample) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        sample.begin()
        async with self.lock:
            await asyncio.sleep(self.service_s)
            while self.stall_from <= sample.traffic.now() < self.stall_until:
                await asyncio.sleep(TICK_S)
        sample.num_tokens, sample.timings_us = 3, {"kernel": 400.0}
        sample.end(OK)
        self.at_once -= 1


def test_a_stall_shows_in_the_open_loop_and_hides_in_a_closed_one():
    """A worker that stands still for 0.6 of 3 s. Callers who come by chance meet that stall in a fifth of all cases,
    and wait up to 0.6 s; a client that waits for each answer meets it once."""

    async def both():
        opened, closed = Traffic(), Traffic()
        await opened.open_loop(even(100, 3), Service(stall_from=1, stall_until=1.6).send)
        await closed.closed_loop(1, 3, Service(stall_from=1, stall_until=1.6).send)
        return (summarise(traffic.samples, 0, 3, slo_ms=100) for traffic in (opened, closed))

    opened, closed = run(both())
    assert opened["due"] == 300
    # Of 300 steps 60 fall due in the stall and wait for its rest, 600 to 10 ms: a share p of all waits longer than
    # 600 − 3000·p ms.
    assert opened["latency_ms"]["p50"] == pytest.approx(1)
    assert opened["latency_ms"]["p90"] == pytest.approx(300, abs=35)
    assert opened["latency_ms"]["p99"] == pytest.approx(570, abs=35)
    assert opened["within_slo"] == pytest.approx(1 - 50 / 300, abs=0.03)
    assert closed["due"] == pytest.approx(2400, abs=2)
    assert closed["latency_ms"]["max"] == pytest.approx(600, abs=2)
    assert closed["latency_ms"]["p99.9"] == pytest.approx(1), "the closed loop was the naive one here"


def test_latency_counts_from_the_due_time_when_too_many_are_in_flight():
    async def main():
        service, traffic = Service(service_s=0.02), Traffic()
        await traffic.open_loop(even(100, 1), service.send, max_in_flight=2)
        return service, traffic

    service, traffic = run(main())
    assert service.most_at_once == 2
    result = summarise(traffic.samples, 0, 1)
    # Twice what the service can do: half of the steps are late at the end, the last one by as long again.
    assert result["latency_ms"]["max"] == pytest.approx(1000, rel=0.05)
    assert result["call_ms"]["max"] == pytest.approx(40)
    assert result["throughput_per_s"] == pytest.approx(50, abs=1)
    assert result["outcomes"] == {OK: 100}
    phases = result["phases_us"]
    assert sum(phases.values()) == pytest.approx(result["latency_ms"]["mean"] * 1e3, rel=1e-3)
    assert phases["wait"] > 0.8 * sum(phases.values())
    assert phases["kernel"] == 400


def test_steps_without_an_answer_count_with_what_they_have_waited():
    async def silent(sample: Sample) -> None:
        sample.begin()
        await asyncio.sleep(60)

    async def main():
        traffic = Traffic()
        await traffic.open_loop(even(50, 0.2), silent, max_in_flight=4, drain_s=0.3)
        return traffic

    traffic = run(main())
    result = summarise(traffic.samples, 0, 0.2, slo_ms=1000)
    assert result["outcomes"] == {UNFINISHED: 10}
    assert result["latency_ms"]["max"] == pytest.approx(480, abs=2), "0.18 s until the last arrival, and 0.3 s more"
    assert result["latency_ms"]["p50"] == pytest.approx(380, abs=2)
    assert result["throughput_per_s"] == result["goodput_per_s"] == 0
    assert traffic.num_in_flight == 0


def test_steps_leave_on_time():
    async def main():
        traffic = Traffic()
        await traffic.open_loop(poisson(200, 1, seed=5), Service(service_s=0).send)
        return traffic

    traffic = run(main())
    assert [s.scheduled_s for s in traffic.samples] == list(poisson(200, 1, seed=5))
    assert all(s.sent_s == pytest.approx(s.scheduled_s, abs=1e-9) for s in traffic.samples)
    assert len(traffic.woke_late_s) == len(traffic.samples)


def test_the_precise_loop_sleeps_for_less_than_a_millisecond():
    async def main():
        slept = []
        for _ in range(50):
            began = time.perf_counter()
            await asyncio.sleep(2e-4)
            slept.append(time.perf_counter() - began)
        return min(slept)

    with asyncio.Runner(loop_factory=precise_loop) as runner:
        assert 2e-4 <= runner.run(main()) < 9e-4


def test_a_stop_ends_both_loops():
    async def stopped(begin):
        stop = asyncio.Event()
        traffic = Traffic(stop)
        asyncio.get_running_loop().call_later(0.2, stop.set)
        await begin(traffic, Service())
        return traffic

    for begin in (
        lambda traffic, service: traffic.open_loop(even(50, 60), service.send),
        lambda traffic, service: traffic.closed_loop(3, 60, service.send),
    ):
        traffic = run(stopped(begin))
        assert 5 < len(traffic.samples) < 400
        assert traffic.now() < 0.5
        assert {sample.outcome for sample in traffic.samples} == {OK}


def test_an_error_of_ours_ends_the_traffic():
    async def broken(sample: Sample) -> None:
        raise ZeroDivisionError

    for loop in (lambda t: t.open_loop(even(50, 60), broken), lambda t: t.closed_loop(2, 60, broken)):
        with pytest.raises(ExceptionGroup) as caught:
            run(loop(Traffic()))
        assert caught.group_contains(ZeroDivisionError)


def test_a_closed_loop_keeps_its_bounds():
    async def main():
        service, traffic, few = Service(), Traffic(), Traffic()
        await traffic.closed_loop(5, 0.3, service.send)
        await few.closed_loop(5, 60, service.send, max_steps=20)
        return service, traffic, few

    service, traffic, few = run(main())
    assert service.most_at_once == 5
    assert traffic.now() < 0.6
    assert len(few.samples) == 20


def test_a_lane_that_is_refused_pauses():
    async def refused(sample: Sample) -> None:
        sample.begin()
        sample.end("queue_full")

    async def main():
        traffic = Traffic()
        await traffic.closed_loop(2, 0.5, refused)
        return traffic

    samples = run(main()).samples
    assert len(samples) in (20, 22), "every 50 ms, each of two lanes"
    assert summarise(samples, 0, 0.5)["outcomes"] == {"queue_full": len(samples)}
    assert summarise(samples, 0, 0.5)["latency_ms"] == {}


def test_poisson_arrivals():
    arrivals = list(poisson(1000, 20, seed=1))
    assert arrivals == list(poisson(1000, 20, seed=1)) != list(poisson(1000, 20, seed=2))
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] < 20
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    assert statistics.fmean(gaps) == pytest.approx(1e-3, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(1e-3, rel=0.05), "exponential: as wide as its mean"


@pytest.mark.parametrize(
    ("share", "expected"), [(0.0, 1), (0.1, 1), (0.11, 2), (0.5, 5), (0.9, 9), (0.99, 10), (1, 10)]
)
def test_percentile_is_a_value_that_was_seen(share, expected):
    assert percentile(range(1, 11), share) == expected


def test_warm_up_is_left_out_but_its_answers_are_throughput():
    traffic = Traffic()
    for due, done, outcome in (
        (0.5, 1.2, OK),
        (1.0, 1.5, OK),
        (1.5, 2.5, OK),
        (1.6, 1.7, "queue_full"),
        (2.0, 2.1, OK),
    ):
        sample = traffic.due(due)
        sample.sent_s, sample.done_s, sample.outcome, sample.num_tokens = due, done, outcome, 10
    result = summarise(traffic.samples, 1.0, 2.0, slo_ms=600)
    assert (result["due"], result["throughput_per_s"], result["tokens_per_s"]) == (3, 2, 20)
    assert (result["goodput_per_s"], result["within_slo"]) == (1, pytest.approx(1 / 3))
    assert result["latency_ms"]["max"] == 1000
    assert result["outcomes"] == {OK: 2, "queue_full": 1}
