"""manifest: the presets, a file, a model's config.json; and `compat`, what two workers must agree on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvfold_service import manifest as manifests
from kvfold_service import weights as weight_files
from kvfold_service.compat import compat_hash
from kvfold_service.manifest import Manifest, from_config, load, parse
from tests.service_cases import CSA, HCA, INDEXER, SMALL, no_start

YARN = {"factor": 16.0, "original_max_position": 65536, "beta_fast": 32.0, "beta_slow": 1.0}


def kinds_of(manifest: Manifest) -> dict[str, int]:
    kinds = [part.kind for part in manifest.compressors]
    return {kind: kinds.count(kind) for kind in ("hca", "csa", "indexer")}


def layers_of(manifest: Manifest, kind: str) -> list[int]:
    return [int(part.name.split(".")[1]) for part in manifest.compressors if part.kind == kind]


@pytest.mark.parametrize(
    ("preset", "max_position", "hca", "csa"),
    [
        ("tiny", 8192, [0], [1]),
        ("deepseek-v4-flash", 1 << 20, list(range(3, 43, 2)), list(range(2, 43, 2))),
        ("deepseek-v4-pro", 1 << 20, [0, 1, *range(3, 61, 2)], list(range(2, 61, 2))),
    ],
)
def test_presets(preset, max_position, hca, csa):
    manifest = load(preset)
    assert (manifest.model, manifest.max_position, manifest.draft_slack) == (preset, max_position, 8)
    assert (layers_of(manifest, "hca"), layers_of(manifest, "csa"), layers_of(manifest, "indexer")) == (hca, csa, csa)
    assert manifest.rms_eps == 1e-6
    assert (manifest.rope.dim, manifest.rope.theta) == (64, 160000.0)
    assert manifest.rope.yarn.model_dump() == YARN
    shapes = {(p.kind, p.ratio, p.head_dim, p.cache_format, p.layout().entries) for p in manifest.compressors}
    assert shapes == {
        ("hca", 128, 512, "fp8_ds_mla", 2),
        ("csa", 4, 512, "fp8_ds_mla", 64),
        ("indexer", 4, 128, "indexer_fp8", 64),
    }


def test_how_many_compressors_the_models_have():
    assert kinds_of(load("deepseek-v4-flash")) == {"hca": 20, "csa": 21, "indexer": 21}
    assert kinds_of(load("deepseek-v4-pro")) == {"hca": 31, "csa": 30, "indexer": 30}


CONTRACT_EXAMPLE = """
{"model": "name", "max_position": 1048576, "rms_eps": 1e-6,
 "rope": {"dim": 64, "theta": 160000.0, "yarn": {"factor": 16.0, "original_max_position": 65536, "beta_fast": 32, "beta_slow": 1}},
 "compressors": [{"name": "layers.0.hca", "kind": "hca", "ratio": 128, "head_dim": 512, "cache_format": "fp8_ds_mla", "page_entries": 2},
                 {"name": "layers.1.csa", "kind": "csa", "ratio": 4, "head_dim": 512, "cache_format": "fp8_ds_mla", "page_entries": 64},
                 {"name": "layers.1.indexer", "kind": "indexer", "ratio": 4, "head_dim": 128, "cache_format": "indexer_fp8", "page_entries": 64}]}
