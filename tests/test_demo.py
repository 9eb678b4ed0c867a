"""The demo's model through an in-process worker that follows the definition, its control, and the command itself."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="the demo needs the extra kvfold[demo]")

from transformers import DynamicCache

from kvfold_service.demo.folding import FoldedCache
from kvfold_service.demo.model import compressors, demo_model, manifest, without_compressor_weights
from kvfold_service.demo.proof import NegatingWorker, prove_with
from kvfold_service.demo.trace import Trace, compare, generate

TOLERANCE = 1e-4
PROMPT = torch.arange(160) * 37 % 128


class NaiveWorker:
    """The two client calls the demo uses; pools, norms and rotates one window at a time, from every row ever sent."""

    def __init__(self, manifest: dict, weights: dict[str, torch.Tensor]):
        self.rows = {row["name"]: row for row in manifest["compressors"]}
        self.eps, self.weights = manifest["rms_eps"], weights
        self.inv_freq = inv_freq(**manifest["rope"])
        self.inputs: dict[tuple[str, str], torch.Tensor] = {}
        self.entries: dict[tuple[str, str], torch.Tensor] = {}

    def step(self, requests, tensors):
        (request_id, start, num_tokens), (name, rows) = requests[0], next(iter(tensors.items()))
        key, row = (request_id, name), self.rows[name]
        seen = self.inputs.get(key, torch.zeros(0, rows.shape[1]))
        assert start == len(seen)
        assert num_tokens == len(rows)
        self.inputs[key] = torch.cat([seen, torch.from_numpy(np.array(rows))])
        old, new = start // row["ratio"], (start + num_tokens) // row["ratio"]
        made = [self.entry(name, self.inputs[key], w * row["ratio"]) for w in range(old, new)]
        self.entries[key] = torch.stack([*self.entries.get(key, ()), *made]) if new else torch.zeros(0)
        pages = range(old // row["page_entries"], -(-new // row["page_entries"])) if new > old else ()
        part = SimpleNamespace(
            num_entries=new, new_entries=(old, new), pages=[f"{request_id}/{name}/{page}" for page in pages]
        )
        return SimpleNamespace(
            requests={request_id: {name: part}},
            launches=int(new > old),
            skipped=[] if new > old else [name],
            timings_us={"plan": 1, "kernel": 2},
        )

    def read_pages(self, handles):
        pages = []
        for handle in handles:
            request_id, name, page_idx = handle.split("/")
            size = self.rows[name]["page_entries"]
            held = self.entries[request_id, name][int(page_idx) * size :][:size]
            data = np.full(size * self.rows[name]["head_dim"] * 4, 0xFF, dtype=np.uint8)  # unused entries are NaN
            data[: held.numel() * 4] = held.numpy().reshape(-1).view(np.uint8)
            pages.append(SimpleNamespace(handle=handle, compressor=name, num_entries=len(held), data=data))
        return pages

    def release(self, id):
        for key in [key for key in self.inputs if key[0] == id]:
            del self.inputs[key], self.entries[key]

    def entry(self, name: str, rows: torch.Tensor, first: int) -> torch.Tensor:
        """The entry whose own tokens start at position `first`."""
        row, ape = self.rows[name], self.weights[f"{name}.ape"]
        ratio, dim, halves = row["ratio"], row["head_dim"], ape.shape[1] // row["head_dim"]
        window = []  # (kv, score) of each row, [D] each
        for half in range(halves):
            for offset in range(ratio):
                position = first + offset - ratio * (halves - 1 - half)
                if position >= 0:
                    kv, score = rows[position].view(2, halves, dim)[:, half]
                    window.append((kv, score + ape.view(ratio, halves, dim)[position % ratio, half]))
        kv, score = (torch.stack(column) for column in zip(*window, strict=True))
        pooled = (score.softmax(0) * kv).sum(0)
        x = pooled * torch.rsqrt(pooled.square().mean() + self.eps) * self.weights[f"{name}.norm.weight"]
        angle = first * self.inv_freq
        even, odd = x[-2 * len(angle) :: 2].clone(), x[1 - 2 * len(angle) :: 2].clone()
        x[-2 * len(angle) :: 2] = even * angle.cos() - odd * angle.sin()
        x[1 - 2 * len(angle) :: 2] = even * angle.sin() + odd * angle.cos()
        return x


def inv_freq(dim: int, theta: float, yarn: dict) -> torch.Tensor:
    """YaRN's inverse frequencies, fp32 [dim / 2]: between the limits a ramp to 1/`factor` of them."""
    pairs = torch.arange(0, dim, 2) / dim
    limits = [
        dim * np.log(yarn["original_max_position"] / (2 * np.pi * beta)) / (2 * np.log(theta))
        for beta in (yarn["beta_fast"], yarn["beta_slow"])
    ]
    low, high = max(np.floor(limits[0]), 0), min(np.ceil(limits[1]), dim - 1)
    ramp = ((torch.arange(dim // 2) - low) / (high - low)).clamp(0, 1)
    return (theta**-pairs * (1 - ramp + ramp / yarn["factor"])).float()


@pytest.fixture(scope="module")
def model():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield demo_model()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def weights(model):
    return {
        f"{name}.{end}": weight.clone()
        for name, module in compressors(model).items()
        for end, weight in (("ape", module.position_bias), ("norm.weight", module.kv_norm.weight))
    }


@pytest.fixture
def worker(model, weights):
    return NaiveWorker(manifest(model), weights)


def untouched(model, chunk: int, num_tokens: int) -> Trace:
    return generate(model, DynamicCache(config=model.config), PROMPT, chunk, num_tokens)


def folded(model, worker, chunk: int, num_tokens: int) -> Trace:
    with without_compressor_weights(model):
        return generate(model, FoldedCache(model.config, worker, manifest(model), "r1"), PROMPT, chunk, num_tokens)


@pytest.mark.parametrize("chunk", [160, 50, 3])
def test_folded_model_is_the_untouched_model(model, worker, chunk):
    actual = folded(model, worker, chunk, num_tokens=20)
    result = compare(untouched(model, chunk, num_tokens=20), actual, TOLERANCE)
    assert result.equal, result
    assert result.num_passes == -(-160 // chunk) + 20
    assert len(set(actual.tokens)) > 1


def test_folded_cache_leaves_transformers_caches_alone(model):
    names = [type(layer).__name__ for layer in DynamicCache(config=model.config).layers]
    assert names == ["DeepseekV4HCACache", "DeepseekV4CSACache"] * 2


def test_without_compressor_weights_the_model_alone_is_nan_and_then_itself_again(model):
    expected = untouched(model, 160, 0)
    with without_compressor_weights(model):
        alone = compare(expected, untouched(model, 160, 0), TOLERANCE)
    assert alone.first_pass == 0
    assert np.isnan(alone.max_difference)
    assert compare(expected, untouched(model, 160, 0), TOLERANCE).max_difference == 0


@pytest.mark.parametrize(
    ("name", "head_dim"), [("layers.2.hca", 512), ("layers.3.csa", 512), ("layers.1.indexer", 128)]
)
def test_one_altered_entry_is_caught(model, worker, name, head_dim):
    actual = folded(model, NegatingWorker(worker, name, head_dim), 50, num_tokens=1)
    assert compare(untouched(model, 50, num_tokens=1), actual, TOLERANCE).max_difference > 100 * TOLERANCE


def test_a_missing_ape_is_caught(model, worker):
    worker.weights = {name: w * (not name.endswith("ape")) for name, w in worker.weights.items()}
    assert not compare(untouched(model, 50, 1), folded(model, worker, 50, 1), TOLERANCE).equal


def test_prove_reports_what_it_compared(model, worker, capsys):
    options = SimpleNamespace(chunk=80, tokens=4, tolerance=TOLERANCE)
    assert prove_with(model, worker, PROMPT, options, lambda text: None)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines if "layers." in line][:2] == [
        ["layers.0.hca", "6", "1"],
        ["layers.1.csa", "6", "41"],
    ]
    assert sum(line.endswith(": caught") for line in lines) == 3
    assert sum(line.endswith(": equal") for line in lines) == 2
    assert not worker.inputs, "every request is released"


def test_prove_fails_where_the_worker_is_wrong(model, worker, capsys):
    worker.eps = 1e-2
    assert not prove_with(
        model, worker, PROMPT, SimpleNamespace(chunk=80, tokens=4, tolerance=TOLERANCE), lambda text: None
    )
    assert "DIFFERENT" in capsys.readouterr().out


def demo(*options: str, before: str = "") -> subprocess.CompletedProcess[str]:
    code = f"import sys; {before}\nfrom kvfold_service.demo import run; sys.exit(run(sys.argv[1:]))"
    return subprocess.run(
        [sys.executable, "-c", code, *options], capture_output=True, text=True, timeout=240, check=False
    )


def test_demo_through_a_real_worker():
    done = demo("--tokens", "8", "--prompt", "160")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": caught\n") == 3
    assert "ready http://127.0.0.1:" in done.stdout


def test_demo_says_why_no_worker_started():
    done = demo("--backend", "abacus")
    assert done.returncode == 2
    assert done.stderr.startswith("kvfold demo could not run: the worker ended with status")
    assert "abacus" in done.stderr


def test_demo_names_the_extra_where_transformers_is_missing():
    done = demo(before="sys.modules['transformers'] = None")
    assert done.returncode == 2
    assert "pip install 'kvfold[demo]'" in done.stderr
    assert done.stderr.count("\n") == 1
