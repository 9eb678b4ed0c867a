"""The demo's model: a small DeepSeek-V4 with seeded random weights, and the manifest and weights file a worker needs.

Importing this module imports `transformers`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

LAYER_KINDS = ("hca", "csa", "hca", "csa")
LAYER_TYPES = {"hca": "heavily_compressed_attention", "csa": "compressed_sparse_attention"}
PAGE_ENTRIES = {"hca": 2, "csa": 16, "indexer": 16}
# The rotary embedding of the compressed entries, as published for DeepSeek-V4.
THETA, YARN_FACTOR, ORIGINAL_MAX_POSITION, BETA_FAST, BETA_SLOW = 160000.0, 16.0, 65536, 32, 1
MAX_POSITION = 8192
MODEL_NAME = "kvfold-demo"
# Of the seeds 0 to 31 the one whose indexers leave the widest gap between the last entry kept and the first left out
# over the default run: 1e-4, where rounding moves a score by 3e-6, so that rounding does not flip a choice.
SEED = 22


def demo_config() -> DeepseekV4Config:
    """Four layers of DeepSeek-V4's own head sizes (512, 64 of them rotary; indexer 128); everything else is small.

    Every token uses both experts, so that rounding cannot flip a routing choice; a query keeps 16 of the csa entries.
    """
    return DeepseekV4Config(
        vocab_size=128,  # a token is a byte of ASCII text
        hidden_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=len(LAYER_KINDS),
        layer_types=[LAYER_TYPES[kind] for kind in LAYER_KINDS],
        mlp_layer_types=["moe"] * len(LAYER_KINDS),
        num_attention_heads=4,
        head_dim=512,
        q_lora_rank=64,
        n_routed_experts=2,
        num_experts_per_tok=2,
        sliding_window=32,
        o_groups=2,
        o_lora_rank=64,
        hc_mult=2,
        hc_sinkhorn_iters=4,
        index_n_heads=16,
        index_head_dim=128,
        index_topk=16,
        initializer_range=256**-0.5,  # keeps activations and logits near 1
        max_position_embeddings=int(YARN_FACTOR) * ORIGINAL_MAX_POSITION,
        compress_rope_theta=THETA,
        rope_parameters={
            "rope_type": "yarn",
            "factor": YARN_FACTOR,
            "original_max_position_embeddings": ORIGINAL_MAX_POSITION,
            "beta_fast": BETA_FAST,
            "beta_slow": BETA_SLOW,
        },
    )


def demo_model(seed: int = SEED) -> DeepseekV4ForCausalLM:
    """The model with random weights from `seed`; the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DeepseekV4ForCausalLM(demo_config()).eval().requires_grad_(False)
        for module in compressors(model).values():
            nn.init.normal_(module.position_bias)  # zero otherwise: an ape that is never added would not show
            nn.init.uniform_(module.kv_norm.weight, 0.5, 1.5)
    return model


def compressors(model: DeepseekV4ForCausalLM) -> dict[str, Any]:
    """Compressor name → the module that holds its `position_bias` (ape) and `kv_norm`."""
    found: dict[str, Any] = {}
    layers: Any = model.model.layers
    for layer_idx, layer in enumerate(layers):
        kind = LAYER_KINDS[layer_idx]
        found[f"layers.{layer_idx}.{kind}"] = layer.self_attn.compressor
        if kind == "csa":
            found[f"layers.{layer_idx}.indexer"] = layer.self_attn.compressor.indexer
    return found


def manifest(model: DeepseekV4ForCausalLM) -> dict:
    """What a worker must know to serve `model`: pages are fp32, so that logits can be compared."""
    return {
        "model": MODEL_NAME,
        "max_position": MAX_POSITION,
        "rms_eps": model.config.rms_norm_eps,
        "rope": {
            "dim": model.config.qk_rope_head_dim,
            "theta": THETA,
            "yarn": {
                "factor": YARN_FACTOR,
                "original_max_position": ORIGINAL_MAX_POSITION,
                "beta_fast": BETA_FAST,
                "beta_slow": BETA_SLOW,
            },
        },
        "compressors": [
            {
                "name": name,
                "kind": (kind := name.rpartition(".")[2]),
                "ratio": module.compress_rate,
                "head_dim": module.head_dim,
                "cache_format": "fp32",
                "page_entries": PAGE_ENTRIES[kind],
            }
            for name, module in compressors(model).items()
        ],
    }


def write_files(model: DeepseekV4ForCausalLM, folder: Path) -> tuple[Path, Path]:
    """Write `manifest.json` and `weights.safetensors` into `folder`; returns both paths."""
    manifest_file, weights_file = folder / "manifest.json", folder / "weights.safetensors"
    manifest_file.write_text(json.dumps(manifest(model), indent=1) + "\n")
    tensors = {}
    for name, module in compressors(model).items():
        tensors[f"{name}.ape"] = module.position_bias.detach().contiguous()
        tensors[f"{name}.norm.weight"] = module.kv_norm.weight.detach().contiguous()
    save_file(tensors, weights_file)
    return manifest_file, weights_file


@contextmanager
def without_compressor_weights(model: DeepseekV4ForCausalLM) -> Iterator[None]:
    """Fill every ape and norm weight of `model` with NaN for a while: an entry it pooled itself would be NaN.

    What a worker returns then has nobody else to come from.
    """
    weights = [w for m in compressors(model).values() for w in (m.position_bias, m.kv_norm.weight)]
    kept = [weight.detach().clone() for weight in weights]
    try:
        for weight in weights:
            weight.fill_(float("nan"))
        yield
    finally:
        for weight, value in zip(weights, kept, strict=True):
            weight.copy_(value)
