"""The page /ui: what /v1/stats says, live. One file without anything from elsewhere, and no rights beyond it."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Final

from fastapi import Response

PAGE: Final = Path(__file__).with_name("ui.html").read_text(encoding="utf-8")


def _hash_of(tag: str) -> str:
    """What a policy calls the text of the page's one element of this kind."""
    (text,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


HEADERS: Final = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hash_of('script')}",
            f"style-src {_hash_of('style')}",
            "img-src data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def page() -> Response:
    return Response(PAGE, headers=HEADERS, media_type="text/html")
