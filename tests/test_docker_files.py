"""Dockerfile and compose.yaml hold together: with each other, with the worker's options, with make-secrets.sh."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvfold_client.loadtest import options as loadtest
from kvfold_client.peers import parse_peers
from kvfold_client.scheduler import command as scheduler
from kvfold_service import settings as options
from kvfold_service.auth import Tokens
from kvfold_service.settings import Settings
from tests.bench.measure import worker

ROOT = Path(__file__).parents[1]
DOCKER = ROOT / "docker"
DOCKERFILE = re.sub(r"\\\n", " ", (DOCKER / "Dockerfile").read_text(encoding="utf-8"))
STAGES = re.findall(r"^FROM (\S+) AS (\S+)\n((?:(?!FROM ).*\n)*)", DOCKERFILE, re.MULTILINE)
"""(from, name, instructions) of each stage in its order."""
IMAGES = ("client", "cpu", "cuda", "rocm")


def _filled(text: str) -> str:
    """As compose reads it where no variable is set."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text).replace("$$", "$")


COMPOSE: dict[str, Any] = yaml.safe_load(_filled((DOCKER / "compose.yaml").read_text(encoding="utf-8")))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
WORKERS = {name: service for name, service in SERVICES.items() if "KVFOLD_MANIFEST" in service.get("environment", {})}
CLIENTS = ("scheduler", "loadtest")


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets")
    subprocess.run([DOCKER / "make-secrets.sh", folder], check=True, capture_output=True)
    return folder


def lineage(target: str) -> str:
    """Instructions of a target and of all that it is made from, the base first."""
    by_name = {name: (source, text) for source, name, text in STAGES}
    source, text = by_name[target]
    return (lineage(source) if source in by_name else "") + text


def test_the_base_image_is_an_argument():
    assert DOCKERFILE.index("\nARG PYTHON_IMAGE=python:3.11-slim\n") < DOCKERFILE.index("\nFROM ")
    names = [name for _, name, _ in STAGES]
    for i, (source, _, text) in enumerate(STAGES):
        assert source == "${PYTHON_IMAGE}" or source in names[:i]
        assert set(re.findall(r"--from=(\S+)", text)) <= set(names[:i])
    assert set(IMAGES) <= set(names)


@pytest.mark.parametrize("target", IMAGES)
def test_images_run_as_nobody_and_start_kvfold(target):
    text = lineage(target)
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == "10001:10001"
    assert re.findall(r"^ENTRYPOINT (.*)", text, re.MULTILINE) == ['["kvfold"]']
    assert ("HEALTHCHECK" in text) == (target != "client")
    for name, value in re.findall(r"KVFOLD_(\w+)=(\S+)", text):
        assert Settings.model_fields[name.lower()].annotation(value)


def test_what_is_copied_is_there_and_not_ignored():
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = " ".join(re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)).split()
    assert set(copied) == set(kept)
    assert all((ROOT / path).exists() for path in kept)


def test_torch_of_the_images_is_the_one_that_ci_runs():
    (line,) = re.findall(r"sed -n '(.*)' constraints.txt >torch.txt", DOCKERFILE)
    done = subprocess.run(["sed", "-n", line, ROOT / "constraints.txt"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"torch==[\d.]+\n", done.stdout)


def test_compose_has_its_profiles_and_no_name():
    assert "name" not in COMPOSE  # docker-compose 1.29 refuses it
    profiles = {name: service["profiles"] for name, service in SERVICES.items()}
    assert {profile for names in profiles.values() for profile in names} == {
        "cpu", "cuda", "rocm", "fleet", "observability",
    }  # fmt: skip
    assert set(CLIENTS) | {"prefill", "decode"} == {name for name, own in profiles.items() if own == ["fleet"]}


@pytest.mark.parametrize("name", SERVICES)
def test_services_are_fenced_in(name):
    service = SERVICES[name]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service.get("read_only") or name == "grafana"
    assert set(service["deploy"]["resources"]["limits"]) == {"cpus", "memory"}
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    assert set(service.get("secrets", [])) <= set(COMPOSE["secrets"])
    if "build" in service:
        assert service["image"] == f"kvfold:{service['build']['target']}"
        assert service["build"]["target"] in IMAGES


def test_devices():
    (gpu,) = SERVICES["worker-cuda"]["deploy"]["resources"]["reservations"]["devices"]
    assert gpu == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert SERVICES["worker-rocm"]["devices"] == ["/dev/kfd", "/dev/dri"]


@pytest.mark.parametrize("name", WORKERS)
def test_a_worker_starts_with_these_options(name, secrets, monkeypatch):
    """Paths of the container become those of this machine."""
    for variable, value in (WORKERS[name]["environment"] | {"KVFOLD_HOST": "0.0.0.0"}).items():
        here = str(value).replace("/run/secrets", str(secrets)).replace("/etc/kvfold", str(DOCKER / "fleet"))
        monkeypatch.setenv(variable, here)
        assert variable.removeprefix("KVFOLD_").lower() in Settings.model_fields
    settings = options.read([])
    assert settings.worker_id == name
    assert settings.drain_seconds < float(WORKERS[name]["stop_grace_period"].removesuffix("s"))
    assert len(options.handle_key(settings) or b"") == 32
    assert Tokens(settings.token_file).secrets


def test_secrets_are_made_once(secrets):
    files = {path.name: path.read_bytes() for path in secrets.iterdir()}
    assert {secret["file"] for secret in COMPOSE["secrets"].values()} == {f"./secrets/{name}" for name in files}
    subprocess.run([DOCKER / "make-secrets.sh", secrets], check=True, capture_output=True)
    assert files == {path.name: path.read_bytes() for path in secrets.iterdir()}
    assert secrets.stat().st_mode & 0o777 == 0o700
    tokens = Tokens(secrets / "tokens")
    roles = {name: tokens.caller(f"Bearer {files[f'{name}_token'].decode()}").roles for name in ("client", "metrics")}
    assert roles == {"client": {"step", "pull"}, "metrics": {"admin"}}


def test_the_fleet_is_the_peers_file():
    peers = parse_peers((DOCKER / "fleet/peers.txt").read_text())
    assert {name: peer.url for name, peer in peers.items()} == {
        name: f"http://{name}:8787" for name, service in WORKERS.items() if service["profiles"] == ["fleet"]
    }


@pytest.mark.parametrize(("name", "read"), [("loadtest", loadtest.read), ("scheduler", scheduler._parser().parse_args)])
def test_clients_are_told_what_they_understand(name, read, secrets):
    words = [
        word.replace("/run/secrets", str(secrets)).replace("/etc/kvfold", str(DOCKER / "fleet"))
        for word in SERVICES[name]["command"]
    ]
    given = read(words[1:])
    assert given.peers == DOCKER / "fleet/peers.txt"
    assert given.token == (secrets / "client_token").read_text()


@pytest.mark.parametrize(("answers", "code"), [(True, 0), (False, 1)])
def test_health_check(answers, code):
    with worker() as (url, _):
        port = url.rpartition(":")[2] if answers else "1"
        environment = {"KVFOLD_PORT": port}
        done = subprocess.run([sys.executable, DOCKER / "healthcheck.py"], env=environment, timeout=30)
    assert done.returncode == code
