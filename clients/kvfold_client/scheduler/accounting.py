"""Scale on paper: bytes, steps, handles a second, from a manifest's geometry and a rate of arrivals. Pure arithmetic.

For a request of n tokens, with r, e, p, b the ratio, entry bytes, page entries and page
bytes of a compressor, summed over compressors:

    entries   n // r          pages (handles)   ⌈(n // r) / p⌉
    written   entries · e     held              pages · b
    moved     entries · e and the open rows: what a hand-over sends

A fleet of w workers gets w · requests_per_worker_s requests a second; the rest are products.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .rows import Shape, shapes_of

MILLION = 1 << 20
WORKERS = (1, 8, 64, 1000)


@dataclass(frozen=True, slots=True)
class PerRequest:
    """What one request of a model costs, all compressors together. Bytes of pages and rings are memory of a worker."""

    tokens: int
    entries: int
    entry_bytes: int
    pages: int
    page_bytes: int
    ring_bytes: int
    open_row_bytes: int
    row_bytes: int
    """Of one token: what a step carries."""

    @property
    def moved_bytes(self) -> int:
        return self.entry_bytes + self.open_row_bytes


def per_request(described: Mapping[str, Any], tokens: int) -> PerRequest:
    """`described` as `kvfold_service.expected.sizes` gives it."""
    entries = entry_bytes = pages = page_bytes = ring_bytes = open_row_bytes = row_bytes = 0
    for shape in shapes_of(described["manifest"]):
        sizes: Mapping[str, int] = described["sizes"][shape.name]
        own = tokens // shape.ratio
        own_pages = -(-own // sizes["page_entries"])
        entries += own
        entry_bytes += own * sizes["entry_bytes"]
        pages += own_pages
        page_bytes += own_pages * sizes["page_bytes"]
        kept_row_bytes = sizes["row_width"] * sizes["ring_item_bytes"]
        ring_bytes += sizes["ring_rows"] * kept_row_bytes
        open_row_bytes += _most_open(shape, tokens) * kept_row_bytes
        row_bytes += shape.row_bytes
    return PerRequest(tokens, entries, entry_bytes, pages, page_bytes, ring_bytes, open_row_bytes, row_bytes)


def _most_open(shape: Shape, tokens: int) -> int:
    """The most rows that a request of up to these tokens leaves open: it may stand anywhere in a window."""
    last = max(tokens // shape.ratio * shape.ratio - 1, 0)
    return max(shape.num_open(tokens), shape.num_open(last))


@dataclass(frozen=True, slots=True)
class Traffic:
    """What comes, and how fast the model is. All of it is assumed."""

    context_tokens: int = MILLION
    """Prompt and output together."""
    output_tokens: int = 1024
    requests_per_worker_s: float = 1 / 60
    prefill_tokens_per_s: float = 32768.0
    """Of one worker's model: how long a prompt keeps its pages before its first token."""
    decode_tokens_per_s: float = 50.0
    """Of one request."""
    token_budget: int = 8192
    """Rows of a prefill step."""

    @property
    def prompt_tokens(self) -> int:
        return self.context_tokens - self.output_tokens


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """What a fleet does in a second, and what it holds."""

    workers: int
    requests: float
    rows: float
    row_bytes: float
    """From the models to their workers: on one device, or over whatever lies between them."""
    entry_bytes: float
    """Written to pages."""
    prefill_steps: float
    decode_steps: float
    handles: float
    """Pages that come into being."""
    hand_over_bytes: float
    placements: float
    """Questions to the control plane: an owner for prefill and one for decode."""
    resident_requests: float
    resident_page_bytes: float
    """Of those, as if each had its full length."""

    @property
    def steps(self) -> float:
        return self.prefill_steps + self.decode_steps


def fleet_load(request: PerRequest, traffic: Traffic, workers: int) -> FleetLoad:
    """A second of a fleet. Decodes of one worker share its steps: by Little's law so many are there at a time."""
    rate = workers * traffic.requests_per_worker_s
    rows = rate * (traffic.prompt_tokens + traffic.output_tokens - 1)
    decode_s = traffic.output_tokens / traffic.decode_tokens_per_s
    resident_s = traffic.prompt_tokens / traffic.prefill_tokens_per_s + decode_s
    batch = max(1.0, traffic.requests_per_worker_s * decode_s)
    return FleetLoad(
        workers=workers,
        requests=rate,
        rows=rows,
        row_bytes=rows * request.row_bytes,
        entry_bytes=rate * request.entry_bytes,
        prefill_steps=rate * -(-traffic.prompt_tokens // traffic.token_budget),
        decode_steps=rate * (traffic.output_tokens - 1) / batch,
        handles=rate * request.pages,
        hand_over_bytes=rate * request.moved_bytes,
        placements=rate * 2,
        resident_requests=rate * resident_s,
        resident_page_bytes=rate * resident_s * request.page_bytes,
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """What one core did where this was measured; tests/bench/results/scale.json says when and on what.

    lookup_us   owner of a request among so many members
    step_us     a decode step of one request over HTTP, all compressors of `tiny`, as one client thread sees it
    health_us   `/readyz` and its answer, as one client thread sees it
    """

    lookup_us: Mapping[int, float]
    step_us: float
    health_us: float


@dataclass(frozen=True, slots=True)
class Saturation:
    """How far one process that schedules a fleet of this size is from its end. Shares are of one core."""

    workers: int
    lookup_share: float
    """Placements."""
    health_share: float
    """Asking every worker how it is; also of each worker's core, where every worker has a scheduler of its own."""
    step_share: float
    """Sending every worker's steps."""


def saturation(load: FleetLoad, measured: Measured, health_s: float = 1.0) -> Saturation:
    """Above 1 it does not keep up."""
    return Saturation(
        workers=load.workers,
        lookup_share=load.placements * measured.lookup_us[load.workers] / 1e6,
        health_share=load.workers * measured.health_us / 1e6 / health_s,
        step_share=load.steps * measured.step_us / 1e6,
    )
