"""Podman on a Debian machine that has no container engine, run by root: nothing of it outlives the check.

Images are built where the network is. Containers run in namespaces of their own (mounts, network, processes), so that
ports, firewall rules and processes are gone when the check ends. Such machines often forbid what a full engine needs:
crun is called without limits (see `crun`), and health checks are called by the check, since no systemd ticks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from engine import CheckFailed, Engine

HERE = Path(__file__).parent
TOOLS = {
    "podman": "podman",
    "buildah": "buildah",
    "crun": "crun",
    "catatonit": "catatonit",
    "/usr/lib/podman/netavark": "netavark",
    "/usr/lib/podman/aardvark-dns": "aardvark-dns",
    "iptables": "iptables",
    "ip": "iproute2",
    "jq": "jq",
    "debootstrap": "debootstrap",
}
"""Program → Debian package."""
PODMAN_COMPOSE = "podman-compose==1.6.0"
PYTHON_IMAGE = "docker.io/library/python:3.11-slim"
PROMETHEUS_IMAGE = "localhost/prometheus:debian"
INSIDE = "KVFOLD_CHECK_INSIDE"


def folder() -> Path:
    """Images and tools that the next check finds again."""
    given = os.environ.get("KVFOLD_CHECK_FOLDER")
    return Path(given) if given else Path.home() / ".cache" / "kvfold-image-check"


def prepare() -> Engine:
    """Install what is missing, make the base images. What is there already stays."""
    if os.geteuid() or not Path("/etc/debian_version").exists():
        raise CheckFailed("no container engine with compose runs here; start Docker or podman, or be root on Debian")
    work = folder()
    work.mkdir(parents=True, exist_ok=True)
    missing = [package for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        _run("apt-get", "update", "-qq")
        _run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing)
    if not (work / "tools/bin/podman-compose").exists():
        venv.create(work / "tools", with_pip=True)
        _run(str(work / "tools/bin/pip"), "install", "--quiet", PODMAN_COMPOSE)
    engine = _engine(work)
    if not _has_image(engine, PYTHON_IMAGE):
        _import_debian(engine, work)
    if not _has_image(engine, PROMETHEUS_IMAGE):
        context = HERE / "prometheus"
        engine.run(*engine.build_command, "-t", PROMETHEUS_IMAGE, "-f", str(context / "Dockerfile"), str(context))
    return engine


def _engine(work: Path) -> Engine:
    for name in ("containers.conf", "storage.conf"):
        text = (HERE / "podman" / name).read_text()
        (work / name).write_text(text.replace("@HERE@", str(HERE)).replace("@WORK@", str(work)))
    options = ["--isolation", "chroot", "--pull-never", "--format", "docker", "--layers", *_pip_volumes(work)]
    return Engine(
        "podman",
        (str(work / "tools/bin/podman-compose"), "--in-pod=false"),
        ("buildah", "bud", *options, "--build-arg", f"PYTHON_IMAGE={PYTHON_IMAGE}", "--build-arg", "TORCH_INDEX="),
        {"CONTAINERS_CONF": str(work / "containers.conf"), "CONTAINERS_STORAGE_CONF": str(work / "storage.conf")},
        {"KVFOLD_PROMETHEUS_IMAGE": PROMETHEUS_IMAGE},
        base_image=PYTHON_IMAGE,
        whole=False,
    )


def _pip_volumes(work: Path) -> list[str]:
    """pip in a build as pip on this machine: its configuration, and the files and folders that this names."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    settings = dict(line.split("=", 1) for line in listed.splitlines() if "=" in line)
    values = {name.rpartition(".")[2]: value.strip("'\"") for name, value in settings.items()}
    (work / "pip.conf").write_text("[global]\n" + "".join(f"{name} = {value}\n" for name, value in values.items()))
    words = [word for value in values.values() for word in value.split()]
    paths = dict.fromkeys(path for path in map(_local, words) if path is not None and path.exists())
    volumes = [(work / "pip.conf", "/etc/pip.conf"), *((path, path) for path in paths)]
    return [part for source, target in volumes for part in ("--volume", f"{source}:{target}:ro")]


def _local(word: str) -> Path | None:
    """The file or folder that a word of pip's configuration means; of an index its parent, which has the files, too."""
    if word.startswith("file://"):
        return Path(word.removeprefix("file://")).parent
    return Path(word) if word.startswith("/") else None


def _has_image(engine: Engine, name: str) -> bool:
    probe = [engine.cli, "image", "exists", name]
    return subprocess.run(probe, env={**os.environ, **engine.environment}).returncode == 0


def _import_debian(engine: Engine, work: Path) -> None:
    """This machine's Debian with its Python, under the name of the Dockerfile's base image."""
    release = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    sites = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"], capture_output=True, text=True
    ).stdout.split()
    root, include = work / "debian", "python3,python3-venv,ca-certificates"
    shutil.rmtree(root, ignore_errors=True)
    _run("debootstrap", "--variant=minbase", f"--include={include}", release["VERSION_CODENAME"], str(root), sites[0])
    _run("tar", "-C", str(root), "-cf", str(work / "debian.tar"), ".")
    engine.run(engine.cli, "import", "--quiet", str(work / "debian.tar"), PYTHON_IMAGE)
    shutil.rmtree(root)
    (work / "debian.tar").unlink()


def _run(*command: str) -> None:
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)


def is_inside() -> bool:
    return INSIDE in os.environ


def run_inside(*command: str) -> int:
    """The exit code of a command in namespaces of its own; whatever it started ends with it."""
    flags = ("--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
    return subprocess.run(["unshare", *flags, *command], env=os.environ | {INSIDE: "yes"}).returncode


def engine() -> Engine:
    """What `prepare` made, from inside."""
    for kind, where in (("tmpfs", "/run"), ("tmpfs", "/dev/shm"), ("cgroup2", "/sys/fs/cgroup")):
        _run("mount", "-t", kind, "none", where)
    _run("ip", "link", "set", "lo", "up")
    found = _engine(folder())
    found.run(found.cli, "rm", "--all", "--force")  # of a check that was killed
    return found
