"""ape and norm weights of every compressor: from safetensors, a checkpoint folder, or seeded.

Names in a file: NAME.ape and NAME.norm.weight; in a DeepSeek-V4 checkpoint, for layer N,
layers.N.attn.compressor.{ape, norm.weight} (hca, csa) and layers.N.attn.indexer.compressor.{ape, norm.weight}.
Of a checkpoint only these tensors are read.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from kvfold_service.errors import StartError
from kvfold_service.manifest import CompressorPart, Manifest

Weights = dict[str, tuple[torch.Tensor, torch.Tensor]]
"""Compressor name → (ape fp32 `[ratio, halves·head_dim]`, norm weight fp32 `[head_dim]`)."""

log = logging.getLogger("kvfold")
_SECONDS_BETWEEN_LINES = 2.0
_LAYER = re.compile(r"layers\.(\d+)\.(?:hca|csa|indexer)")


def load(source: str, manifest: Manifest) -> Weights:
    """`random:SEED`, a .safetensors file, or a checkpoint folder. Raises StartError."""
    if source.startswith("random:"):
        seed = source.removeprefix("random:")
        if not seed.isdecimal():
            raise StartError(f"weights {source!r}: the seed after random: must be a whole number")
        return seeded(manifest, int(seed))
    path = Path(source)
    if path.is_dir():
        files = _files_of(path)
    elif path.is_file():
        files = {}
        _index_file(path, files)
    else:
        raise StartError(f"there is no weights file or folder {source!r}; random:SEED makes seeded weights")
    weights: Weights = {}
    due = time.monotonic() + _SECONDS_BETWEEN_LINES
    for part in manifest.compressors:
        weights[part.name] = _read(part, manifest, files)
        if time.monotonic() >= due:
            log.info("weights of %d of %d compressors read", len(weights), len(manifest.compressors))
            due = time.monotonic() + _SECONDS_BETWEEN_LINES
    return weights


def seeded(manifest: Manifest, seed: int) -> Weights:
    """ape ~ N(0, 1), norm weight ~ 1 + N(0, 0.2²); the same for a name and seed whatever else the manifest lists."""
    weights: Weights = {}
    for part in manifest.compressors:
        geometry = part.geometry(0)
        digest = hashlib.blake2b(f"{seed}:{part.name}".encode(), digest_size=8).digest()
        random = np.random.default_rng(int.from_bytes(digest, "little"))
        ape = random.standard_normal((geometry.ratio, geometry.half_width), np.float32)
        norm = 1 + np.float32(0.2) * random.standard_normal(geometry.head_dim, np.float32)
        weights[part.name] = torch.from_numpy(ape), torch.from_numpy(norm)
    return weights


def digest(weights: Weights, names: Iterable[str]) -> str:
    """A digest of the weights of these compressors, for `compat`."""
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(names):
        state.update(name.encode())
        for tensor in weights[name]:
            state.update(tensor.numpy().tobytes())
    return state.hexdigest()


def _index_file(path: Path, files: dict[str, Path]) -> None:
    try:
        with safe_open(path, framework="pt") as opened:
            files.update(dict.fromkeys(opened.keys(), path))
    except (OSError, SafetensorError) as error:
        raise StartError(f"weights file {path.name} is not readable safetensors: {error}") from None


def _files_of(folder: Path) -> dict[str, Path]:
    """Tensor name → file, from the checkpoint's index, or from the headers of its files."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return {
                name: folder / Path(file).name for name, file in json.loads(index.read_text())["weight_map"].items()
            }
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise StartError(f"{index.name} is not a safetensors index: {error!r}") from None
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        _index_file(path, files)
    if not files:
        raise StartError(f"folder {folder.name} holds no .safetensors file")
    return files


def _names(part: CompressorPart, suffix: str) -> list[str]:
    names = [f"{part.name}.{suffix}"]
    if found := _LAYER.fullmatch(part.name):
        owner = "attn.indexer.compressor" if part.kind == "indexer" else "attn.compressor"
        names += [f"{prefix}layers.{found[1]}.{owner}.{suffix}" for prefix in ("", "model.")]
    return names


def _read(part: CompressorPart, manifest: Manifest, files: dict[str, Path]) -> tuple[torch.Tensor, torch.Tensor]:
    geometry = part.geometry(manifest.draft_slack)
    ape = _tensor(part, "ape", (geometry.ratio, geometry.half_width), files)
    norm = _tensor(part, "norm.weight", (geometry.head_dim,), files)
    return ape, norm


def _tensor(part: CompressorPart, suffix: str, shape: tuple[int, ...], files: dict[str, Path]) -> torch.Tensor:
    names = _names(part, suffix)
    name = next((name for name in names if name in files), None)
    if name is None:
        raise StartError(f"the weights hold no {names[0]}" + (f" (nor {', '.join(names[1:])})" if names[1:] else ""))
    try:
        with safe_open(files[name], framework="pt") as opened:
            tensor = opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise StartError(f"{name} cannot be read from {files[name].name}: {error}") from None
    if tuple(tensor.shape) != shape or tensor.dtype not in (torch.float32, torch.bfloat16):
        raise StartError(f"{name} must be fp32 or bf16 {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")
    if not torch.isfinite(tensor).all():
        raise StartError(f"{name} holds a value that is not finite")
    return tensor.to(torch.float32).contiguous()
