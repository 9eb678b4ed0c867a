"""The model manifest: which compressors a worker serves, and with what geometry, format and rotation.

Sources of the presets: DeepSeek-V4-Flash has 43 layers, 0 and 1 without a compressor, then csa (with its indexer) on
even and hca on odd layers; DeepSeek-V4-Pro has 61, hca on 0, 1 and then odd layers, csa (with indexer) on even ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from kvfold_kernels.geometry import DRAFT_SLACK, KINDS, RMS_EPS, Geometry, PageLayout, entry_format
from kvfold_kernels.rope import Rope, Yarn
from kvfold_service.errors import StartError, first_problem

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@-]{1,128}$")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class YarnPart(_Part):
    factor: Positive = 16.0
    original_max_position: Annotated[StrictInt, Field(ge=1)] = 65536
    beta_fast: Positive = 32
    beta_slow: Positive = 1

    @model_validator(mode="after")
    def _ordered(self) -> YarnPart:
        if self.beta_fast < self.beta_slow:
            raise ValueError("beta_fast must be at least beta_slow")
        return self


class RopePart(_Part):
    dim: Literal[64] = 64
    theta: Annotated[float, Field(gt=1, allow_inf_nan=False)] = 160000.0
    yarn: YarnPart | None = None

    def rope(self) -> Rope:
        return Rope(self.dim, self.theta, Yarn(**self.yarn.model_dump()) if self.yarn else None)


class CompressorPart(_Part):
    name: Name
    kind: Literal["hca", "csa", "indexer"]
    ratio: StrictInt
    head_dim: StrictInt
    cache_format: str
    page_entries: StrictInt | None = None
    page_bytes: Annotated[StrictInt, Field(le=2**31)] | None = None
    fp8_scale: Annotated[float, Field(gt=2.0**-126, lt=2.0**126)] = 1.0
    scale_floor: Literal["amax", "scale"] = "amax"
    indexer_profile: Literal["vllm", "sglang"] = "vllm"
    input_dtype: Literal["bf16", "fp32", "any"] = "any"

    def geometry(self, draft_slack: int) -> Geometry:
        return Geometry(self.kind, self.ratio, self.head_dim, draft_slack)

    def layout(self) -> PageLayout:
        geometry = self.geometry(0)
        entries = geometry.default_page_entries if self.page_entries is None else self.page_entries
        return PageLayout.of(entry_format(self.cache_format, geometry), entries, self.page_bytes)

    @model_validator(mode="after")
    def _consistent(self) -> CompressorPart:
        self.layout()
        if self.scale_floor == "scale" and self.cache_format not in ("fp8_ds_mla", "indexer_fp8"):
            raise ValueError(f"cache_format {self.cache_format} has no scale_floor")
        if self.indexer_profile != "vllm" and self.cache_format not in ("indexer_fp8", "indexer_mxfp4"):
            raise ValueError(f"cache_format {self.cache_format} has no indexer_profile")
        if self.indexer_profile == "sglang" and self.scale_floor == "scale":
            raise ValueError("indexer_profile sglang has no scale_floor")
        if self.fp8_scale != 1.0 and self.cache_format != "fp8":
            raise ValueError(f"cache_format {self.cache_format} has no fp8_scale")
        return self


class Manifest(_Part):
    model: str = "unnamed"
    max_position: Annotated[StrictInt, Field(ge=1, le=2**24)]
    rms_eps: Positive = RMS_EPS
    rope: RopePart = RopePart()
    draft_slack: Annotated[StrictInt, Field(ge=0, le=1024)] = DRAFT_SLACK
    compressors: Annotated[tuple[CompressorPart, ...], Field(min_length=1, max_length=1024)]

    @model_validator(mode="after")
    def _unique(self) -> Manifest:
        names = [part.name for part in self.compressors]
        if len(set(names)) != len(names):
            raise ValueError("two compressors have the same name")
        return self

    def to_json(self) -> dict[str, Any]:
        """As a file would say it: what has its default value and is optional is left out, but for `yarn`."""
        body = self.model_dump(mode="json", exclude_defaults=True)
        rope = self.rope.model_dump(mode="json")
        parts = [
            {
                "name": part.name,
                **part.model_dump(mode="json", exclude_defaults=True),
                "page_entries": part.layout().entries,
            }
            for part in self.compressors
        ]
        return {**body, "model": self.model, "rms_eps": self.rms_eps, "rope": rope, "compressors": parts}


_DEFAULT_FORMAT = {"hca": "fp8_ds_mla", "csa": "fp8_ds_mla", "indexer": "indexer_fp8"}


def _layer(layer: int, ratio: int, **numbers: int) -> list[dict[str, Any]]:
    """The compressors of one layer by its compress ratio: 0 none, 4 csa and indexer, 128 hca."""
    kinds = {0: (), 4: ("csa", "indexer"), 128: ("hca",)}
    if ratio not in kinds:
        raise StartError(f"layer {layer} has compress ratio {ratio}; only 0, 4 and 128 are known")
    return [
        {
            "name": f"layers.{layer}.{kind}",
            "kind": kind,
            "ratio": ratio,
            "head_dim": numbers.get(kind, KINDS[kind].head_dim),
            "cache_format": _DEFAULT_FORMAT[kind],
        }
        for kind in kinds[ratio]
    ]


def _model(name: str, max_position: int, ratios: list[int]) -> dict[str, Any]:
    return {
        "model": name,
        "max_position": max_position,
        "rope": {"yarn": {}},
        "compressors": [part for layer, ratio in enumerate(ratios) for part in _layer(layer, ratio)],
    }


PRESETS = {
    "tiny": _model("tiny", 8192, [128, 4]),
    "deepseek-v4-flash": _model(
        "deepseek-v4-flash", 1 << 20, [0, 0, *(4 if i % 2 == 0 else 128 for i in range(2, 43))]
    ),
    "deepseek-v4-pro": _model(
        "deepseek-v4-pro", 1 << 20, [128, 128, *(4 if i % 2 == 0 else 128 for i in range(2, 61))]
    ),
}


def parse(body: Any, where: str) -> Manifest:
    """Raises StartError with one sentence."""
    try:
        return Manifest.model_validate(body)
    except ValidationError as error:
        raise StartError(f"{where}: {first_problem(error)}") from None


def load(source: str) -> Manifest:
    """A preset by name, or a JSON file: a manifest, or a model's Hugging Face config.json. Raises StartError."""
    if source in PRESETS:
        return parse(PRESETS[source], source)
    path = Path(source)
    if not path.is_file():
        raise StartError(f"there is no manifest file and no preset {source!r}; presets: {', '.join(PRESETS)}")
    try:
        body = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise StartError(f"manifest {path.name} is not readable JSON: {error}") from None
    if not isinstance(body, dict):
        raise StartError(f"manifest {path.name} must be a JSON object")
    if "compressors" not in body and "num_hidden_layers" in body:
        return from_config(body)
    return parse(body, f"manifest {path.name}")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("an object names a key twice")
    return dict(pairs)


