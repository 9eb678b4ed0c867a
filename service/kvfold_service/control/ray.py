"""Workers on a Ray cluster (extra `ray`): one actor for each GPU or slot, which runs a worker process and watches it.

    kvfold.directory     who runs where
    kvfold.worker.NAME   starts the worker, starts it again when it ends (its state is lost, its epoch is new), reports
                         it once a second, and writes the peers file that the worker takes requests by; see `actor`

Ray places the actors, and starts one again that dies, or whose node does. Entries, rows and requests never go through
Ray: its messages are names and addresses.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray.exceptions import RayError

from kvfold_service.control.actor import STOP_S, RayWorker
from kvfold_service.control.directory import Directory

log = logging.getLogger("kvfold")
NAMESPACE: Final = "kvfold"
DIRECTORY: Final = "kvfold.directory"
WORKER: Final = "kvfold.worker."
_remote: Any = ray.remote
_get: Any = ray.get
_wait: Any = ray.wait
WAIT_S: Final = 300.0
_ANSWER_S: Final = 10.0
_LOOK_S: Final = 3.0
"""An actor that does not say in this time how it is has no place yet, or its node is gone."""
_PAUSE_S: Final = 0.2


class ClusterError(RuntimeError):
    """What the fleet cannot do; str() is a sentence."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one worker goes: what its actor takes of the cluster, in Ray's words."""

    name: str
    role: str = "any"
    num_gpus: float = 0
    num_cpus: float = 1
    resources: dict[str, float] = field(default_factory=dict)


def connect(address: str, namespace: str) -> None:
    """To a cluster that runs. Raises ClusterError."""
    try:
        ray.init(address, namespace=namespace, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, OSError, RayError) as error:
        cause = str(error).strip().partition("\n")[0]
        raise ClusterError(f"no Ray cluster at {address}: give --address, or `ray start --head` ({cause})") from error


def start_workers(
    slots: Iterable[Slot],
    argv: Sequence[str],
    *,
    namespace: str = NAMESPACE,
    host: str | None = None,
    wait_seconds: float = WAIT_S,
    say: Callable[[str], None] = log.warning,
) -> dict[str, str]:
    """Start a worker in each slot, with these options of `kvfold serve`; their addresses when all are ready.

    Needs a connected `ray`. The workers outlive this process: `stop_workers` ends them. What takes long is said.
    If one of them fails, or is not ready in time, or this is interrupted, none is left. Raises ClusterError.
    """
    slots = list(slots)
    wanted = {slot.name: slot for slot in slots}
    if len(wanted) < len(slots):
        raise ClusterError("a name is given to one worker only")
    if taken := sorted(wanted.keys() & set(worker_names(namespace))):
        raise ClusterError(f"there is a worker {taken[0]} in this fleet already")
    kept: dict[str, Any] = {"namespace": namespace, "lifetime": "detached", "max_restarts": -1, "max_concurrency": 4}
    directory = _remote(Directory).options(name=DIRECTORY, get_if_exists=True, num_cpus=0, **kept).remote()
    actors = {}
    try:
        for slot in wanted.values():
            share = {"num_cpus": slot.num_cpus, "num_gpus": slot.num_gpus, "resources": slot.resources}
            actor = _remote(RayWorker).options(name=WORKER + slot.name, **share, **kept)
            actors[slot.name] = actor.remote(directory, slot.name, slot.role, list(argv), host)
        return _addresses(actors, wanted, wait_seconds, say)
    except BaseException:  # Ctrl-C too
        _kill(actors, namespace)
        if not worker_names(namespace):
            ray.kill(directory)
        raise


def _addresses(
    actors: Mapping[str, Any], slots: Mapping[str, Slot], wait_seconds: float, say: Callable[[str], None]
) -> dict[str, str]:
    end, said = time.monotonic() + wait_seconds, {}
    while True:
        states = _states(actors, _LOOK_S)
        late = {
            name: _lateness(state, slots[name]) for name, state in states.items() if state is None or not state["url"]
        }
        for name, state in states.items():
            if state is not None and state["failed"]:
                raise ClusterError(f"worker {name} did not start: {state['failed']}")
        if not late:
            return {name: state["url"] for name, state in states.items() if state is not None}
        if time.monotonic() > end:
            raise ClusterError(f"after {wait_seconds:g} s worker {' and worker '.join(map(' '.join, late.items()))}")
        for name, sentence in late.items():
            if said.get(name) != sentence:
                say(f"worker {name} {sentence}")
        said = late
        time.sleep(_PAUSE_S)


