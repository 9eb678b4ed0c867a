"""Log lines on stderr, as text or as one JSON object a line. Tokens and handles are never in them.

Who logs never waits for who reads: lines are written by a thread of their own, and dropped and counted while there is
no room.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import queue
import re
import threading
from contextlib import suppress
from typing import Any, Final

STDERR: Final = 2
MOST_LINES: Final = 4096
"""Lines that may wait to be written."""
_FLUSH_S: Final = 1.0
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


class Lines(logging.Handler):
    """Writes to a file descriptor, past Python's own buffers: a thread that is stuck there holds no lock at the end."""

    def __init__(self, descriptor: int, most_lines: int = MOST_LINES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._waiting: queue.Queue[str] = queue.Queue(most_lines)
        self._counting = threading.Lock()
        self._num_dropped = 0
        self._thread: threading.Thread | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_forever, name="kvfold-log", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(self.format(record))
        except queue.Full:
            with self._counting:
                self._num_dropped += 1

    def flush(self) -> None:
        """Wait until all is written, but not long."""
        with self._waiting.all_tasks_done:
            self._waiting.all_tasks_done.wait_for(lambda: not self._waiting.unfinished_tasks, _FLUSH_S)

    def _write_forever(self) -> None:
        while True:
            self._write(self._waiting.get())
            with self._counting:
                num_dropped, self._num_dropped = self._num_dropped, 0
            if num_dropped:
                text = f"{num_dropped} log lines were dropped: nobody took them"
                told = {"name": "kvfold", "levelno": logging.WARNING, "levelname": "WARNING", "msg": text}
                self._write(self.format(logging.makeLogRecord(told)))
            self._waiting.task_done()

    def _write(self, line: str) -> None:
        data = memoryview(f"{line}\n".encode(errors="backslashreplace"))
        with suppress(OSError):  # its disk is full, or its reader has gone: no reason not to serve
            while data:
                data = data[os.write(self._descriptor, data) :]


def start(level: str, form: str, secrets: list[str]) -> None:
    """Log from this level on; what libraries say, from warnings on."""
    handler = Lines(STDERR)
    handler.setFormatter((JsonFormatter if form == "json" else Formatter)(secrets))
    logging.basicConfig(level="ERROR" if level == "error" else "WARNING", handlers=[handler], force=True)
    logging.getLogger("kvfold").setLevel(level.upper())
    logging.captureWarnings(True)


def flush() -> None:
    """Before a process ends at once."""
    for handler in logging.getLogger().handlers:
        handler.flush()
