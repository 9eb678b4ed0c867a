"""`kvfold manifest`: a manifest as JSON, from a preset or a model's config.json."""

from __future__ import annotations

import argparse
import json
import sys

from kvfold_service import manifest as manifests
from kvfold_service.errors import StartError

EXAMPLES = """
examples
  kvfold manifest deepseek-v4-flash --bytes
      what a token takes in pages and a request in rings: how far --cache-bytes and --max-requests go
  kvfold manifest tiny > my.json
      a manifest to change, and to serve: kvfold serve --manifest my.json --weights random:1
  kvfold manifest /models/DeepSeek-V4/config.json
      of a model's own configuration
"""


def run(argv: list[str]) -> int:
    """Print a manifest: of a preset, or made from a Hugging Face config.json."""
    parser = argparse.ArgumentParser(
        prog="kvfold manifest",
        description=run.__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", help=f"a config.json, a manifest, or a preset: {', '.join(manifests.PRESETS)}")
    parser.add_argument("--bytes", action="store_true", help="print bytes a token and a request instead")
    arguments = parser.parse_args(argv)
    try:
        manifest = manifests.load(arguments.source)
    except StartError as error:
        print(f"kvfold manifest: {error}", file=sys.stderr)
        return 2
    print(_sizes(manifest) if arguments.bytes else json.dumps(manifest.to_json(), indent=1))
    return 0


def _sizes(manifest: manifests.Manifest) -> str:
    """Bytes of cache for a token, and of rings for a request, over all compressors."""
    per_token = sum(part.layout().page_bytes / (part.layout().entries * part.ratio) for part in manifest.compressors)
    rings = 0
    for part in manifest.compressors:
        geometry = part.geometry(manifest.draft_slack)
        rings += geometry.ring_rows * geometry.row_width * (2 if part.input_dtype == "bf16" else 4)
    num = len(manifest.compressors)
    return f"{num} compressors, {per_token:.0f} bytes a token in pages, {rings} bytes a request in rings"
