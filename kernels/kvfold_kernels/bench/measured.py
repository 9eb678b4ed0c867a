"""The benchmark: passes over all cases, in each of which the backends take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvfold_kernels import backends
from kvfold_kernels.backends import Backend
from kvfold_kernels.bench.cases import Case
from kvfold_kernels.bench.check import check
from kvfold_kernels.bench.copying import copy_rate
from kvfold_kernels.bench.plans import time_plans
from kvfold_kernels.bench.problem import Problem
from kvfold_kernels.bench.result import BenchResult, Row, environment
from kvfold_kernels.bench.timing import in_turns

REFERENCE_WINDOWS = 8
"""The reference takes a window at a time, in Python: steps with more are left to the others."""

Told = Callable[[int, str], None]
"""Told how many parts of the work are done, and what is being done."""


@dataclass(frozen=True, slots=True)
class Work:
    cases: Sequence[Case]
    dtypes: Sequence[str]
    backends: Sequence[Backend]
    left_out: dict[str, str]
    passes: int
    """Times through everything: a machine whose speed drifts shows it in the spread."""
    rounds: int
    """Of each pass."""
    plans: bool = True

    @property
    def num_parts(self) -> int:
        return self.passes * (len(self.cases) * len(self.dtypes) + 1)


def choose(names: Sequence[str] | None) -> tuple[list[Backend], dict[str, str]]:
    """The backends of these names, or all that can run here; and why the others cannot.

    Raises BackendUnavailableError for one that was asked for by name.
    """
    if names is not None:
        return [backends.load(name) for name in names], {}
    reasons = {name: backends.why_not(name) for name in backends.NAMES}
    left_out = {name: reason for name, reason in reasons.items() if reason is not None}
    return [backends.load(name) for name in backends.NAMES if name not in left_out], left_out


def measure(work: Work, told: Told) -> BenchResult:
    """Raises WrongResultError before anything wrong is timed."""
    result = BenchResult(environment(), left_out=work.left_out)
    devices = sorted({backend.device for backend in work.backends})
    done = 0
    for number in range(work.passes):
        told(done, f"pass {number + 1} of {work.passes}: copy rate and plans")
        for device in devices:
            result.copy_bytes_per_s.setdefault(device, []).append(copy_rate(device))
        if work.plans:
            _add_plans(result, work.rounds)
        done += 1
        for case in work.cases:
            for dtype in work.dtypes:
                told(done, f"pass {number + 1} of {work.passes}: {case.name}, {dtype}")
                _add_row(result, work, case, dtype)
                done += 1
    told(done, "done")
    return result


def _add_plans(result: BenchResult, rounds: int) -> None:
    for case, times in time_plans(rounds):
        into = result.plans.setdefault(case, {})
        for name, samples in times.items():
            into.setdefault(name, []).extend(samples)


def _add_row(result: BenchResult, work: Work, case: Case, dtype: str) -> None:
    """Backends of one device share a problem, and take turns on it."""
    able = [backend for backend in work.backends if backend.name != "reference" or _is_small(case)]
    row = result.row(case.name, dtype)
    for device in sorted({backend.device for backend in able}):
        torch.manual_seed(0)
        problem = Problem(case, dtype, device)
        if row is None:
            row = Row(case.name, dtype, case.num_windows, problem.min_bytes)
            result.rows.append(row)
        here = [backend for backend in able if backend.device == device]
        for backend in here:
            if backend.name not in row.us:
                check(problem, backend)
        functions = {backend.name: problem.runs(backend.compress) for backend in here}
        for name, samples in in_turns(functions, work.rounds, device).items():
            row.us.setdefault(name, []).extend(samples)


def _is_small(case: Case) -> bool:
    return case.num_windows <= REFERENCE_WINDOWS
