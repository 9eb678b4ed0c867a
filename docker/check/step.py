"""A worker's pages, byte for byte beside those of workers started here from the sources."""

from __future__ import annotations

import numpy as np
from engine import CheckFailed

from kvfold_client import Client
from tests.bench.measure import worker

NUM_TOKENS = 300
WIDTHS = {"layers.0.hca": 1024, "layers.1.csa": 2048, "layers.1.indexer": 512}
"""Of preset tiny."""
MOST_FLIPS = 1e-3
"""Share of bytes in which `cpu` may differ from `reference`: the last bit of an exponential, seen through rounding."""


def pages(client: Client, *cuts: int) -> np.ndarray:
    """All pages of one request of NUM_TOKENS tokens, fed in steps that end at `cuts`, one after another."""
    random = np.random.default_rng(0)
    rows = {name: random.standard_normal((NUM_TOKENS, width), np.float32) for name, width in WIDTHS.items()}
    start = 0
    for end in (*cuts, NUM_TOKENS):
        part = {name: tensor[start:end] for name, tensor in rows.items()}
        reply = client.step([("image-check", start, end - start)], part, pages="all")
        start = end
    handles = [handle for state in reply.requests["image-check"].values() for handle in state.pages]
    read = client.read_pages(handles)
    if [page.handle for page in read] != handles:
        raise CheckFailed("a read gave other pages than were asked for")
    client.release("image-check")
    return np.concatenate([page.data for page in read])


def local(backend: str, *cuts: int) -> np.ndarray:
    with worker(backend=backend) as (url, _), Client(url) as client:
        return pages(client, *cuts)


def compare(url: str, token: str) -> str:
    """What was compared. Raises CheckFailed for a byte that differs from the same backend's."""
    with Client(url, token) as client:
        served = pages(client, 127, 250)
    if not np.array_equal(served, local("cpu")):
        raise CheckFailed("the worker in the image gives other bytes than one started from the sources")
    flips = np.count_nonzero(served != local("reference", 5))
    if flips > MOST_FLIPS * len(served):
        raise CheckFailed(f"{flips} of {len(served)} bytes differ from the reference")
    return f"{len(served)} bytes of pages as a local worker's; {flips} differ from backend reference"
