"""The demo's run: the untouched model, the same model through a worker, and a control that must fail."""

from __future__ import annotations

import importlib.metadata
import tempfile
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvfold_client import Client, KvfoldError
from kvfold_service.demo.folding import FoldedCache, FoldingError, Worker
from kvfold_service.demo.model import (
    LAYER_KINDS,
    MAX_POSITION,
    MODEL_NAME,
    demo_model,
    manifest,
    without_compressor_weights,
    write_files,
)
from kvfold_service.demo.process import WorkerError, worker
from kvfold_service.demo.report import Progress, print_report, print_texts
from kvfold_service.demo.trace import Comparison, compare, generate


class DemoError(RuntimeError):
    """The demo could not run to its end; the text says why and what to do."""


class NegatingWorker:
    """The control: the first entry of one compressor comes back from the worker with its sign turned."""

    def __init__(self, worker: Worker, compressor: str, head_dim: int):
        self.worker, self.compressor, self.entry_bytes = worker, compressor, head_dim * 4
        self.step, self.release = worker.step, worker.release
        self.first_page: str | None = None  # its handle, which it keeps while it fills

    def read_pages(self, handles: Sequence[str]) -> list[Any]:
        """The worker's pages, with the sign of the entry at the start of the compressor's first page turned."""
        pages = list(self.worker.read_pages(handles))
        for idx, page in enumerate(pages):
            if page.compressor == self.compressor and self.first_page in (None, page.handle):
                self.first_page = page.handle
                data = np.array(page.data)
                data[3 : self.entry_bytes : 4] ^= 0x80  # the sign is the top bit of a little-endian fp32
                pages[idx] = SimpleNamespace(compressor=page.compressor, num_entries=page.num_entries, data=data)
        return pages


def prove(options: Namespace, started: float) -> bool:
    """Run the demo, begun at `started`, and print what it finds; returns whether everything compared as it must.

    Raises:
        DemoError: it could not run to its end.
    """
    progress, prompt = Progress(started), _prompt(options)
    torch.set_num_threads(1)  # the matrices are small, and the worker wants the other cores
    model = demo_model()
    num_weights = sum(weight.numel() for weight in model.parameters()) / 1e6
    progress(f"DeepSeek-V4 of {len(LAYER_KINDS)} layers ({', '.join(LAYER_KINDS)}), {num_weights:.1f} M random weights")
    try:
        with _worker(model, options, progress) as client:
            return prove_with(model, client, prompt, options, progress)
    except (WorkerError, KvfoldError, FoldingError, OSError) as error:
        raise DemoError(str(error)) from error


def prove_with(model: Any, client: Worker, prompt: torch.Tensor, options: Namespace, progress: Progress) -> bool:
    """The three runs against `client`, then the report; returns whether everything compared as it must."""
    rows, run_id, shape = manifest(model), f"demo-{uuid.uuid4().hex[:8]}", (prompt, options.chunk)
    expected = generate(model, DynamicCache(config=model.config), *shape, options.tokens, _say(progress, "untouched"))
    first_of_kind: dict[str, dict] = {}
    for row in rows["compressors"]:
        first_of_kind.setdefault(row["kind"], row)
    controls: dict[str, Comparison] = {}
    with without_compressor_weights(model):
        cache = FoldedCache(model.config, client, rows, run_id)
        actual = generate(model, cache, *shape, options.tokens, _say(progress, "through kvfold"))
        cache.release()
        for kind, row in first_of_kind.items():
            altered = NegatingWorker(client, row["name"], row["head_dim"])
            control = FoldedCache(model.config, altered, rows, f"{run_id}-{kind}")
            controls[row["name"]] = compare(expected, generate(model, control, *shape, 0), options.tolerance)
            control.release()
            progress(f"control: prefill with the first entry of {row['name']} negated")
    result = compare(expected, actual, options.tolerance)
    tallies = {name: compressor.tally for name, compressor in cache.compressors.items()}
    passed = result.equal and all(control.first_pass >= 0 for control in controls.values())
    print_report(tallies, result, controls, options.tolerance)
    print_texts(prompt.tolist(), actual.tokens, passed)
    return passed


@contextmanager
def _worker(model: Any, options: Namespace, progress: Progress) -> Iterator[Client]:
    """A client of the worker at `options.url`, or of one started for the demo."""
    with ExitStack() as stack:
        url = options.url
        if url is None:
            folder = options.files or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvfold-demo-")))
            folder.mkdir(parents=True, exist_ok=True)
            progress("starting a worker: kvfold serve --manifest … --weights … --backend " + options.backend)
            files = write_files(model, folder)
            ready = stack.enter_context(worker(*files, options.backend, options.start_timeout))
            url = ready.split()[1]
            progress(ready)
        client = stack.enter_context(Client(url, token=options.token))
        if client.manifest().get("model") != MODEL_NAME:
            raise DemoError(f"the worker at {url} serves another model; start it with the files of kvfold demo --files")
        yield client


def _prompt(options: Namespace) -> torch.Tensor:
    """The first bytes of kvfold's own licence, one token each."""
    text = importlib.metadata.distribution("kvfold").read_text("licenses/LICENSE")
    if text is None:
        raise DemoError("the text of kvfold's licence is missing from its installation; install kvfold again")
    tokens = text.lstrip().encode("ascii")
    longest = min(len(tokens), MAX_POSITION - options.tokens)
    if options.prompt > longest:
        raise DemoError(f"--prompt is {options.prompt}, and with --tokens {options.tokens} it may be at most {longest}")
    return torch.tensor(list(tokens[: options.prompt]))


def _say(progress: Progress, who: str) -> Callable[[str], None]:
    return lambda text: progress(f"{who}: {text}")
