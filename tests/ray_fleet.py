"""`python -m tests.ray_fleet FOLDER`: the story of three workers on a Ray cluster of its own; one JSON line at the end.

A process of its own, so that Ray's threads, daemons and environment end with it. The cluster asks for a token.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
import torch

from kvfold_client.fleet import Fleet, RayPlane
from kvfold_service.control.ray import Slot, describe, start_workers, stop_workers, worker_names
from tests import fleet_story
from tests.service_cases import SMALL

NAMESPACE = "kvfold-test"
SLOTS = [Slot("p", "prefill"), Slot("d", "decode"), Slot("e", "decode")]


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
        with Fleet(RayPlane(namespace=NAMESPACE)) as fleet:
            until(fleet, lambda: len(fleet.workers()) == 3)
            told["found"] = {worker.name: (worker.url == urls[worker.name], worker.role) for worker in fleet.workers()}
            go_through(fleet, told)
        resource = "object_store_memory"
        told["object_store_bytes"] = ray.cluster_resources()[resource] - ray.available_resources()[resource]
        told["pids"] = [describe(name, NAMESPACE)["pid"] for name in worker_names(NAMESPACE)]
        told["codes"] = stop_workers(namespace=NAMESPACE)
        told["left"] = worker_names(NAMESPACE)
    finally:
        ray.shutdown()
    return told


def go_through(fleet: Fleet, told: dict[str, Any]) -> None:
    fleet_story.hand_over(fleet)
    before = {worker.name: worker.epoch for worker in fleet.workers()}
    victim = fleet_story.death_under_load(fleet, lambda name: os.kill(describe(name, NAMESPACE)["pid"], signal.SIGKILL))
    until(fleet, lambda: epoch(fleet, victim) not in (None, before[victim]))
    told["started_again"] = describe(victim, NAMESPACE)["starts"]
    fleet_story.hand_over(fleet)  # it takes its share again
    actor = ray.get_actor(f"kvfold.worker.{victim}", NAMESPACE)
    pid, was = describe(victim, NAMESPACE)["pid"], epoch(fleet, victim)
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