def _lateness(state: dict[str, Any] | None, slot: Slot) -> str:
    if state is not None:
        return "has its place and is starting"
    asked = {"GPU": slot.num_gpus, "CPU": slot.num_cpus, **slot.resources}
    free, there = ray.available_resources(), ray.cluster_resources()
    told = [f"{n:g} {name} ({free.get(name, 0):g} of {there.get(name, 0):g} free)" for name, n in asked.items() if n]
    return f"waits for a place: it asks for {', '.join(told) or 'nothing'}"


def _states(actors: Mapping[str, Any], seconds: float) -> dict[str, dict[str, Any] | None]:
    """What each says of itself, see `RayWorker.describe`; None: nothing, for so long."""
    asked = {name: actor.describe.remote() for name, actor in actors.items()}
    done = _done(asked.values(), seconds)
    return {name: _answer(reference) if reference in done else None for name, reference in asked.items()}


def _done(references: Collection[Any], seconds: float) -> list[Any]:
    """Those of them that end within a time."""
    return _wait(list(references), num_returns=len(references), timeout=seconds)[0] if references else []


def _answer(reference: Any) -> dict[str, Any]:
    try:
        return _get(reference)
    except RayError as error:
        return {"url": None, "pid": None, "starts": 0, "failed": f"its actor ended ({type(error).__name__})"}


def worker_names(namespace: str = NAMESPACE) -> list[str]:
    """Workers whose actors live, or wait for a place."""
    named: Any = ray.util.list_named_actors(all_namespaces=True)
    own = [actor["name"] for actor in named if actor["namespace"] == namespace]
    return sorted(name.removeprefix(WORKER) for name in own if name.startswith(WORKER))


def describe_workers(namespace: str = NAMESPACE) -> dict[str, str]:
    """Each worker's address, or what it waits for."""
    states = _states(_actors(worker_names(namespace), namespace), _LOOK_S)
    return {name: _words(state) for name, state in states.items()}


def _words(state: dict[str, Any] | None) -> str:
    if state is None:
        return "waiting: its actor has no place yet, or does not answer"
    return state["url"] or (f"failed: {state['failed']}" if state["failed"] else "starting")


def stop_workers(names: Iterable[str] | None = None, namespace: str = NAMESPACE) -> dict[str, int | None]:
    """Drain and end these workers, or all and the directory; their exit codes, None of one that did not run.

    One that waits for a place, or does not answer, is ended as it is. Raises ClusterError.
    """
    known = worker_names(namespace)
    chosen = known if names is None else list(names)
    if unknown := sorted(set(chosen) - set(known)):
        raise ClusterError(f"there is no worker {unknown[0]} in this fleet")
    actors = _actors(chosen, namespace)
    placed = [name for name, state in _states(actors, _LOOK_S).items() if state is not None]
    ended = {name: actors[name].stop.remote() for name in placed}
    done = _done(ended.values(), STOP_S + 2 * _ANSWER_S)
    codes = {name: _code(ended[name]) if name in ended and ended[name] in done else None for name in chosen}
    _kill(actors, namespace)
    if names is None:
        for directory in _actors([DIRECTORY], namespace, "").values():
            ray.kill(directory)
    return codes


def _code(reference: Any) -> int | None:
    try:
        return _get(reference)
    except RayError:  # it ended otherwise
        return None


def _actors(names: Iterable[str], namespace: str, prefix: str = WORKER) -> dict[str, Any]:
    """Those that are still there."""
    found = {}
    for name in names:
        with suppress(ValueError):
            found[name] = ray.get_actor(prefix + name, namespace)
    return found


def _kill(actors: Mapping[str, Any], namespace: str) -> None:
    """Returns when their names are free again."""
    for actor in actors.values():
        ray.kill(actor)
    end = time.monotonic() + _ANSWER_S
    while actors.keys() & set(worker_names(namespace)) and time.monotonic() < end:
        time.sleep(0.05)
