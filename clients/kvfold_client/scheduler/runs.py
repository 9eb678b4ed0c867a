"""One run of the command, and the runs that it is compared with."""

import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..client import Client
from ..fleet import Fleet, Role, StaticPlane
from . import progress, report
from .check import Checker
from .clock import RealClock, VirtualClock
from .compose import Policy
from .costs import Costs
from .extra import load
from .rows import RowSource, draft_slack_of, shapes_of
from .simulation import Simulation
from .trace import Arrival, fit, read_trace, shared_tokens, synthetic
from .workers import FleetWorkers, OneWorker, OnPaper, SimulationError, Workers, place_in_trace


@dataclass(frozen=True)
class Scene:
    """All that runs share: what comes, where it goes, how steps are made and what they cost."""

    options: Namespace
    trace: tuple[Arrival, ...]
    manifest: Mapping[str, Any]
    source: RowSource
    workers: Workers
    policy: Policy
    costs: Costs
    on_paper: Callable[[Mapping[str, Role]], Workers] | None = None
    """With other roles; None: the workers are real."""

    def run(self) -> dict[str, Any]:
        """Prints and gives what came of it. Raises KvfoldError."""
        summary = self._play("simulate", self.policy, self.costs, self.workers)
        print(report.lines(summary))
        print("\n" + report.comparison({"as given": summary}))
        return self._result({"as given": summary})

    def compare(self) -> dict[str, Any]:
        """The same trace with one thing left out at a time."""
        summaries = {}
        for name, policy, costs, workers in self._variants():
            summaries[name] = self._play(name, policy, costs, workers)
        print(report.lines(summaries["as given"]))
        print("\n" + report.comparison(summaries))
        return self._result(summaries)

    def _variants(self) -> Iterator[tuple[str, Policy, Costs, Workers]]:
        policy, costs, launches = self.policy, self.costs, self.costs.launches
        yield "as given", policy, costs, self.workers
        yield "whole prompts", replace(policy, chunked=False), costs, self.workers
        if self.on_paper is None:  # neither a worker's kernels nor its role are ours to change
            return
        yield "without skip", policy, replace(costs, launches=replace(launches, skip=False)), self.workers
        yield "without split", policy, replace(costs, launches=replace(launches, split=False)), self.workers
        roles: dict[str, Role] = dict.fromkeys(self.workers.roles(), "any")
        if roles != self.workers.roles():
            yield "without hand-over", policy, costs, self.on_paper(roles)
        if launches.graphs:
            eager = replace(launches, graphs=False)
            yield "eager", policy, replace(costs, launches=eager), self.workers
            left_in = replace(costs, launches=replace(eager, skip=False))
            yield "eager, without skip", policy, left_in, self.workers

    def _play(self, title: str, policy: Policy, costs: Costs, workers: Workers) -> dict[str, Any]:
        options = self.options
        checker = None if options.check is None else Checker(self.manifest, options.check, self.source)
        with (
            VirtualClock() if options.clock == "virtual" else RealClock(2 * len(workers.roles()) + 1) as clock,
            progress.shown(title, len(self.trace)) as on_progress,
        ):
            simulation = Simulation(
                self.trace,
                workers,
                self.source,
                clock,
                policy=policy,
                costs=costs,
                run_id=uuid.uuid4().hex[:12],
                speed=options.speed,
                on_finish=checker,
                on_progress=on_progress,
            )
            simulation.run()
        summary = report.summarise(simulation.requests, simulation.tally)
        if checker is not None:
            summary["checked"] = asdict(checker.checked)
        return summary

    def _result(self, summaries: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": self.manifest.get("model"),
            "clock": self.options.clock,
            "seed": self.options.seed,
            "trace": {
                "requests": len(self.trace),
                "prompt_tokens": sum(arrival.input_length for arrival in self.trace),
                "tokens_in_shared_prefixes": shared_tokens(self.trace),
            },
            "workers": dict(self.workers.roles()),
            "policy": asdict(self.policy),
            "assumed": asdict(self.costs),
            "runs": dict(summaries),
        }


@contextmanager
def scene(options: Namespace, policy: Policy, costs: Costs) -> Iterator[Scene]:
    """What the command line asks for. Raises KvfoldError, TraceError, ValueError."""
    if options.url is not None and options.peers is not None:
        raise ValueError("give --url or --peers, not both")
    if options.url is None and options.peers is None:
        if options.clock == "real":
            raise ValueError("paper has no real clock: give --url or --peers")
        if options.check is not None:
            raise ValueError("paper has no entry to check: give --url or --peers")
    if options.url is not None:
        with Client(options.url, options.token, retries=1) as client:
            yield _scene(options, policy, costs, client.manifest(), OneWorker(client))
    elif options.peers is not None:
        with Fleet(StaticPlane.from_file(options.peers), options.token, placed_by=place_in_trace) as fleet:
            names = [worker.name for worker in fleet.workers() if worker.accepting]
            if not names:
                raise SimulationError(f"no worker of {options.peers.name} takes steps")
            manifest = fleet.client(names[0]).manifest()
            yield _scene(options, policy, costs, manifest, FleetWorkers(fleet, options.keep_copies))
    else:
        yield _paper_scene(options, policy, costs)


def _paper_scene(options: Namespace, policy: Policy, costs: Costs) -> Scene:
    described = load("sizes")(options.manifest)

    def on_paper(roles: Mapping[str, Role]) -> Workers:
        return OnPaper(roles, described)

    both: Role = "prefill" if options.decode_workers else "any"
    roles: dict[str, Role] = {f"prefill-{i}": both for i in range(options.prefill_workers)}
    roles |= {f"decode-{i}": "decode" for i in range(options.decode_workers)}
    if options.prefill_workers < 1 or options.decode_workers < 0:
        raise ValueError("--prefill-workers must be 1 or more, --decode-workers 0 or more")
    made = _scene(options, policy, costs, described["manifest"], on_paper(roles))
    return replace(made, on_paper=on_paper)


def _scene(
    options: Namespace,
    policy: Policy,
    costs: Costs,
    manifest: Mapping[str, Any],
    workers: Workers,
) -> Scene:
    slack = draft_slack_of(manifest)
    if policy.draft_tokens > slack:
        raise ValueError(f"--drafts is {policy.draft_tokens}, and the model's draft_slack {slack}")
    source = RowSource(options.seed, shapes_of(manifest))
    if options.trace is not None:
        trace = read_trace(options.trace)
    else:
        lengths = {"mean_input": options.input, "mean_output": options.output}
        trace = synthetic(options.requests, options.seed, rate=options.rate, **lengths)
    return Scene(
        options, fit(trace, manifest["max_position"], options.longest), manifest, source, workers, policy, costs
    )
