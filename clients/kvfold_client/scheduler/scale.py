"""The tables of docs/scale.md: what `accounting` computes for the presets, as Markdown."""

from collections.abc import Iterable, Sequence

from .accounting import WORKERS, FleetLoad, Measured, PerRequest, Traffic, fleet_load, per_request, saturation
from .extra import load

PRESETS = ("deepseek-v4-flash", "deepseek-v4-pro")
MEASURED = Measured(
    lookup_us={1: 2.6, 8: 7.4, 64: 45.3, 1000: 646.5},
    step_us=1433.3,
    health_us=528.6,
)
"""From tests/bench/results/scheduler.json, which a test compares."""


def page(traffic: Traffic | None = None) -> str:
    """All tables, of both presets. Raises SimulationError without the worker extra."""
    traffic = traffic or Traffic()
    requests = {preset: per_request(load("sizes")(preset), traffic.context_tokens) for preset in PRESETS}
    loads = {preset: [fleet_load(of, traffic, workers) for workers in WORKERS] for preset, of in requests.items()}
    return "\n\n".join(
        [
            f"One request of {traffic.context_tokens:,} tokens:",
            request_table(requests),
            *(f"{preset}, a second:\n\n{load_table(of)}" for preset, of in loads.items()),
            "What one core did, a second:",
            measured_table(MEASURED),
            "Shares of such a core:",
            saturation_table(loads[PRESETS[0]], MEASURED),
        ]
    )


def request_table(requests: dict[str, PerRequest]) -> str:
    rows = [
        ("entries", *(f"{of.entries:,}" for of in requests.values())),
        ("their bytes", *(_bytes(of.entry_bytes) for of in requests.values())),
        ("pages, so handles", *(f"{of.pages:,}" for of in requests.values())),
        ("bytes of these pages", *(_bytes(of.page_bytes) for of in requests.values())),
        ("bytes of rings", *(_bytes(of.ring_bytes) for of in requests.values())),
        ("open rows, at most", *(_bytes(of.open_row_bytes) for of in requests.values())),
        ("a hand-over moves", *(_bytes(of.moved_bytes) for of in requests.values())),
        ("rows of one token, bf16", *(_bytes(of.row_bytes) for of in requests.values())),
    ]
    return _markdown(("", *requests), rows)


def load_table(loads: Sequence[FleetLoad]) -> str:
    rows = [
        ("requests that arrive", *(f"{of.requests:.3g}" for of in loads)),
        ("tokens", *(f"{of.rows:,.0f}" for of in loads)),
        ("rows from the models", *(_bytes(of.row_bytes) for of in loads)),
        ("entries written", *(_bytes(of.entry_bytes) for of in loads)),
        ("steps, prefill + decode", *(f"{of.prefill_steps:,.1f} + {of.decode_steps:,.1f}" for of in loads)),
        ("handles that come into being", *(f"{of.handles:,.0f}" for of in loads)),
        ("hand-overs", *(_bytes(of.hand_over_bytes) for of in loads)),
        ("placements", *(f"{of.placements:.3g}" for of in loads)),
        ("held at a time: requests", *(f"{of.resident_requests:,.1f}" for of in loads)),
        ("held at a time: pages", *(_bytes(of.resident_page_bytes) for of in loads)),
    ]
    return _markdown(("workers", *(f"{of.workers:,}" for of in loads)), rows)


def measured_table(measured: Measured) -> str:
    rows = [
        *((f"owner among {n:,} workers", f"{1e6 / us:,.0f}") for n, us in measured.lookup_us.items()),
        ("decode step of one request", f"{1e6 / measured.step_us:,.0f}"),
        ("look at a worker", f"{1e6 / measured.health_us:,.0f}"),
    ]
    return _markdown(("call", "a second"), rows)


def saturation_table(loads: Iterable[FleetLoad], measured: Measured) -> str:
    found = [saturation(of, measured) for of in loads]
    rows = [
        ("placements", *(_share(of.lookup_share) for of in found)),
        ("looking at every worker, once a second", *(_share(of.health_share) for of in found)),
        ("sending every worker's steps", *(_share(of.step_share) for of in found)),
    ]
    return _markdown(("workers", *(f"{of.workers:,}" for of in found)), rows)


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _bytes(count: float) -> str:
    """Powers of 1000."""
    units = ["B", "kB", "MB", "GB", "TB", "PB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        del units[0]
    return f"{count:.3g} {units[0]}"


def _share(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 else f"{share:.2%}" if share >= 1e-4 else "< 0.01%"
