"""settings: command line over environment over defaults; whatever is wrong is one sentence and exit code 2."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from kvfold_service import serve
from kvfold_service.settings import Settings, handle_key, read
from tests.service_cases import no_start

NEEDED = ["--manifest", "tiny", "--weights", "random:1"]


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch):
    for name in Settings.model_fields:
        monkeypatch.delenv(f"KVFOLD_{name.upper()}", raising=False)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(logging, "captureWarnings", lambda capture: None)
    level = logging.getLogger("kvfold").level
    yield
    logging.getLogger("kvfold").setLevel(level)
    torch.set_grad_enabled(True)  # a start turns it off


def test_defaults():
    settings = read(NEEDED)
    assert (settings.manifest, settings.weights, settings.backend) == ("tiny", "random:1", "auto")
    assert (settings.host, settings.port) == ("127.0.0.1", 8787)
    assert settings.token_file is None
    assert settings.staging() == 2 * settings.max_body_bytes


def test_every_option_is_one_of_the_environment_too(monkeypatch):
    given = {
        "MANIFEST": "deepseek-v4-pro",
        "WEIGHTS": "random:3",
        "BACKEND": "cpu",
        "HOST": "::1",
        "PORT": "0",
        "MAX_REQUESTS": "7",
        "PAGES": "9",
        "CACHE_BYTES": "123456",
        "MAX_STEP_TOKENS": "100",
        "MAX_BODY_BYTES": "2048",
        "STAGING_BYTES": "4096",
        "LEASE_SECONDS": "5.5",
        "REMEMBERED_STEPS": "3",
        "TOKEN_FILE": "tokens",
        "HANDLE_KEY_FILE": "key",
        "WORKER_ID": "w-1",
        "INSECURE": "true",
        "LOG_LEVEL": "debug",
    }
    for name, value in given.items():
        monkeypatch.setenv(f"KVFOLD_{name}", value)
    settings = read([])
    told = {name.upper(): getattr(settings, name) for name in Settings.model_fields}
    assert given.keys() <= told.keys()
    assert {name: str(told[name]) for name in given} == given | {"INSECURE": "True"}
    assert settings.staging() == 4096


def test_the_command_line_comes_before_the_environment(monkeypatch):
    monkeypatch.setenv("KVFOLD_PORT", "1111")
    monkeypatch.setenv("KVFOLD_MAX_REQUESTS", "5")
    settings = read([*NEEDED, "--port", "2222"])
    assert (settings.port, settings.max_requests) == (2222, 5)


def test_settings_do_not_change():
    with pytest.raises(ValidationError, match="frozen"):
        read(NEEDED).port = 1


BAD_OPTIONS = [
    (["--weights", "random:1"], ("--manifest is needed", "KVFOLD_MANIFEST")),
    (["--manifest", "tiny"], ("--weights is needed",)),
    ([*NEEDED, "--backend", "cuda"], ("--backend", "auto", "'cuda'")),
    ([*NEEDED, "--port", "x"], ("--port:",)),
    ([*NEEDED, "--port", "65536"], ("--port:", "65535")),
    ([*NEEDED, "--port", "-1"], ("--port:",)),
    ([*NEEDED, "--pages", "0"], ("--pages:",)),
    ([*NEEDED, "--max-requests", "0"], ("--max-requests:",)),
    ([*NEEDED, "--max-step-tokens", "0"], ("--max-step-tokens:",)),
    ([*NEEDED, "--max-body-bytes", "1023"], ("--max-body-bytes:", "1024")),
    ([*NEEDED, "--staging-bytes", "2000", "--max-body-bytes", "4000"], ("--staging-bytes", "--max-body-bytes")),
    ([*NEEDED, "--remembered-steps", "0"], ("--remembered-steps:",)),
    ([*NEEDED, "--lease-seconds", "0"], ("--lease-seconds:",)),
    ([*NEEDED, "--lease-seconds", "nan"], ("--lease-seconds:",)),
    ([*NEEDED, "--log-level", "loud"], ("--log-level:",)),
    ([*NEEDED, "--nonsense", "3"], ("--nonsense",)),
    ([*NEEDED, "stray"], ("stray",)),
    ([*NEEDED, "--port"], ("--port",)),
    ([*NEEDED, "--host", "0.0.0.0"], ("0.0.0.0", "--token-file", "--insecure")),
    ([*NEEDED, "--host", "::"], ("--token-file",)),
    ([*NEEDED, "--host", "example.org"], ("--token-file",)),
]


@pytest.mark.parametrize(("argv", "words"), BAD_OPTIONS, ids=lambda value: " ".join(value[-4:]))
def test_a_bad_option_stops_the_start(argv, words):
    with no_start(*words):
        read(argv)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_loopback_needs_no_token(host):
    assert read([*NEEDED, "--host", host]).host == host


@pytest.mark.parametrize("more", [["--insecure"], ["--token-file", "tokens"]])
def test_beyond_loopback_with_tokens_or_if_one_insists(more):
    assert read([*NEEDED, "--host", "0.0.0.0", *more]).host == "0.0.0.0"


def key_of(path: Path, key: bytes) -> bytes | None:
    file = path / "key"
    file.write_bytes(key)
    return handle_key(read([*NEEDED, "--handle-key-file", str(file)]))


def test_a_handle_key_is_the_file_s_bytes(tmp_path):
    assert handle_key(read(NEEDED)) is None
    assert key_of(tmp_path, b"k" * 32) == b"k" * 32
    assert key_of(tmp_path, b"k" * 100) == b"k" * 64


@pytest.mark.parametrize("end", [b"\n", b" ", b"\x0b"])
def test_a_random_key_may_end_in_white_space(tmp_path, end):
    assert key_of(tmp_path, b"\x00" * 31 + end) == b"\x00" * 31 + end


def test_a_bad_key_file_stops_the_start(tmp_path):
    with no_start("--handle-key-file", "31 bytes"):
        key_of(tmp_path, b"k" * 31)
    with no_start("--handle-key-file", "No such file"):
        handle_key(read([*NEEDED, "--handle-key-file", str(tmp_path / "missing")]))


def test_serve_says_one_sentence_and_exits_with_2(tmp_path, capsys):
    """Whichever part it is that cannot start."""
    missing = str(tmp_path / "missing")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for argv in (
            ["--manifest", "tiny"],
            [*NEEDED, "--nonsense"],
            [*NEEDED, "--port", port],
            ["--manifest", missing, "--weights", "random:1", "--port", "0"],
            ["--manifest", "tiny", "--weights", missing, "--port", "0"],
            [*NEEDED, "--port", "0", "--token-file", missing],
            [*NEEDED, "--port", "0", "--backend", "reference", "--cache-bytes", "10"],
            [*NEEDED, "--port", "0", "--backend", "reference", "--handle-key-file", missing],
        ):
            assert serve.run(argv) == 2, argv
            said = capsys.readouterr()
            assert said.out == ""
            assert said.err.startswith("kvfold serve: ")
            assert said.err.count("\n") == 1
