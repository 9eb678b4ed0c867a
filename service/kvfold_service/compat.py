"""`compat`: a hash of all that must agree before entries and open rows may pass between two workers."""

from __future__ import annotations

import hashlib
import json

from kvfold_client.wire import PROTOCOL_VERSION
from kvfold_service.manifest import Manifest
from kvfold_service.weights import Weights, digest


def compat_hash(manifest: Manifest, weights: Weights) -> str:
    """32 hex digits over protocol version, names, kinds, ratios, dims, formats, floors, profiles, eps, rope, weights.

    Page size, draft slack, input dtype, limits and backend are left out: workers may differ in them.
    """
    compressors = [
        {
            "name": part.name,
            "kind": part.kind,
            "ratio": part.ratio,
            "head_dim": part.head_dim,
            "cache_format": part.cache_format,
            "fp8_scale": part.fp8_scale,
            "scale_floor": part.scale_floor,
            "indexer_profile": part.indexer_profile,
        }
        for part in sorted(manifest.compressors, key=lambda part: part.name)
    ]
    agreed = {
        "protocol": PROTOCOL_VERSION,
        "rms_eps": manifest.rms_eps,
        "rope": manifest.rope.model_dump(mode="json"),
        "compressors": compressors,
        "weights": digest(weights, [part.name for part in manifest.compressors]),
    }
    return hashlib.blake2b(json.dumps(agreed, sort_keys=True).encode(), digest_size=16).hexdigest()
