"""Docker or podman where they run, else podman as `sandbox` prepares it: what the check asks of any of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # the check shares code with the tests
PROJECT = "kvfold-image-check"
"""Of compose: nothing else of this machine is touched."""
PROFILES = ("cpu", "fleet", "observability")


@dataclass(frozen=True)
class Engine:
    cli: str
    compose_command: tuple[str, ...]
    build_command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of every command."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Variables of compose.yaml that name an image in place of one that cannot be pulled here."""
    base_image: str | None = None
    """Of the images, where it was made here."""
    whole: bool = True
    """Health checks run by themselves, and limits are enforced."""

    def run(self, *command: str, **variables: str) -> str:
        """Standard output. Raises CheckFailed, with what the command said."""
        environment = {**os.environ, **self.environment, **self.images, **variables}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        if done.returncode:
            said = done.stdout[-4000:] + done.stderr[-4000:]
            raise CheckFailed(f"{' '.join(command)} exited {done.returncode}:\n{said}")
        return done.stdout.strip()

    def build(self, target: str) -> str:
        """The name of the image built from a target of the Dockerfile."""
        name = f"kvfold:{target}"
        self.run(*self.build_command, "-f", "docker/Dockerfile", "--target", target, "-t", name, ".")
        return name

    def image_bytes(self, image: str) -> int:
        return int(self.run(self.cli, "image", "inspect", "--format", "{{.Size}}", image))

    def compose(self, profile: str, *command: str, **variables: str) -> str:
        return self._compose([profile], *command, **variables)

    def down(self) -> None:
        """Remove what the check started, and its volumes."""
        self._compose(PROFILES, "down", "--volumes")

    def _compose(self, profiles: Iterable[str], *command: str, **variables: str) -> str:
        chosen = [part for profile in profiles for part in ("--profile", profile)]
        files = ("-p", PROJECT, "-f", "docker/compose.yaml")
        return self.run(*self.compose_command, *files, *chosen, *command, **variables)

    def container(self, service: str) -> str:
        """Id of the one container of a service."""
        labels = {"com.docker.compose.project": PROJECT, "com.docker.compose.service": service}
        filters = [part for name, value in labels.items() for part in ("--filter", f"label={name}={value}")]
        ids = self.run(self.cli, "ps", "-aq", *filters).split()
        if len(ids) != 1:
            raise CheckFailed(f"service {service} has {len(ids)} containers, not 1")
        return ids[0]

    def inspect(self, container: str, what: str) -> str:
        return self.run(self.cli, "inspect", "--format", f"{{{{{what}}}}}", container)

    def logs(self, container: str) -> str:
        """Both streams."""
        done = subprocess.run(
            [self.cli, "logs", container], env={**os.environ, **self.environment}, capture_output=True, text=True
        )
        return done.stdout + done.stderr

    def wait_healthy(self, service: str, seconds: float = 120) -> float:
        """Seconds until the image's health check passed."""
        container, began = self.container(service), time.monotonic()
        while not self._is_healthy(container):
            if time.monotonic() - began > seconds or self.inspect(container, ".State.Status") == "exited":
                raise CheckFailed(f"{service} did not become healthy in {seconds:g} s:\n{self.logs(container)[-4000:]}")
            time.sleep(0.5)
        return time.monotonic() - began

    def _is_healthy(self, container: str) -> bool:
        if self.whole:
            return self.inspect(container, ".State.Health.Status") == "healthy"
        probe = [self.cli, "healthcheck", "run", container]
        return subprocess.run(probe, env={**os.environ, **self.environment}, capture_output=True).returncode == 0


class CheckFailed(Exception):  # noqa: N818
    """The images or the compose file do not do what they should."""


def found() -> Engine | None:
    """An engine that runs here and has compose; Docker first."""
    for cli, build_options in (("docker", ()), ("podman", ("--format", "docker"))):
        probes = ([cli, "info"], [cli, "compose", "version"])
        if shutil.which(cli) and not any(subprocess.run(probe, capture_output=True).returncode for probe in probes):
            return Engine(cli, (cli, "compose"), (cli, "build", *build_options))
    return None
