"""scheduler.compose and request: what goes into a step, and what comes of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold_client.scheduler.compose import Policy, compose
from kvfold_client.scheduler.request import Chunk, Request
from kvfold_client.scheduler.trace import Arrival


def request(idx: int = 0, prompt: int = 100, output: int = 10, committed: int = 0, generated: int = 0) -> Request:
    return Request(idx, f"r{idx}", Arrival(idx, prompt, output), idx * 1e3, committed, generated)


def all_right(_: Request, num_guesses: int) -> int:
    return num_guesses


def spans(chunks: tuple[Chunk, ...]) -> list[tuple[int, int, int, int]]:
    return [(chunk.request.idx, chunk.start, chunk.num_tokens, chunk.num_guesses) for chunk in chunks]


def test_decodes_then_prompts_within_the_budget() -> None:
    decode, first, second = request(2, committed=100, generated=1), request(0), request(1)
    policy = Policy(token_budget=120, draft_tokens=3)
    chunks = compose([first, second, decode], policy, all_right)
    assert spans(chunks) == [(2, 100, 1, 3), (0, 0, 100, 0), (1, 0, 16, 0)]


def test_a_prompt_goes_on_where_it_stands() -> None:
    chunks = compose([request(committed=64)], Policy(token_budget=16), all_right)
    assert spans(chunks) == [(0, 64, 16, 0)]
    assert spans(compose([request(committed=96)], Policy(token_budget=16), all_right)) == [(0, 96, 4, 0)]


def test_whole_prompts_go_beyond_the_budget() -> None:
    requests = [request(0, prompt=1000), request(1, prompt=1000)]
    whole = Policy(token_budget=16, chunked=False)
    assert spans(compose(requests, whole, all_right)) == [(0, 0, 1000, 0)]


def test_a_request_that_starts_over_is_sent_as_a_prompt() -> None:
    """110 tokens known, 40 with the worker: 70 to send, the generated ones among them."""
    again = request(committed=40, generated=10, output=20)
    assert spans(compose([again], Policy(token_budget=64, draft_tokens=2), all_right)) == [(0, 40, 64, 0)]


def test_guesses_stop_at_the_end_of_the_output() -> None:
    for generated, expected in ((1, 3), (6, 3), (7, 2), (8, 1), (9, 0)):
        decode = request(committed=99 + generated, generated=generated, output=10)
        (chunk,) = compose([decode], Policy(draft_tokens=3), all_right)
        assert chunk.num_guesses == expected


def test_more_decodes_than_budget_take_turns() -> None:
    requests = [request(i, committed=100, generated=1, output=99) for i in range(5)]
    served = []
    for step in range(5):
        chunks = compose(requests, Policy(token_budget=2, draft_tokens=4), all_right)
        assert sum(chunk.num_tokens + chunk.num_guesses for chunk in chunks) <= 2
        for chunk in chunks:
            chunk.request.last_step = step
            chunk.request.took(1, chunk.num_accepted, 0.0)
            served.append(chunk.request.idx)
    assert sorted(served[:5]) == [0, 1, 2, 3, 4]


def test_nothing_to_send() -> None:
    assert compose([], Policy(), all_right) == ()
    assert compose([request(committed=100)], Policy(), all_right) == ()


@pytest.mark.parametrize(
    "wrong", [{"token_budget": 0}, {"max_running": 0}, {"draft_tokens": -1}, {"acceptance": 1.5}, {"acceptance": -0.1}]
)
def test_a_policy_that_makes_no_step_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"at least 1|between 0 and 1"):
        Policy(**wrong)


@given(
    prompt=st.integers(1, 300),
    output=st.integers(1, 40),
    budget=st.integers(1, 64),
    drafts=st.integers(0, 5),
    accepted=st.lists(st.integers(0, 5), min_size=1),
    lost=st.sets(st.integers(0, 30), max_size=4),
)
def test_a_requests_life(
    prompt: int, output: int, budget: int, drafts: int, accepted: list[int], lost: set[int]
) -> None:
    """It ends with just its output, its rows go up to the token before the last, and none is left out or sent twice."""
    one = request(prompt=prompt, output=output)
    policy = Policy(token_budget=budget, draft_tokens=drafts)
    draws = iter(accepted * 200)
    sent = highest = number = 0
    while not one.finished:
        (chunk,) = compose([one], policy, lambda _, guesses: min(next(draws, 0), guesses))
        assert chunk.start == one.committed == sent
        assert chunk.stop - chunk.start <= budget
        if number in lost:
            one.go_back(one.committed // 2)
            sent = one.committed
        else:
            one.took(chunk.num_tokens, chunk.num_accepted, float(number))
            sent = chunk.kept
            highest = max(highest, sent)
        number += 1
    assert one.generated == output
    assert one.committed == highest == prompt + output - 1
    assert one.first_token_us is not None
    assert one.finished_us == number - 1
    assert one.first_token_us <= one.finished_us
    assert one.times_us == sorted(one.times_us)
    assert (output > 1) == bool(one.times_us)
