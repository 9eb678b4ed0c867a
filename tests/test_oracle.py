"""Entries against transformers' own DeepSeek-V4 compressors, in fp32: the definition's outside witness.

A module's projections are replaced by the two halves of a row, so that both sides get the same kv and score. The
oracle keeps its own state in a `DynamicCache`; both sides are fed in chunks, each in its own.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="the oracle needs the extra kvfold[demo]")

from transformers import DynamicCache
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

from kvfold_kernels.compressor import Compressor
from kvfold_kernels.rope import Rope, Yarn
from tests.cases import make_compressor, make_rows
from tests.conftest import adopt, alone, as_fp32, assert_near, feed, hold, last_entries, naive, sparse_rope

RELATIVE = 2e-6
ROPES = {"yarn": Rope(), "plain": Rope(yarn=None)}
LAYER = {"hca": "heavily_compressed_attention", "csa": "compressed_sparse_attention"}
LAYER["indexer"] = LAYER["csa"]


class Half(nn.Module):
    """A projection that is one half of its input's columns."""

    def __init__(self, index: int):
        super().__init__()
        self.index = index

    def forward(self, row: torch.Tensor) -> torch.Tensor:
        return row.chunk(2, dim=-1)[self.index]


class Catch(nn.Module):
    """Stands in for the indexer's scorer: keeps the compressed rows it is given, and scores them 0."""

    def forward(self, queries: torch.Tensor, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        self.rows = rows[0]
        return hidden.new_zeros(1, hidden.shape[1], rows.shape[1])


class NoIndexer(nn.Module):
    def forward(self, hidden: torch.Tensor, *_) -> torch.Tensor:
        return torch.zeros(1, hidden.shape[1], 0, dtype=torch.int64)


def config_of(compressor: Compressor, yarn: Yarn | None) -> DeepseekV4Config:
    geometry = compressor.geometry
    rope = None
    if yarn is not None:
        rope = {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_position,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
        }
    return DeepseekV4Config(
        num_hidden_layers=1,
        layer_types=[LAYER[geometry.kind]],
        compress_rates={LAYER["hca"]: geometry.ratio, LAYER["csa"]: geometry.ratio},
        hidden_size=geometry.row_width,
        head_dim=geometry.head_dim,
        index_head_dim=geometry.head_dim,
        partial_rotary_factor=geometry.rope_dim / geometry.head_dim,
        q_lora_rank=4,
        index_n_heads=1,
        rope_parameters=rope,
        rms_norm_eps=compressor.rms_eps,
    )


class Oracle:
    """One compressor of transformers, with its cache."""

    def __init__(self, compressor: Compressor, rope: Rope, first_entry: int = 0):
        kind = compressor.geometry.kind
        config = config_of(compressor, rope.yarn)
        made = {
            "hca": deepseek.DeepseekV4HCACompressor,
            "csa": deepseek.DeepseekV4CSACompressor,
            "indexer": deepseek.DeepseekV4Indexer,
        }[kind](config)
        made.kv_proj, made.gate_proj = Half(0), Half(1)
        made.position_bias = nn.Parameter(compressor.ape)
        made.kv_norm.weight = nn.Parameter(compressor.norm_weight)
        if kind == "csa":
            made.indexer = NoIndexer()
        if kind == "indexer":
            made.scorer = Catch()
        self.module, self.cache, self.position = made, DynamicCache(config=config), 0
        self.catches = kind == "indexer"
        self.cache.layers[0].entry_count[kind if self.catches else "compressor"] = first_entry

    @torch.inference_mode()
    def entries(self, rows: torch.Tensor, lengths: list[int]) -> np.ndarray:
        """All entries so far after more rows, fp32 `[num_entries, head_dim]`."""
        for chunk in rows.float().split(lengths):
            positions = torch.arange(self.position, self.position + len(chunk))[None]
            residual = torch.zeros(1, len(chunk), 4)
            result = self.module(chunk[None], residual, positions, self.cache, 0)
            self.position += len(chunk)
        if self.catches:
            return self.module.scorer.rows.numpy()
        return result[0][0, 0].numpy()


CASES = {
    "hca": [([127], [127]), ([128], [64, 64]), ([500, 13], [1, 127, 129, 255, 1]), ([1, 254, 258], [513])],
    "csa": [([3], [3]), ([4], [1, 3]), ([9, 30, 1], [1] * 40), ([1] * 23, [23]), ([130], [6, 5, 4, 3, 112])],
}
CASES["indexer"] = CASES["csa"]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(
    ("kind", "ours", "theirs"), [(kind, *lengths) for kind, cases in CASES.items() for lengths in cases]
)
def test_entries(backend, kind, ours, theirs, rope):
    holder = hold(backend, kind, "fp32", rope=ROPES[rope])
    rows = make_rows(holder.compressor.geometry, sum(ours), dtype="fp32", seed=len(ours))
    feed(holder, {0: rows}, alone(ours))
    expected = Oracle(holder.compressor, ROPES[rope]).entries(rows, theirs)
    assert len(expected) == sum(theirs) // holder.compressor.geometry.ratio
    assert_near(as_fp32(holder.entries()), expected, RELATIVE)
    assert_near(naive(rows, holder.compressor), expected, RELATIVE)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("ratio", [1, 2, 8])
@pytest.mark.parametrize("kind", ["hca", "csa", "indexer"])
def test_other_ratios_and_dims(backend, kind, ratio, head_dim):
    holder = hold(backend, kind, "fp32", ratio=ratio, head_dim=head_dim)
    rows = make_rows(holder.compressor.geometry, 37, dtype="fp32")
    feed(holder, {0: rows}, alone([1, 1, 1, 15, 19]))
    assert_near(as_fp32(holder.entries()), Oracle(holder.compressor, Rope()).entries(rows, [37]), RELATIVE)


@pytest.mark.parametrize(("kind", "first"), [("hca", 1_048_448), ("csa", 1_048_568), ("indexer", 1_048_568)])
def test_the_last_position_of_a_million(backend, kind, first):
    """Both sides resume just before it; the oracle without the overlap of its first entry, so the last is compared."""
    holder = hold(backend, kind, "fp32")
    holder.compressor = dataclasses.replace(holder.compressor, cos_sin=sparse_rope(first, 1_048_576))
    geometry = holder.compressor.geometry
    overlap = geometry.ratio * (geometry.halves - 1)
    before, rows = make_rows(geometry, overlap + 1_048_576 - first, dtype="fp32").tensor_split([overlap])
    adopt(holder, 0, first, before)
    holder.step([(0, len(rows))], rows)
    expected = Oracle(holder.compressor, Rope(), first // geometry.ratio).entries(rows, [len(rows)])
    assert_near(as_fp32(last_entries(holder, 1)), expected[-1:], RELATIVE)


@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_have_transformers_bits(rope):
    config = config_of(make_compressor("csa", "fp32"), ROPES[rope].yarn)
    theirs = deepseek.DeepseekV4RotaryEmbedding(config)
    np.testing.assert_array_equal(
        ROPES[rope].inv_freq().view(np.uint32), theirs.compress_inv_freq.numpy().view(np.uint32)
    )
    assert theirs.compress_attention_scaling == 1.0
