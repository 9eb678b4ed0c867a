"""scheduler.check: wrong entries and weights are noticed, roundings told from them; what the worker extra gives."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvfold_client.scheduler import (
    Arrival,
    Costs,
    OnPaper,
    Policy,
    RowSource,
    Simulation,
    SimulationError,
    VirtualClock,
    extra,
    shapes_of,
)
from kvfold_client.scheduler.check import Checker, _near
from kvfold_client.scheduler.request import Request
from kvfold_kernels import backends
from kvfold_service import manifest as manifests
from kvfold_service.expected import Reference, sizes
from tests.cases import FORMATS
from tests.http_cases import services
from tests.scheduler_cases import WEIGHTS, arrivals, client_of, over
from tests.service_cases import SMALL, changed, entries_of, make_worker, send, tensor

serve = pytest.fixture(services)
NUM_TOKENS = 96


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def manifest_of(kind: str, cache_format: str) -> dict[str, Any]:
    usual = {"hca": (8, 512), "csa": (4, 512), "indexer": (4, 128)}[kind]
    part = {"name": "x", "kind": kind, "ratio": usual[0], "head_dim": usual[1], "cache_format": cache_format}
    return {"max_position": 256, "compressors": [part | {"page_entries": 3}]}


@pytest.mark.parametrize(("kind", "cache_format"), FORMATS)
def test_the_cpus_entries_pass_and_one_wrong_row_does_not(kind: str, cache_format: str) -> None:
    manifest = manifests.parse(manifest_of(kind, cache_format), "test").to_json()
    source = RowSource(1, shapes_of(manifest))
    request = Request(0, "r", Arrival(0, NUM_TOKENS, 1), 0.0, committed=NUM_TOKENS)
    rows = source.rows(0, "x", 0, NUM_TOKENS)
    checker = Checker(manifest, WEIGHTS, source)
    checker(request, holding(manifest, rows))
    assert checker.checked.entries == NUM_TOKENS // manifest["compressors"][0]["ratio"]
    if cache_format != "fp32":  # where every rounding shows
        assert checker.checked.rounded <= checker.checked.entries / 4
    for position in (0, 41, NUM_TOKENS - 1):
        wrong = rows.copy()
        wrong[position] = source.rows(0, "x", position, position + 1, guessed=True)[0]
        with pytest.raises(SimulationError, match=r"r, x: entry \d+ is not the reference's"):
            checker(request, holding(manifest, wrong))
    with pytest.raises(SimulationError, match=r"96 tokens, entries from 0 on, and should be 97 tokens"):
        checker(Request(0, "r", Arrival(0, NUM_TOKENS, 2), 0.0), holding(manifest, rows))


def holding(manifest: dict[str, Any], rows: np.ndarray) -> Any:
    """A client whose worker, on the CPU backend, was given these rows in one step."""
    worker = make_worker(backends.load("cpu"), manifest, max_step_tokens=len(rows))
    body = {
        "version": 1, "step_id": "s", "requests": [{"id": "r", "start": 0, "num_tokens": len(rows)}],
        "query_start_loc": [0, len(rows)], "positions": list(range(len(rows))),
        "tensors": [tensor(rows, "x", "bf16")],
    }  # fmt: skip
    send(worker, body)
    held = SimpleNamespace(committed=len(rows), entries=entries_of(worker, "r", "x"), first_entry=0)
    return SimpleNamespace(export=lambda id, names: SimpleNamespace(compressors={"x": held}))


def test_near_is_a_step_of_the_format() -> None:
    part = {"cache_format": "bf16"}
    a = np.array([[1.0, -2.0, 1e-7]], np.float32)
    assert _near(a, a * np.float32(1 + 2**-7), part).all()
    assert not _near(a, a * np.float32(1 + 2**-6), part)[0, :2].any()
    assert not _near(a, -a, part)[0, :2].any()
    assert _near(np.array([[448.0, 2**-9]]), np.array([[448.0, 0.0]]), {"cache_format": "fp8"}).all()


@pytest.mark.anyio
async def test_an_entry_that_the_worker_got_wrong_ends_the_simulation(serve: Any) -> None:
    def spoil(real: Callable[..., int], windows: torch.Tensor, *others: Any) -> int:
        launches = real(windows, *others)
        if windows.shape[1]:
            others[3][:, :100] ^= 0x40
        return launches

    api = serve(changed(backends.load("cpu"), spoil))
    with client_of(api) as client, pytest.raises(SimulationError, match="entry 0 is not the reference's"):
        await over(client, arrivals((40, 3), (200, 9), every_ms=0.1))
    assert not api.service.worker.requests


@pytest.mark.anyio
async def test_other_weights_are_noticed_before_anything_runs(serve: Any) -> None:
    manifest = (await serve().get("/v1/manifest")).json()
    with pytest.raises(SimulationError, match="'random:2' are not the worker's"):
        Checker(manifest, "random:2", RowSource(1, shapes_of(manifest)))
    with pytest.raises(SimulationError, match="there is no weights file"):
        Checker(manifest, "nowhere", RowSource(1, shapes_of(manifest)))


def test_paper_has_no_entries() -> None:
    manifest = manifests.parse(SMALL, "test").to_json()
    source = RowSource(1, shapes_of(manifest))
    workers = OnPaper({"w": "any"}, sizes(SMALL))
    simulation = Simulation(
        arrivals((9, 2)), workers, source, VirtualClock(),
        policy=Policy(), costs=Costs(), on_finish=Checker(manifest, WEIGHTS, source),
    )  # fmt: skip
    with pytest.raises(SimulationError, match="no entry to check on paper"):
        simulation.run()


def test_without_the_worker_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra, "entry_points", lambda **wanted: ())
    with pytest.raises(SimulationError, match=r"needs the worker extra .*pip install 'kvfold\[worker\]'"):
        extra.load("reference")


def test_the_reference_in_any_blocks() -> None:
    manifest = manifests.parse(SMALL, "test").to_json()
    source, reference = RowSource(1, shapes_of(manifest)), Reference(manifest, WEIGHTS)
    for name, shape in source.shapes.items():
        num_entries = NUM_TOKENS // shape.ratio

        def block(first: int, stop: int, name: str = name, ratio: int = shape.ratio) -> np.ndarray:
            return reference.entries(
                name, first, stop, source.rows(0, name, reference.first_row(name, first), stop * ratio)
            )

        parts = [block(first, first + 1) for first in range(num_entries)]
        np.testing.assert_array_equal(np.concatenate(parts), block(0, num_entries))


def test_sizes_are_the_layouts() -> None:
    described = sizes("tiny")
    assert described["manifest"]["model"] == "tiny"
    assert described["sizes"]["layers.0.hca"] == {
        "halves": 1, "row_width": 1024, "ring_rows": 270, "ring_item_bytes": 4,
        "entry_bytes": 584, "page_entries": 2, "page_bytes": 1728,
    }  # fmt: skip
    with pytest.raises(ValueError, match="no preset 'none'"):
        sizes("none")
