"""scheduler.accounting against a worker's own memory and a count by hand; docs/scale.md has what it computes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvfold_client.scheduler import Policy, accounting, command, scale
from kvfold_client.scheduler.accounting import Measured, Traffic, fleet_load, per_request, saturation
from kvfold_client.scheduler.costs import Costs
from kvfold_kernels import backends
from kvfold_service import manifest as manifests
from kvfold_service.expected import sizes
from tests.service_cases import SMALL, export, feed, make_worker

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
RAW = json.loads((ROOT / "tests/bench/results/scheduler.json").read_text())


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 63, 95, 96])
def test_a_request_costs_what_a_worker_holds_of_it(num_tokens: int) -> None:
    """Entries, pages and bytes counted in a worker of the small model; rings for its only slot."""
    worker = make_worker(backends.load("cpu"), max_requests=1)
    feed(worker, "r", [min(num_tokens, 60), max(0, num_tokens - 60)])
    counted = per_request(sizes(SMALL), num_tokens)
    parts = worker.request("r")["compressors"]
    assert counted.entries == sum(part["num_entries"] for part in parts.values())
    assert counted.pages == sum(len(part["pages"]) for part in parts.values())
    used = [(group.pool.num_used, group.layout.page_bytes) for group in worker.caches.groups]
    assert counted.page_bytes == sum(pages * size for pages, size in used)
    assert counted.ring_bytes == worker.caches.bytes_by_pool()["rings"]
    exported = export(worker, "r")["compressors"]
    assert counted.entry_bytes == sum(len(part["entries"]["data"]) for part in exported.values())
    assert counted.open_row_bytes >= sum(len(part["open_rows"]["data"]) for part in exported.values())


def test_the_most_that_is_open() -> None:
    """Of all lengths up to this one, not of this one alone."""
    described = sizes(SMALL)
    shapes = {part["name"]: part for part in described["manifest"]["compressors"]}

    def exactly(num_tokens: int) -> int:
        total = 0
        for name, part in shapes.items():
            halves = 1 if part["kind"] == "hca" else 2
            live = max(0, part["ratio"] * (num_tokens // part["ratio"] - halves + 1))
            total += (num_tokens - live) * described["sizes"][name]["row_width"] * 4
        return total

    assert per_request(described, 96).open_row_bytes == max(exactly(n) for n in range(97))


def test_one_worker_by_hand() -> None:
    """One hca of 2 entries a page, 1,280 tokens a request, a request every 10 s."""
    part = {"name": "x", "kind": "hca", "ratio": 128, "head_dim": 512, "cache_format": "fp8_ds_mla", "page_entries": 2}
    request = per_request(sizes({"max_position": 4096, "compressors": [part]}), 1280)
    assert (request.entries, request.entry_bytes, request.pages, request.page_bytes) == (10, 5840, 5, 5 * 1728)
    assert request.row_bytes == 2048
    assert request.moved_bytes == 5840 + 127 * 1024 * 4
    traffic = Traffic(
        context_tokens=1280, output_tokens=256, requests_per_worker_s=0.1,
        prefill_tokens_per_s=512, decode_tokens_per_s=16, token_budget=512,
    )  # fmt: skip
    load = fleet_load(request, traffic, 3)
    assert load.requests == pytest.approx(0.3)
    assert load.rows == pytest.approx(0.3 * 1279)
    assert load.row_bytes == pytest.approx(0.3 * 1279 * 2048)
    assert load.prefill_steps == pytest.approx(0.3 * 2)
    assert load.decode_steps == pytest.approx(0.3 * 255 / 1.6)  # 16 s of decode, one every 10 s
    assert load.handles == pytest.approx(1.5)
    assert load.placements == pytest.approx(0.6)
    assert load.resident_requests == pytest.approx(0.3 * (2 + 16))
    assert load.resident_page_bytes == pytest.approx(0.3 * 18 * 5 * 1728)
    assert load.hand_over_bytes == pytest.approx(0.3 * request.moved_bytes)
    shares = saturation(load, Measured({3: 50.0}, step_us=1000.0, health_us=2000.0))
    assert shares.lookup_share == pytest.approx(0.6 * 50e-6)
    assert shares.health_share == pytest.approx(3 * 2000e-6)
    assert shares.step_share == pytest.approx(load.steps * 1000e-6)


@pytest.mark.parametrize("preset", scale.PRESETS)
def test_presets_at_a_million_tokens(preset: str) -> None:
    """The formula again, from the manifest's own layouts."""
    manifest = manifests.load(preset)
    request = per_request(sizes(preset), accounting.MILLION)
    entries = {part.name: accounting.MILLION // part.ratio for part in manifest.compressors}
    assert request.entries == sum(entries.values())
    layouts: dict[str, Any] = {part.name: part.layout() for part in manifest.compressors}
    assert request.entry_bytes == sum(n * layouts[name].format.entry_bytes for name, n in entries.items())
    assert request.page_bytes == sum(
        n // layouts[name].entries * layouts[name].page_bytes for name, n in entries.items()
    )


# -- the page ------------------------------------------------------------------------------------------------------


def test_the_page_has_the_tables() -> None:
    parts = scale.page().split("\n\n")
    tables = [part for part in parts if part.startswith("|")]
    assert len(tables) == 5
    for table in tables:
        assert table in PAGE
    assert max(len(line) for line in PAGE.splitlines() if line[:1] not in ("|", " ", "$")) <= 120


def test_measured_is_the_raw_result() -> None:
    raw = RAW["results"]["scale"]
    assert scale.MEASURED.lookup_us == {int(n): round(us, 1) for n, us in raw["lookup_us"].items()}
    assert scale.MEASURED.step_us == round(raw["step_us"], 1)
    assert scale.MEASURED.health_us == round(raw["health_us"], 1)


def test_assumptions_are_told() -> None:
    costs, traffic, policy = Costs(), Traffic(), Policy()
    for said in (
        f"{costs.step_us / 1e3:g} ms a forward pass",
        f"{costs.token_us:g} µs a row",
        f"{costs.link_bytes_per_s / 1e9:g} GB/s",
        f"{policy.token_budget:,} rows a step",
        f"{traffic.output_tokens:,} of them generated",
        f"{traffic.prefill_tokens_per_s:,.0f} tokens of prompt a second",
        f"{traffic.decode_tokens_per_s:g} a second",
        f"{traffic.token_budget:,} rows a prefill step",
    ):
        assert said in PAGE, said


@pytest.mark.parametrize("block", re.findall(r"```console\n\$ kvfold simulate (.*?)```", PAGE, re.DOTALL))
def test_a_comparison_is_what_the_command_prints(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same on any machine: nothing of it is measured here."""
    arguments, _, printed = block.partition("\n")
    assert command.run(arguments.split()) == 0
    assert capsys.readouterr().out.strip() == printed.strip()


def test_real_time_is_the_raw_result() -> None:
    for workers, runs in RAW["results"]["real"].items():
        if workers == "options":
            continue
        for variant, summary in runs.items():
            ttft, per_token, gap = summary["ttft_ms"], summary["per_token_ms"], summary["gap_ms"]
            numbers = (ttft["p50"], ttft["p99"], per_token["p50"], per_token["p99"], gap["p99"])
            cells = " | ".join(f"{number:.1f}" for number in numbers)
            assert f"| {workers} | {variant} | {cells} |" in PAGE
    assert " ".join(RAW["results"]["real"]["options"]) in PAGE.replace(" \\\n  ", " ")