"""  # noqa: E501


def written(path, body: Any) -> str:
    file = path / "m.json"
    file.write_text(body if isinstance(body, str) else json.dumps(body), encoding="utf-8")
    return str(file)


def test_the_contract_s_example(tmp_path):
    manifest = load(written(tmp_path, CONTRACT_EXAMPLE))
    assert manifest.to_json() == json.loads(CONTRACT_EXAMPLE)
    preset = load("tiny").to_json() | {"model": "name", "max_position": 1048576}
    assert preset == manifest.to_json()


@pytest.mark.parametrize("source", ["tiny", "deepseek-v4-flash", SMALL], ids=["tiny", "flash", "small"])
def test_what_a_worker_says_of_itself_is_a_manifest_again(source):
    manifest = load(source) if isinstance(source, str) else parse(source, "small")
    said = json.loads(json.dumps(manifest.to_json()))
    again = parse(said, "said")
    assert again.to_json() == said
    assert [part.layout() for part in again.compressors] == [part.layout() for part in manifest.compressors]
    assert (again.rope, again.draft_slack) == (manifest.rope, manifest.draft_slack)


def test_yarn_may_be_null_and_options_are_kept(tmp_path):
    part = SMALL["compressors"][2] | {"indexer_profile": "sglang", "input_dtype": "bf16"}
    body = SMALL | {"rope": {"theta": 10000.0, "yarn": None}, "compressors": [part | {"page_bytes": 256}]}
    manifest = load(written(tmp_path, body))
    assert manifest.rope.yarn is None
    assert manifest.compressors[0].layout().page_bytes == 256
    said = manifest.to_json()
    assert said["rope"] == {"dim": 64, "theta": 10000.0, "yarn": None}
    assert said["compressors"] == [part | {"page_bytes": 256}]


def changed_part(index: int = 0, **changes: Any) -> dict[str, Any]:
    parts = list(SMALL["compressors"])
    parts[index] = parts[index] | changes
    return SMALL | {"compressors": parts}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, ("max_position",)),
        (SMALL | {"layers": 3}, ("layers",)),
        (SMALL | {"compressors": []}, ("compressors",)),
        (SMALL | {"compressors": SMALL["compressors"][:1] * 2}, ("same name",)),
        (SMALL | {"max_position": 0}, ("max_position",)),
        (SMALL | {"rms_eps": 0}, ("rms_eps",)),
        (SMALL | {"rms_eps": float("inf")}, ("rms_eps",)),
        (SMALL | {"draft_slack": -1}, ("draft_slack",)),
        (SMALL | {"rope": {"dim": 32}}, ("rope.dim",)),
        (SMALL | {"rope": {"yarn": {"factor": 0}}}, ("rope.yarn.factor",)),
        (changed_part(name=""), ("compressors.0.name",)),
        (changed_part(name="layers/0"), ("compressors.0.name",)),
        (changed_part(kind="mla"), ("compressors.0.kind",)),
        (changed_part(ratio=0), ("ratio",)),
        (changed_part(head_dim=500), ("head_dim",)),
        (changed_part(cache_format="fp4"), ("cache_format",)),
        (changed_part(cache_format="indexer_fp8"), ("cache_format", "hca")),
        (changed_part(2, cache_format="fp8_ds_mla"), ("cache_format", "indexer")),
        (changed_part(page_entries=70000), ("page_entries",)),
        (changed_part(page_bytes=100), ("page_bytes",)),
        (changed_part(page_bytes=401), ("page_bytes",)),
        (changed_part(fp8_scale=2.0), ("fp8_scale",)),
        (changed_part(cache_format="fp8", fp8_scale=-1.0), ("fp8_scale",)),
        (changed_part(cache_format="bf16", scale_floor="scale"), ("scale_floor",)),
        (changed_part(scale_floor="max"), ("scale_floor",)),
        (changed_part(indexer_profile="sglang"), ("indexer_profile",)),
        (changed_part(input_dtype="fp16"), ("input_dtype",)),
        (changed_part(dtype="bf16"), ("dtype",)),
        ([], ("JSON object",)),
        ("{", ("not readable JSON",)),
        ("\ufeff{}", ("not readable JSON",)),
    ],
    ids=lambda value: str(value)[-50:],
)
def test_a_bad_manifest_stops_the_start(tmp_path, body, words):
    with no_start("m.json", *words):
        load(written(tmp_path, body))


@pytest.mark.parametrize("source", ["", "deepseek-v3", "missing.json", "."])
def test_what_is_neither_file_nor_preset(source):
    with no_start("preset", "tiny, deepseek-v4-flash, deepseek-v4-pro"):
        load(source)


DEEPSEEK = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 5,
    "num_nextn_predict_layers": 1,
    "compress_ratios": [0, 0, 4, 128, 4, 0],
    "head_dim": 512,
    "index_head_dim": 128,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
"""As DeepSeek ships it: a ratio for each layer, the draft layer included."""

TRANSFORMERS = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 5,
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "head_dim": 512,
    "index_head_dim": 128,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.125},
        "compress": {
            "rope_type": "yarn",
            "rope_theta": 160000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    },
}
"""As transformers writes it."""


@pytest.mark.parametrize("config", [DEEPSEEK, TRANSFORMERS], ids=["deepseek", "transformers"])
def test_config_json(tmp_path, config):
    manifest = load(written(tmp_path, config))
    assert [(p.name, p.ratio, p.head_dim, p.cache_format) for p in manifest.compressors] == [
        ("layers.2.csa", 4, 512, "fp8_ds_mla"),
        ("layers.2.indexer", 4, 128, "indexer_fp8"),
        ("layers.3.hca", 128, 512, "fp8_ds_mla"),
        ("layers.4.csa", 4, 512, "fp8_ds_mla"),
        ("layers.4.indexer", 4, 128, "indexer_fp8"),
    ]
    assert (manifest.max_position, manifest.rms_eps, manifest.rope.theta) == (1048576, 1e-6, 160000.0)
    assert manifest.rope.yarn.model_dump() == YARN


def test_a_config_of_flash_is_the_preset():
    ratios = [0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(2, 43)), 0]
    flash = from_config(DEEPSEEK | {"num_hidden_layers": 43, "compress_ratios": ratios})
    assert flash.to_json() | {"model": "deepseek-v4-flash"} == load("deepseek-v4-flash").to_json()


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        (DEEPSEEK | {"rope_scaling": None}, 160000.0),
        (DEEPSEEK | {"rope_scaling": None, "compress_rope_theta": 5000}, 5000.0),
        (TRANSFORMERS | {"rope_parameters": {"compress": {"rope_type": "default", "rope_theta": 7000.0}}}, 7000.0),
    ],
)
def test_a_config_without_yarn(config, theta):
    rope = from_config(config).rope
    assert (rope.theta, rope.yarn) == (theta, None)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (DEEPSEEK | {"compress_ratios": [4]}, ("1 of 5 layers",)),
        (DEEPSEEK | {"compress_ratios": [0, 0, 8, 128, 4]}, ("layer 2", "8")),
        (DEEPSEEK | {"compress_ratios": [0] * 6}, ("compressors",)),
        (DEEPSEEK | {"compress_ratios": "4"}, ("1 of 5 layers",)),
        (DEEPSEEK | {"compress_ratios": [None] * 5}, ("DeepSeek-V4",)),
        (DEEPSEEK | {"num_hidden_layers": "many"}, ("DeepSeek-V4",)),
        (DEEPSEEK | {"rope_scaling": {"type": "yarn"}}, ("factor",)),
        (DEEPSEEK | {"head_dim": 500}, ("head_dim",)),
        ({k: v for k, v in DEEPSEEK.items() if k != "max_position_embeddings"}, ("max_position_embeddings",)),
        ({k: v for k, v in TRANSFORMERS.items() if k != "layer_types"}, ("layer_types",)),
        (TRANSFORMERS | {"layer_types": ["full_attention"] * 5}, ("full_attention",)),
        (TRANSFORMERS | {"layer_types": TRANSFORMERS["layer_types"][:4]}, ("4 of 5 layers",)),
        (TRANSFORMERS | {"compress_rates": {"compressed_sparse_attention": 8}}, ("layer 2", "8")),
    ],
    ids=lambda value: str(value)[-40:],
)
def test_a_config_of_another_model_stops_the_start(config, words):
    with no_start(*words):
        from_config(config)


def compat(body: dict[str, Any] = SMALL, seed: int = 1) -> str:
    manifest = parse(body, "test")
    return compat_hash(manifest, weight_files.seeded(manifest, seed))


def test_compat_is_the_same_from_start_to_start():
    assert compat() == compat()
    assert len(compat()) == 32
    assert int(compat(), 16) >= 0


@pytest.mark.parametrize(
    "body",
    [
        SMALL | {"rms_eps": 1e-5},
        SMALL | {"rope": {"theta": 10000.0}},
        SMALL | {"rope": {"yarn": {}}},
        SMALL | {"compressors": SMALL["compressors"][:2]},
        changed_part(name="layers.5.hca"),
        changed_part(ratio=16),
        changed_part(head_dim=256),
        changed_part(cache_format="bf16"),
        changed_part(scale_floor="scale"),
        changed_part(2, indexer_profile="sglang"),
        changed_part(2, cache_format="indexer_mxfp4", page_entries=2),
        changed_part(cache_format="fp8"),
        changed_part(cache_format="fp8", fp8_scale=2.0),
        changed_part(0, kind="csa", ratio=4),
    ],
    ids=lambda body: str(body)[-60:],
)
def test_what_changes_compat(body):
    assert compat(body) != compat()


def test_each_change_gives_its_own_compat():
    bodies = [changed_part(cache_format="fp8"), changed_part(cache_format="fp8", fp8_scale=2.0), SMALL]
    assert len({compat(body) for body in bodies}) == 3
    assert compat(seed=2) != compat(seed=1)


@pytest.mark.parametrize("index", [0, 1], ids=["ape", "norm"])
@pytest.mark.parametrize("name", [HCA, CSA, INDEXER])
def test_one_bit_of_the_weights_changes_compat(name, index):
    manifest = parse(SMALL, "test")
    weights = weight_files.seeded(manifest, 1)
    before = compat_hash(manifest, weights)
    flat = weights[name][index].view(-1)
    flat[-1] = flat[-1].nextafter(flat[-1] + 1)
    assert compat_hash(manifest, weights) != before


@pytest.mark.parametrize(
    "body",
    [
        SMALL | {"model": "renamed"},
        SMALL | {"max_position": 4096},
        SMALL | {"draft_slack": 8},
        SMALL | {"compressors": SMALL["compressors"][::-1]},
        SMALL | {"rms_eps": manifests.RMS_EPS, "rope": {"dim": 64, "theta": 160000, "yarn": None}},
        changed_part(page_entries=16),
        changed_part(page_bytes=4096),
        changed_part(input_dtype="bf16"),
        changed_part(scale_floor="amax"),
    ],
    ids=lambda body: str(body)[-60:],
)
def test_what_does_not_change_compat(body):
    assert compat(body) == compat()
