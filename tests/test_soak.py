"""soak: it runs through, it would notice, and how it judges memory. The half hour itself: python -m tests.soak"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.soak.make import make
from tests.soak.memory import growth_mib
from tests.soak.run import Soak
from tests.soak.streams import NUM_STREAMS, load


def series(*quarters: float) -> list[tuple[float, float]]:
    """Memory of a life of 60 s before it is warm and of four quarters of these MiB."""
    values = [500.0] * 12 + [mib for mib in quarters for _ in range(10)]
    return [(5.0 * (i + 1), mib) for i, mib in enumerate(values)]


@pytest.mark.parametrize(
    ("quarters", "growth"), [((100, 100, 100, 100), 0.0), ((90, 100, 105, 111.5), 11.5), ((120, 110, 100, 90), -20.0)]
)
def test_growth_is_what_comes_on_top_once_warm(quarters, growth):
    assert growth_mib(series(*quarters)) == growth
    assert growth_mib(series(*quarters)[:20]) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("soak")
    make(made)
    return made


@pytest.mark.long
def test_a_short_soak(folder):
    soak = Soak(folder, rate=60)
    try:
        soak.run(100)
        result = soak.result()
    finally:
        soak.kill()
    assert not result["wrong"]
    assert sum(
        result["events"][f"worker {how}"] for how in ("SIGKILL", "SIGTERM") if f"worker {how}" in result["events"]
    )
    assert result["events"]["client SIGKILL"] > 2
    checked = result["checked"]
    assert all(checked[what] > 0 for what in ("bytes checked", "digests checked", "leases ended", "restarts seen"))


@pytest.mark.long
def test_a_wrong_byte_is_noticed(folder):
    """One byte of every entry that csa is expected to make differs."""
    (part,) = [part for part in load(folder) if part.name.endswith("csa")]
    for stream in range(NUM_STREAMS):
        entries = np.load(folder / f"{part.name}.{stream}.entries.npy")
        entries[:, 3] ^= 1
        np.save(folder / f"{part.name}.{stream}.entries.npy", entries)
    soak = Soak(folder, rate=60)
    try:
        soak.run(60)
    finally:
        soak.kill()
    assert "not the reference's" in soak.wrong[0] or "another digest" in soak.wrong[0]
