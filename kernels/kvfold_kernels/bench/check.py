"""Whether a backend does what the definition says, before it is timed: a fast wrong kernel is no result."""

from __future__ import annotations

import numpy as np
import torch

from kvfold_kernels import plan as p
from kvfold_kernels.backends import Backend
from kvfold_kernels.bench.problem import Problem
from kvfold_kernels.compress import reference
from kvfold_kernels.pages import read_entries

_MOST_WINDOWS = 8
_BYTES_AN_ENTRY = 2
"""May differ: sums in another order round a value near a quantiser's boundary to its other side."""


class WrongResultError(RuntimeError):
    """A backend's bytes are not the definition's."""


def check(problem: Problem, backend: Backend) -> None:
    """Runs the step; compares the rows it keeps, and some of its entries with the reference's. Raises WrongResultError.

    Rows are the input's bits. The entries of up to 8 windows, spread over the step, may differ in 2 bytes each.
    """
    plan, layout = problem.plan, problem.compressor.layout
    chosen = np.unique(np.linspace(0, plan.num_windows - 1, _MOST_WINDOWS, dtype=np.int64)) if plan.boundary else []
    few = torch.from_numpy(plan.windows[:, chosen].copy())
    expected = _reference(problem, few)
    backend.compress(*problem.operands)
    slots = few[p.SLOT].long()
    found = read_entries(problem.pages.cpu(), slots, layout)
    differing = int((found != read_entries(expected, slots, layout)).sum())
    if differing > _BYTES_AN_ENTRY * len(slots):
        raise WrongResultError(
            f"backend {backend.name}, {problem.case.name}: {differing} bytes of {len(slots)} entries differ from the "
            "reference's"
        )
    _check_rows(problem, backend)


def _reference(problem: Problem, windows: torch.Tensor) -> torch.Tensor:
    """Pages `[num_pages, page_bytes]` on the CPU with the reference's entries of these windows."""
    pages = torch.zeros_like(problem.pages, device="cpu")
    compressor = problem.compressor
    on_cpu = type(compressor)(
        compressor.geometry,
        compressor.layout,
        ape=compressor.ape.cpu(),
        norm_weight=compressor.norm_weight.cpu(),
        cos_sin=compressor.cos_sin.cpu(),
    )
    no_rows = torch.empty(p.APPEND_FIELDS, 0, dtype=torch.int32)
    reference.compress(windows, no_rows, problem.rows.cpu(), problem.rings.cpu(), pages, on_cpu)
    return pages


def _check_rows(problem: Problem, backend: Backend) -> None:
    appends = problem.appends[:, : problem.plan.num_appends].long()
    kept = problem.rings.flatten(0, 1)[appends[p.APPEND_RING]]
    if not torch.equal(kept, problem.rows[appends[p.APPEND_INPUT]].to(kept.dtype)):
        raise WrongResultError(f"backend {backend.name}, {problem.case.name}: kept rows are not the input's")