_RATIO_OF_TYPE = {"sliding_attention": 0, "compressed_sparse_attention": 4, "heavily_compressed_attention": 128}


def from_config(config: dict[str, Any]) -> Manifest:
    """The manifest of a DeepSeek-V4 `config.json`: `compress_ratios` (as DeepSeek ships it; layers past
    num_hidden_layers are its draft layers and are left out) or `layer_types` (as transformers writes it)."""
    try:
        num_layers = int(config["num_hidden_layers"])
        if config.get("compress_ratios") is not None:
            ratios = [int(ratio) for ratio in config["compress_ratios"]][:num_layers]
        else:
            ratio_of = _RATIO_OF_TYPE | (config.get("compress_rates") or {})
            ratios = [int(ratio_of[kind]) for kind in config["layer_types"]]
        if len(ratios) < num_layers:
            raise StartError(f"config.json names a compress ratio for {len(ratios)} of {num_layers} layers")
        head_dim, index_dim = int(config.get("head_dim", 512)), int(config.get("index_head_dim", 128))
        numbers = {"hca": head_dim, "csa": head_dim, "indexer": index_dim}
        body = {
            "model": str(config.get("_name_or_path") or config.get("model_type", "deepseek_v4")),
            "max_position": int(config["max_position_embeddings"]),
            "rms_eps": float(config.get("rms_norm_eps", RMS_EPS)),
            "rope": _rope_of(config),
            "compressors": [part for i, ratio in enumerate(ratios) for part in _layer(i, ratio, **numbers)],
        }
    except (KeyError, TypeError, ValueError) as error:
        raise StartError(f"config.json is not a DeepSeek-V4 configuration: {type(error).__name__} {error}") from None
    return parse(body, "config.json")


def _rope_of(config: dict[str, Any]) -> dict[str, Any]:
    nested = (config.get("rope_parameters") or {}).get("compress")
    scaling = nested or config.get("rope_scaling") or config.get("rope_parameters") or {}
    theta = scaling.get("rope_theta") or config.get("compress_rope_theta") or 160000.0
    if nested is None and config.get("compress_rope_theta"):
        theta = config["compress_rope_theta"]
    rope: dict[str, Any] = {"theta": float(theta)}
    if scaling.get("rope_type", scaling.get("type")) == "yarn":
        rope["yarn"] = {
            "factor": float(scaling["factor"]),
            "original_max_position": int(scaling["original_max_position_embeddings"]),
            "beta_fast": float(scaling.get("beta_fast") or 32),
            "beta_slow": float(scaling.get("beta_slow") or 1),
        }
    return rope
