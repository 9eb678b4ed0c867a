"""Functions timed in turns, so that a machine that slows down slows all of them. Microseconds a call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Functions = Mapping[str, Callable[[], object]]
_ROUND_US = 2000.0
"""A turn takes about so long: shorter functions are called several times in it."""
_MOST_CALLS = 1000


def in_turns(functions: Functions, rounds: int, device: str) -> dict[str, list[float]]:
    """Of each function a time a round; on a GPU those of CUDA graph replays, without the host's part."""
    return _graphs(functions, rounds) if device == "cuda" else _calls(functions, rounds)


def median_us(call: Callable[[], object], repeats: int) -> float:
    """Median time of one call, after a warm-up of a tenth of the repeats."""
    for _ in range(max(1, repeats // 10)):
        call()
    times = []
    for _ in range(repeats):
        began = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - began)
    return statistics.median(times) / 1000


def _calls(functions: Functions, rounds: int) -> dict[str, list[float]]:
    num_calls = {}
    for name, function in functions.items():
        function()
        num_calls[name] = _fitting(seconds(function, 1) * 1e6)
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(seconds(function, num_calls[name]) * 1e6 / num_calls[name])
    return times


def _graphs(functions: Functions, rounds: int) -> dict[str, list[float]]:
    graphs = {name: _captured(function) for name, function in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, (graph, num_calls) in graphs.items():
            times[name].append(event_us(graph.replay) / num_calls)
    return times


def _captured(function: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, int]:
    """A graph of several calls, replayed once, and how many."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()  # compiles
        function()
    torch.cuda.current_stream().wait_stream(stream)
    num_calls = _fitting(event_us(function))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(num_calls):
            function()
    graph.replay()
    return graph, num_calls


def _fitting(us: float) -> int:
    return max(1, min(_MOST_CALLS, int(_ROUND_US / max(us, 0.1))))


def seconds(function: Callable[[], object], num_calls: int) -> float:
    """Of so many calls."""
    began = time.perf_counter()
    for _ in range(num_calls):
        function()
    return time.perf_counter() - began


def event_us(launch: Callable[[], object]) -> float:
    """Of what a call puts on the GPU's stream."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3
