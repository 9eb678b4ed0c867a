"""weights: of a file, of a checkpoint of which nothing else is read, or of a seed."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from kvfold_service import manifest as manifests
from kvfold_service import weights
from kvfold_service.manifest import parse
from kvfold_service.weights import Weights, load, seeded
from tests.service_cases import CSA, HCA, INDEXER, NAMES, SMALL, no_start

MANIFEST = parse(SMALL, "test")
SEEDED = seeded(MANIFEST, 7)
CHECKPOINT_NAMES = {
    HCA: "layers.0.attn.compressor",
    CSA: "layers.1.attn.compressor",
    INDEXER: "layers.1.attn.indexer.compressor",
}


def tensors(names: dict[str, str] | None = None, norm_dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """The seeded weights as a file has them."""
    found = {}
    for name, (ape, norm) in SEEDED.items():
        prefix = (names or {}).get(name, name)
        found |= {f"{prefix}.ape": ape, f"{prefix}.norm.weight": norm.to(norm_dtype)}
    return found


def assert_equal(weights: Weights, norm_dtype: torch.dtype = torch.float32) -> None:
    assert set(weights) == set(NAMES)
    for name, (ape, norm) in weights.items():
        assert ape.dtype == norm.dtype == torch.float32
        assert torch.equal(ape, SEEDED[name][0])
        assert torch.equal(norm, SEEDED[name][1].to(norm_dtype).float())


def in_file(path, found: dict[str, torch.Tensor]) -> str:
    file = path / "w.safetensors"
    save_file(found, file)
    return str(file)


@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefix", [None, "", "model."])
def test_a_file(tmp_path, prefix, norm_dtype):
    names = None if prefix is None else {name: prefix + there for name, there in CHECKPOINT_NAMES.items()}
    assert_equal(load(in_file(tmp_path, tensors(names, norm_dtype)), MANIFEST), norm_dtype)


def test_the_manifest_s_own_names_come_first(tmp_path):
    found = tensors() | {f"{CHECKPOINT_NAMES[HCA]}.ape": torch.zeros(8, 128)}
    assert_equal(load(in_file(tmp_path, found), MANIFEST))


@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_a_checkpoint_folder(tmp_path, index):
    """Two files of ours among tensors that are not."""
    found = tensors(CHECKPOINT_NAMES, torch.bfloat16)
    first = {name: found[name] for name in list(found)[:3]} | {"embed.weight": torch.zeros(4, 4)}
    second = {name: found[name] for name in list(found)[3:]} | {"layers.0.attn.wq.weight": torch.zeros(4)}
    files = {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second}
    for file, held in files.items():
        save_file(held, tmp_path / file)
    if index:
        weight_map = {name: file for file, held in files.items() for name in held}
        body = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(body))
    assert_equal(load(str(tmp_path), MANIFEST), torch.bfloat16)


def test_files_of_other_tensors_are_not_opened(tmp_path):
    """They may be absent, or be no safetensors at all: only the index says that they are there."""
    in_file(tmp_path, tensors(CHECKPOINT_NAMES))
    (tmp_path / "broken.safetensors").write_bytes(b"\xff" * 64)
    weight_map = dict.fromkeys(tensors(CHECKPOINT_NAMES), "w.safetensors")
    weight_map |= {"head.weight": "absent.safetensors", "embed.weight": "broken.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_equal(load(str(tmp_path), MANIFEST))


def test_an_index_reaches_no_file_outside_of_its_folder(tmp_path):
    inside = tmp_path / "checkpoint"
    inside.mkdir()
    in_file(tmp_path, tensors())
    weight_map = dict.fromkeys(tensors(), "../w.safetensors")
    (inside / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with no_start("w.safetensors", "cannot be read"):
        load(str(inside), MANIFEST)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({f"{CSA}.ape": torch.zeros(4, 128)}, (f"{CSA}.ape", "[4, 256]", "[4, 128]")),
        ({f"{CSA}.ape": torch.zeros(256, 4)}, (f"{CSA}.ape", "[4, 256]")),
        ({f"{HCA}.norm.weight": torch.ones(64)}, (f"{HCA}.norm.weight", "[128]", "[64]")),
        ({f"{HCA}.norm.weight": torch.ones(1, 128)}, (f"{HCA}.norm.weight", "[128]")),
        ({f"{HCA}.ape": torch.zeros(8, 128, dtype=torch.float16)}, (f"{HCA}.ape", "fp32 or bf16")),
        ({f"{HCA}.ape": torch.zeros(8, 128, dtype=torch.int32)}, (f"{HCA}.ape", "fp32 or bf16")),
        ({f"{INDEXER}.ape": torch.full((4, 128), float("nan"))}, (f"{INDEXER}.ape", "not finite")),
        ({f"{INDEXER}.norm.weight": torch.full((64,), float("inf"))}, (f"{INDEXER}.norm.weight", "not finite")),
        ({f"{INDEXER}.norm.weight": None}, (f"{INDEXER}.norm.weight", "layers.1.attn.indexer.compressor.norm.weight")),
        ({f"{CSA}.ape": None}, (f"{CSA}.ape", "layers.1.attn.compressor.ape")),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_weights_stop_the_start(tmp_path, changes, words):
    found = {name: tensor for name, tensor in (tensors() | changes).items() if tensor is not None}
    with no_start(*words):
        load(in_file(tmp_path, found), MANIFEST)


@pytest.mark.parametrize("seed", ["", "-1", "1.5", "x", "1 ", "٣a"])
def test_a_seed_is_a_whole_number(seed):
    with no_start("random:"):
        load(f"random:{seed}", MANIFEST)


def test_what_is_no_weights_file(tmp_path):
    with no_start("random:SEED"):
        load(str(tmp_path / "missing.safetensors"), MANIFEST)
    with no_start("holds no .safetensors file"):
        load(str(tmp_path), MANIFEST)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with no_start("index"):
        load(str(tmp_path), MANIFEST)
    text = tmp_path / "text.safetensors"
    text.write_text("no tensors here")
    with no_start("text.safetensors"):
        load(str(text), MANIFEST)


def test_a_pickle_is_not_weights(tmp_path):
    file = tmp_path / "weights.pt"
    torch.save(tensors(), file)
    with no_start("weights.pt", "safetensors"):
        load(str(file), MANIFEST)


def test_the_same_seed_gives_the_same_weights_whatever_else_is_served():
    alone = parse(SMALL | {"compressors": SMALL["compressors"][1:2]}, "test")
    for a, b in zip(load("random:7", alone)[CSA], SEEDED[CSA], strict=True):
        assert torch.equal(a, b)


def test_seeds_and_names_give_different_weights():
    other = seeded(MANIFEST, 8)
    assert not torch.equal(other[HCA][0], SEEDED[HCA][0])
    assert not torch.equal(SEEDED[HCA][1], SEEDED[CSA][1])


def test_seeded_weights_stay_as_they_are():
    """Workers of one fleet that start from one seed must agree, whatever their age."""
    ape, norm = seeded(manifests.load("tiny"), 0)[HCA]
    assert (tuple(ape.shape), tuple(norm.shape)) == ((128, 512), (512,))
    assert ape.flatten()[:3].tolist() == pytest.approx([-1.1973329, -0.7773737, -1.4729338], abs=1e-6)
    assert abs(norm.mean().item() - 1) < 0.05
    assert 0.15 < norm.std().item() < 0.25


def test_reading_for_long_tells_how_far_it_is(tmp_path, monkeypatch, caplog):
    file = in_file(tmp_path, tensors())
    with caplog.at_level("INFO", "kvfold"):
        load(file, MANIFEST)
        assert not caplog.messages, "it took no time"
        monkeypatch.setattr(weights, "_SECONDS_BETWEEN_LINES", 0.0)
        load(file, MANIFEST)
    assert caplog.messages == [f"weights of {n} of 3 compressors read" for n in (1, 2, 3)]
