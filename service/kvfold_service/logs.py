"""Log lines on stderr, as text or as one JSON object a line. Tokens and handles are never in them."""

from __future__ import annotations

import datetime
import json
import logging
import re
import sys
from typing import Any, Final

_HANDLE: Final = re.compile(r"(?<![A-Za-z0-9_-])A[Q-Za-f][A-Za-z0-9_-]{50}(?![A-Za-z0-9_-])")
_BEARER: Final = re.compile(r"(?i)(bearer\s+)[^\s\"',]+")


def fields(**values: Any) -> dict[str, Any]:
    """What a line says besides its text, as `extra` of a log call."""
    return {"fields": values}


class Formatter(logging.Formatter):
    """`time level logger text name=value…`; `secrets` are words that are blacked out wherever they stand."""

    def __init__(self, secrets: list[str]) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")
        longest_first = sorted(secrets, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, longest_first))) if secrets else None

    def format(self, record: logging.LogRecord) -> str:
        return self.redacted(self.line(record))

    def line(self, record: logging.LogRecord) -> str:
        told = " ".join(f"{name}={value}" for name, value in getattr(record, "fields", {}).items())
        return f"{super().format(record)} {told}".rstrip()

    def redacted(self, text: str) -> str:
        text = _BEARER.sub(r"\1[token]", _HANDLE.sub("[handle]", text))
        return self._secrets.sub("[token]", text) if self._secrets else text


class JsonFormatter(Formatter):
    """{"time", "level", "logger", "message", "exception", … and the fields}."""

    def line(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry | getattr(record, "fields", {}), ensure_ascii=False, default=str)


def start(level: str, form: str, secrets: list[str]) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((JsonFormatter if form == "json" else Formatter)(secrets))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
