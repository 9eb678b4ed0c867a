"""For those who live in locust (pip install locust); `kvfold loadtest` needs none of it.

    locust -f "$(kvfold loadtest --locustfile)" --host http://127.0.0.1:8787 -u 8 -r 8 -t 60s --headless DecodeUser

DecodeUser: a batch of requests that decode together, a token each a step. PrefillUser: a prompt, released behind its
step. A locust user waits for its answer before it sends again: a closed loop, with what that hides of a stall.
"""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

from kvfold_client import Client, KvfoldError
from kvfold_client.loadtest.held import new_run
from kvfold_client.loadtest.load import outcome_of
from kvfold_client.loadtest.rows import Rows

try:
    from locust import User, constant, events, task  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise SystemExit("this file is for locust, which is not installed: pip install locust") from error

RUN = new_run()
NUMBERS = itertools.count()
logging.getLogger("httpx").setLevel(logging.WARNING)  # locust shows every line of it otherwise


@events.init_command_line_parser.add_listener
def add_options(parser: Any) -> None:
    parser.add_argument("--kvfold-token", default=None, is_secret=True, help="bearer token")
    parser.add_argument("--batch", type=int, default=8, help="decode requests in a step")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=512, help="tokens that a request decodes")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="bf16", help="of the rows")


class KvfoldUser(User):
    """Sends steps; every one is an event of type `step`."""

    abstract = True
    wait_time = constant(0)

    def on_start(self) -> None:
        options = self.environment.parsed_options
        self.client = Client(self.host, options.kvfold_token, retries=0)
        manifest, most = self.client.manifest(), max(options.batch, options.prompt)
        self.rows = Rows(manifest, None, options.dtype, most)
        self.most_tokens = min(manifest["max_position"], options.output)
        self.ids: list[str] = []

    def on_stop(self) -> None:
        self.release()
        self.client.close()

    def release(self) -> None:
        for request_id in self.ids:
            self.client.release(request_id)
        self.ids = []

    def step(self, name: str, requests: list[tuple[str, int, int]]) -> bool:
        """Whether the worker took it."""
        num_tokens = sum(length for _, _, length in requests)
        tensors, step_id = self.rows.take(num_tokens), new_id()
        began, failure = time.perf_counter(), None
        try:
            self.client.step(requests, tensors, step_id=step_id)
        except KvfoldError as error:
            failure = error
        self.environment.events.request.fire(
            request_type="step",
            name=name if failure is None else f"{name}: {outcome_of(failure)}",
            response_time=(time.perf_counter() - began) * 1e3,
            response_length=self.rows.row_bytes(num_tokens),
            exception=failure,
            context={},
        )
        return failure is None


class DecodeUser(KvfoldUser):
    """Its requests start over when they have decoded --output tokens, or when a step was refused."""

    def on_start(self) -> None:
        super().on_start()
        self.start = 0

    @task
    def decode(self) -> None:
        if not self.ids:
            self.ids, self.start = [new_id() for _ in range(self.environment.parsed_options.batch)], 0
        taken = self.step("decode", [(request_id, self.start, 1) for request_id in self.ids])
        self.start += 1
        if not taken or self.start >= self.most_tokens:
            self.release()


class PrefillUser(KvfoldUser):
    @task
    def prefill(self) -> None:
        self.ids = [new_id()]
        self.step("prefill", [(self.ids[0], 0, self.environment.parsed_options.prompt)])
        self.release()


def new_id() -> str:
    return f"{RUN}-{next(NUMBERS)}"
