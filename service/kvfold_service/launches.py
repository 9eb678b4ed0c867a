"""The kernels of a step: the check of the rows' values, then the compressors, back to back on one stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from kvfold_kernels.backends import Backend
from kvfold_service.caches import CompressorCache


class Call(NamedTuple):
    """One compressor's operands on the device. counts: None if all windows and appends are real."""

    cache: CompressorCache
    windows: torch.Tensor
    appends: torch.Tensor
    rows: torch.Tensor
    counts: torch.Tensor | None = None

    @property
    def operands(self) -> tuple[Any, ...]:
        """As `compress` takes them."""
        cache = self.cache
        exact = (self.windows, self.appends, self.rows, cache.rings, cache.group.pages, cache.compressor)
        return exact if self.counts is None else (*exact, self.counts)


class Launches:
    """Launches kernels of one backend. flags: `[1]` each on the device, lowered for the calls in their order."""

    def __init__(self, backend: Backend, compressors: Sequence[CompressorCache], flags: Sequence[torch.Tensor]) -> None:
        assert backend.flags is not None
        self._raise_for, self._compress, self._compress_layer = (
            backend.flags.raise_for,
            backend.compress,
            backend.compress_layer,
        )
        self._layers, self._flags = _layers(compressors), flags

    def run(self, calls: Sequence[Call]) -> tuple[int, ...]:
        """Launches of each call's compress; one that does a whole layer counts for the main compressor."""
        launches = [0] * len(calls)
        for group in self._groups(calls):
            for i in group:
                self._raise_for(calls[i].rows, calls[i].rows.shape[0], self._flags[i])
            if self._compress_layer is None or len(group) == 1:
                launches[group[0]] = self._compress(*calls[group[0]].operands)
            else:
                main, indexer = group
                both = self._compress_layer(calls[main].operands, calls[indexer].operands)
                launches[main], launches[indexer] = both - both // 2, both // 2
        return tuple(launches)

    def _groups(self, calls: Sequence[Call]) -> Iterable[list[int]]:
        """What runs together: main and indexer compressor of a csa layer if their dtypes agree, else each alone."""
        if self._compress_layer is None:
            return [[i] for i in range(len(calls))]
        groups: dict[Any, list[int]] = {}
        for i, call in enumerate(calls):
            layer = self._layers[call.cache.index]
            groups.setdefault((layer, call.rows.dtype, call.cache.rings.dtype), []).append(i)
        for group in groups.values():
            group.sort(key=lambda i: calls[i].cache.part.kind)  # csa before indexer
        return groups.values()


def _layers(compressors: Sequence[CompressorCache]) -> list[Any]:
    """By compressor: the name of its layer if that has one csa and one indexer compressor, else a number of its own."""
    layers = [cache.name.rpartition(".")[0] for cache in compressors]
    kinds: dict[str, list[str]] = {}
    for layer, cache in zip(layers, compressors, strict=True):
        kinds.setdefault(layer, []).append(cache.part.kind)
    return [layer if sorted(kinds[layer]) == ["csa", "indexer"] else i for i, layer in enumerate(layers)]
