"""logs: one line an event, without secrets; nobody waits for who reads them, and what is lost is counted."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Iterator

import httpx
import pytest

from kvfold_service import logs
from tests.service_cases import Process


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """(read end, write end), both closed at the end."""
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def logger_to(descriptor: int, form: logging.Formatter, most_lines: int) -> tuple[logging.Logger, logs.Lines]:
    handler = logs.Lines(descriptor, most_lines)
    handler.setFormatter(form)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    return logger, handler


def test_a_full_pipe_holds_up_nobody_and_what_is_lost_is_counted(pipe):
    reader, writer = pipe
    logger, handler = logger_to(writer, logs.JsonFormatter([]), 10)
    began = time.monotonic()
    for i in range(100):
        logger.warning("line %d %s", i, "x" * 10_000)
    assert time.monotonic() - began < 1
    handler.flush()  # nobody reads: it gives up
    assert time.monotonic() - began < 3
    text, num_dropped = "", 0
    while text.count("line ") + num_dropped < 100 or not text.endswith("\n"):
        text += os.read(reader, 1 << 16).decode()
        num_dropped = sum(map(int, re.findall(r"(\d+) log lines were dropped", text)))
    messages = [json.loads(line)["message"] for line in text.splitlines()]
    kept = [int(message.split()[1]) for message in messages if message.startswith("line")]
    assert kept == sorted(kept)
    assert 10 <= len(kept) < 60
    logger.warning("the last")
    assert b"the last" in os.read(reader, 1 << 16)


def test_a_full_disk_is_no_reason_to_stop():
    with open("/dev/full", "w") as full:
        logger, handler = logger_to(full.fileno(), logs.Formatter([]), 10)
        for _ in range(3):
            logger.error("lost")
            handler.flush()


def test_flush_waits_for_the_last_line(pipe):
    reader, writer = pipe
    logger, handler = logger_to(writer, logs.Formatter([]), 1000)
    for i in range(50):
        logger.error("line %d", i)
    handler.flush()
    assert len(os.read(reader, 1 << 16).splitlines()) == 50


def test_the_level_is_ours_and_not_the_libraries(monkeypatch):
    before = logging.getLogger("kvfold").level
    monkeypatch.setattr(logging, "basicConfig", lambda level, **_: levels.append(level))
    levels: list[str] = []
    try:
        for level in ("debug", "error"):
            logs.start(level, "text", [])
            levels.append(logging.getLevelName(logging.getLogger("kvfold").level))
    finally:
        logging.getLogger("kvfold").setLevel(before)
        logging.captureWarnings(False)
    assert levels == ["WARNING", "DEBUG", "ERROR", "ERROR"]


def test_a_worker_whose_log_nobody_reads_goes_on(tmp_path):
    """Its stderr is a pipe, full after some hundred lines; then the reader leaves altogether."""
    fifo = tmp_path / "stderr"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with Process(tmp_path, "--log-level=debug", log=str(fifo)) as process, httpx.Client(base_url=process.url) as http:
        slowest = 0.0
        for i in range(200):
            began = time.monotonic()
            assert http.get(f"/v1/requests/{i}-{'x' * 900}").status_code == 404
            slowest = max(slowest, time.monotonic() - began)
        assert slowest < 2
        read = os.read(reader, 1 << 20)
        assert len(read) > 60_000
        assert b"GET /v1/requests/0-xxx" in read
        os.close(reader)
        for i in range(20):
            assert http.get(f"/v1/requests/{i}").status_code == 404
        assert process.end() == 0


# -- redaction -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        ("Authorization: Bearer abc.def", "Authorization: Bearer [token]"),
        ("'bearer  x', next", "'bearer  [token]', next"),
        ("read AYLa1ipLaD38AAAAAAAAAgAAAAAAAADMjjMYX6bTfV49uM86Ciz0!", "read [handle]!"),
        (
            "id AYLa1ipLaD38AAAAAAAAAgAAAAAAAADMjjMYX6bTfV49uM86Ciz0x",
            "id AYLa1ipLaD38AAAAAAAAAgAAAAAAAADMjjMYX6bTfV49uM86Ciz0x",
        ),
        ("my-secret-token-1 and my-secret-token-12", "[token] and [token]"),
        ("nothing to hide", "nothing to hide"),
    ],
)
def test_what_is_blacked_out(text, redacted):
    assert logs.Formatter(["my-secret-token-1", "my-secret-token-12"]).redacted(text) == redacted
    assert logs.Formatter([]).redacted("my-secret-token-1") == "my-secret-token-1"
