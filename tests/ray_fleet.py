"""`python -m tests.ray_fleet FOLDER`: the story of three workers on a Ray cluster of its own; one JSON line at the end.

A process of its own, so that Ray's threads, daemons and environment end with it. The cluster asks for a token.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch

from kvfold_client.fleet import Fleet, RayPlane
from kvfold_service.control.ray import (
    WORKER,
    ClusterError,
    RayWorker,
    Slot,
    describe_workers,
    start_workers,
    stop_workers,
    worker_names,
)
from tests import fleet_story
from tests.service_cases import SMALL

NAMESPACE = "kvfold-test"
SLOTS = [Slot("p", "prefill"), Slot("d", "decode"), Slot("e", "decode")]


def describe(name: str) -> dict[str, Any]:
    """What the actor of a worker says of it."""
    remote: Any = ray
    return remote.get(remote.get_actor(WORKER + name, NAMESPACE).describe.remote(), timeout=10)


def main(folder: Path) -> dict[str, Any]:
    torch.set_num_threads(1)
    (folder / "small.json").write_text(json.dumps(SMALL))
    argv = [f"--manifest={folder / 'small.json'}", "--weights=random:1", "--backend=cpu", "--drain-seconds=1"]
    began = time.monotonic()
    options: dict[str, Any] = {"include_dashboard": False, "object_store_memory": 80 << 20, "log_to_driver": False}
    ray.init(num_cpus=0, resources={"slot": 3}, namespace=NAMESPACE, _temp_dir=str(folder / "ray"), **options)
    told: dict[str, Any] = {"init_s": round(time.monotonic() - began, 1)}
    slots = [Slot(slot.name, slot.role, num_cpus=0, resources={"slot": 1}) for slot in SLOTS]
    urls = start_workers(slots, argv, namespace=NAMESPACE, host="127.0.0.1")
    told["free_slots"] = ray.available_resources().get("slot", 0)
    try:
        told["no_place"] = no_place(argv)
        with Fleet(RayPlane(namespace=NAMESPACE)) as fleet:
            until(fleet, lambda: len(fleet.workers()) == 3)
            told["found"] = {worker.name: (worker.url == urls[worker.name], worker.role) for worker in fleet.workers()}
            go_through(fleet, told)
        resource = "object_store_memory"
        told["object_store_bytes"] = ray.cluster_resources()[resource] - ray.available_resources()[resource]
        told["pids"] = [describe(name)["pid"] for name in worker_names(NAMESPACE)]
        told["codes"] = stop_workers(namespace=NAMESPACE)
        told["left"] = worker_names(NAMESPACE)
    finally:
        ray.shutdown()
    return told


def no_place(argv: list[str]) -> dict[str, Any]:
    """One worker more than there are slots."""
    slot = Slot("x", num_cpus=0, resources={"slot": 1})
    how: dict[str, Any] = {"namespace": NAMESPACE, "host": "127.0.0.1"}
    told: dict[str, Any] = {"end": refusal(lambda: start_workers([slot], argv, wait_seconds=1, **how))}
    told["names"] = worker_names(NAMESPACE)
    told["taken"] = refusal(lambda: start_workers([Slot("d")], argv, **how))
    began = time.monotonic()
    told["ctrl_c"] = interrupted(argv)
    told["ctrl_c_s"] = time.monotonic() - began
    bad = Slot("x", num_cpus=0)
    told["fails"] = refusal(lambda: start_workers([bad], ["--nonsense"], say=lambda _: None, **how))
    assert worker_names(NAMESPACE) == told["names"]
    options = {"name": "kvfold.worker.x", "namespace": NAMESPACE, "lifetime": "detached", "resources": {"slot": 1}}
    actor: Any = ray.remote(RayWorker)
    actor.options(num_cpus=0, **options).remote(None, "x", "any", argv, None)  # as a start that was killed leaves it
    told["listed"] = describe_workers(NAMESPACE)
    told["unknown"] = refusal(lambda: stop_workers(["nobody"], NAMESPACE))
    began = time.monotonic()
    told["stopped"] = stop_workers(["x"], NAMESPACE)
    told["stopped_s"] = time.monotonic() - began
    return told


def refusal(call: Callable[[], Any]) -> str:
    try:
        call()
    except ClusterError as error:
        return str(error)
    raise AssertionError("it was done")


def interrupted(argv: list[str]) -> tuple[int, list[str]]:
    """`kvfold fleet start` as a user runs it, and Ctrl-C when it has said something: its status and what it said."""
    words = ["-m", "kvfold_client.cli", "fleet", "start", "--worker", "x", "--cpus", "0", "--resource", "slot=1"]
    where = ["--namespace", NAMESPACE, "--address", ray.get_runtime_context().gcs_address]
    command = [sys.executable, *words, *where, "--", *argv]
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what a shell runs in the background ignores Ctrl-C
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heed) as process:
        said = []
        for line in process.stderr or ():
            if line.startswith("kvfold fleet: "):
                said.append(line.strip())
                if len(said) == 1:
                    process.send_signal(signal.SIGINT)
    return process.returncode, said


def go_through(fleet: Fleet, told: dict[str, Any]) -> None:
    fleet_story.hand_over(fleet)
    before = {worker.name: worker.epoch for worker in fleet.workers()}
    victim = fleet_story.death_under_load(fleet, lambda name: os.kill(describe(name)["pid"], signal.SIGKILL))
    until(fleet, lambda: epoch(fleet, victim) not in (None, before[victim]))
    told["started_again"] = describe(victim)["starts"]
    fleet_story.hand_over(fleet)  # it takes its share again
    actor = ray.get_actor(f"kvfold.worker.{victim}", NAMESPACE)
    pid, was = describe(victim)["pid"], epoch(fleet, victim)
    ray.kill(actor, no_restart=False)
    until(fleet, lambda: epoch(fleet, victim) not in (None, was))
    told["orphan"] = alive(pid)
    fleet_story.hand_over(fleet)


def epoch(fleet: Fleet, name: str) -> str | None:
    return next((worker.epoch for worker in fleet.workers() if worker.name == name and worker.accepting), None)


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(fleet: Fleet, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < end, list(fleet.workers())
        time.sleep(0.1)
        fleet.look()


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))), flush=True)
