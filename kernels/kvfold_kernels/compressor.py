"""What one compressor computes: geometry, page layout, options and weights. Everything a kernel needs but the data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvfold_kernels.geometry import RMS_EPS, Geometry, PageLayout

SCALE_FLOORS = ("amax", "scale")
INDEXER_PROFILES = ("vllm", "sglang")


@dataclass(frozen=True)
class Compressor:
    """One compressor.

    ape          fp32 `[ratio, halves·head_dim]`, added to the score of the token at position % ratio
    norm_weight  fp32 `[head_dim]` (a bf16 weight is upcast without loss)
    cos_sin      fp32 `[max_position, rope_dim]`, see `rope`
    fp8_scale    per-tensor scale of format `fp8`: a stored value times it is the entry
    scale_floor  what the power-of-two quantisers floor at 1e-4: the block's absolute maximum (`amax`; DeepSeek,
                 vLLM's Triton path, SGLang) or the scale itself (`scale`; vLLM's CUDA path)

    Raises ValueError for a weight of the wrong shape or dtype, or an option the format does not have.
    """

    geometry: Geometry
    layout: PageLayout
    ape: torch.Tensor
    norm_weight: torch.Tensor
    cos_sin: torch.Tensor
    rms_eps: float = RMS_EPS
    fp8_scale: float = 1.0
    scale_floor: str = "amax"
    indexer_profile: str = "vllm"

    def __post_init__(self) -> None:
        geometry = self.geometry
        self._expect("ape", self.ape, (geometry.ratio, geometry.half_width))
        self._expect("norm.weight", self.norm_weight, (geometry.head_dim,))
        self._expect("cos_sin", self.cos_sin, (self.cos_sin.shape[0], geometry.rope_dim))
        if self.layout.format.head_dim != geometry.head_dim:
            raise ValueError(f"the page layout is for head_dim {self.layout.format.head_dim}, not {geometry.head_dim}")
        if self.scale_floor not in SCALE_FLOORS:
            raise ValueError(f"scale_floor must be one of {', '.join(SCALE_FLOORS)}, not {self.scale_floor!r}")
        if self.scale_floor == "scale" and self.layout.format.name not in ("fp8_ds_mla", "indexer_fp8"):
            raise ValueError(f"cache_format {self.layout.format.name} has no scale_floor")
        if self.indexer_profile not in INDEXER_PROFILES:
            raise ValueError(
                f"indexer_profile must be one of {', '.join(INDEXER_PROFILES)}, not {self.indexer_profile!r}"
            )
        if self.indexer_profile != "vllm" and geometry.kind != "indexer":
            raise ValueError(f"kind {geometry.kind} has no indexer_profile")
        if self.indexer_profile == "sglang" and self.scale_floor == "scale":
            raise ValueError("indexer_profile sglang has no scale_floor")
        if not self.fp8_scale > 0 or self.fp8_scale == float("inf"):
            raise ValueError(f"fp8_scale must be a positive number, not {self.fp8_scale}")

    @staticmethod
    def _expect(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
        if tuple(tensor.shape) != shape or tensor.dtype != torch.float32:
            raise ValueError(f"{name} must be fp32 {list(shape)}, not {tensor.dtype} {list(tensor.shape)}")
