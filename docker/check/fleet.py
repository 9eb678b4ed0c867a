"""Two workers, the simulated scheduler and the load test, as profile fleet runs them."""

from __future__ import annotations

from collections.abc import Callable

from engine import CheckFailed, Engine


def check(engine: Engine, say: Callable[[str], None]) -> None:
    engine.compose("fleet", "up", "-d", "--no-build", "prefill", "decode")
    for worker in ("prefill", "decode"):
        engine.wait_healthy(worker)
    say("a prefill and a decode worker are healthy")
    for client in ("scheduler", "loadtest"):
        engine.compose("fleet", "up", "-d", "--no-build", "--no-deps", client)
        container = engine.container(client)
        code = engine.run(engine.cli, "wait", container)
        if code != "0":
            raise CheckFailed(f"{client} exited with {code}:\n{engine.logs(container)[-4000:]}")
        say(f"{client} exited with 0:\n{engine.logs(container).rstrip()}")
    for worker in ("prefill", "decode"):
        engine.compose("fleet", "stop", worker)
        if (code := engine.inspect(engine.container(worker), ".State.ExitCode")) != "0":
            raise CheckFailed(f"{worker} exited with {code} after SIGTERM")
    say("SIGTERM: both exited with 0")
