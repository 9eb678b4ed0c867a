"""step: what a body may say, what is said of one that is wrong, and which of several errors is said."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfold_service.errors import ServiceError
from kvfold_service.step import StepRequest, parse_step
from tests.service_cases import (
    CSA,
    HCA,
    INDEXER,
    MAX_POSITION,
    NAMES,
    SLACK,
    SMALL,
    refused,
    rules,
    step_body,
    tensor,
)

Body = dict[str, Any]
RULES = rules()
TWO = [("r1", 0, 3), ("r2", 5, 4)]
HUGE = 2**64 - 1


def body_of_two(**changes: Any) -> Body:
    return step_body(TWO, **changes)


def ints(values: list[int], dtype: str = "int64") -> Body:
    return tensor(np.array(values, dtype), dtype=dtype)


def title(value: Any) -> str:
    """Of a case: the same in every run, so without addresses."""
    return re.sub("<memory at [^>]*>", "bytes", str(value))


def test_a_step_as_it_was_meant():
    step = parse_step(body_of_two(pad=2, pages="all", draft_tokens=[0, 2], compat=RULES.compat), RULES)
    assert step.step_id == "s1"
    assert step.requests == (StepRequest("r1", 0, 3), StepRequest("r2", 5, 4))
    assert step.query_start_loc.tolist() == [0, 3, 7]
    assert (step.num_tokens, step.num_rows) == (7, 9)
    assert step.draft_tokens.tolist() == [0, 2]
    assert step.all_pages
    sent = {item["compressor"]: item for item in body_of_two(pad=2)["tensors"]}
    assert tuple(step.tensors) == NAMES
    for name, got in step.tensors.items():
        assert (got.dtype, list(got.shape), bytes(got.data)) == ("fp32", sent[name]["shape"], bytes(sent[name]["data"]))


def test_what_may_be_left_out():
    step = parse_step(body_of_two(), RULES)
    assert not step.all_pages
    assert step.draft_tokens.tolist() == [0, 0]


@pytest.mark.parametrize("kind", ["int32", "int64"])
@pytest.mark.parametrize("field", ["positions", "query_start_loc"])
def test_integers_come_as_a_list_or_a_tensor(field, kind):
    listed = body_of_two(pad=1)
    as_list = parse_step(listed, RULES)
    as_tensor = parse_step(listed | {field: ints(listed[field], kind)}, RULES)
    assert as_tensor.query_start_loc.tolist() == as_list.query_start_loc.tolist()
    assert as_tensor.query_start_loc.dtype == np.int64
    assert (as_tensor.num_rows, as_tensor.requests) == (as_list.num_rows, as_list.requests)


@pytest.mark.parametrize(
    "padding",
    [[0, 0], [-5, 2**40], [HUGE, HUGE], [-(2**63), 1]],
    ids=["zeros", "out of range", "past int64", "least int64"],
)
def test_positions_of_padding_are_not_looked_at(padding):
    body = body_of_two(pad=2)
    body["positions"][-2:] = padding
    assert parse_step(body, RULES).num_tokens == 7
    if HUGE not in padding:
        assert parse_step(body | {"positions": ints(body["positions"])}, RULES).num_rows == 9


def test_requests_without_tokens():
    step = parse_step(step_body([("a", 0, 0), ("b", 2, 3), ("c", MAX_POSITION, 0)]), RULES)
    assert step.query_start_loc.tolist() == [0, 0, 3, 3]
    nothing = parse_step(step_body([("a", 0, 0)]), RULES)
    assert (nothing.num_rows, nothing.num_tokens) == (0, 0)
    assert parse_step(step_body([("a", 0, 0)], positions=ints([], "int32")), RULES).num_rows == 0


def test_rows_up_to_the_limit():
    limit = RULES.max_step_tokens
    assert parse_step(step_body([("r", 0, limit)]), RULES).num_rows == limit
    assert parse_step(step_body([("r", 0, 1)], pad=limit - 1), RULES).num_rows == limit
    with refused("step_too_large", rows=limit + 1, limit=limit):
        parse_step(step_body([("r", 0, 1)], pad=limit), RULES)


def test_positions_up_to_the_model_s_last():
    def last(length: int) -> Body:
        start = MAX_POSITION - 2
        body = step_body([("r", 0, length)], [INDEXER])
        body["requests"][0]["start"] = start
        return body | {"positions": list(range(start, start + length))}

    assert parse_step(last(2), RULES).num_tokens == 2
    with refused("bad_positions", request="r"):
        parse_step(last(3), RULES)


@pytest.mark.parametrize(
    "name", ["r", "A.b_c:d@e-f", "0", "x" * 128, ".", "9" * 20], ids=lambda name: f"{len(name)} characters"
)
def test_ids(name):
    step = parse_step(step_body([("r", 0, 1)], step_id=name) | {"requests": [request(id=name, num_tokens=1)]}, RULES)
    assert (step.step_id, step.requests[0].id) == (name, name)


def request(**changes: Any) -> Body:
    return {"id": "r1", "start": 0, "num_tokens": 3} | changes


def first_tensor(**changes: Any) -> Body:
    """The step with another first tensor; a field that is None is left out."""
    tensors = body_of_two()["tensors"]
    tensors[0] = {name: value for name, value in (tensors[0] | changes).items() if value is not None}
    return {"tensors": tensors}


def first_request(**changes: Any) -> Body:
    return {"requests": [request(**changes), request(id="r2", start=5, num_tokens=4)]}


BAD_IDS = ["", "x" * 129, "ä", "a b", "a/b", "a\n", "a\0", 5, None, True, b"r1", ["r1"]]
NOT_A_LIST = [None, "r1", 7, {}, {"id": "r1"}]
NOT_AN_INTEGER = [1.0, "1", None, True, [1], b"1"]

MALFORMED: list[Body] = [
    {"extra": 1},
    {"step-id": "s1"},
    *({"version": wrong} for wrong in NOT_AN_INTEGER),
    *({"step_id": wrong} for wrong in BAD_IDS),
    *({"requests": wrong} for wrong in [*NOT_A_LIST, [], [5], [["r1", 0, 3]]]),
    *(first_request(id=wrong) for wrong in BAD_IDS),
    *(first_request(start=wrong) for wrong in NOT_AN_INTEGER),
    *(first_request(num_tokens=wrong) for wrong in [*NOT_AN_INTEGER, -1]),
    first_request(id="r2"),
    first_request(priority=1),
    {"requests": [{"id": "r1", "start": 0}, request(id="r2")]},
    *({field: wrong} for field in ("query_start_loc", "positions") for wrong in [None, 7, "0", [0.0], ["0"], [[0]]]),
    *({field: [0, True, 2]} for field in ("query_start_loc", "positions")),
    {"positions": {"dtype": "int64", "shape": [7]}},
    {"positions": ints([0]) | {"layout": "C"}},
    {"positions": ints([0]) | {"shape": [-1]}},
    {"positions": ints([0]) | {"shape": [1, 1, 1, 1, 1]}},
    {"query_start_loc": ints([0]) | {"dtype": 8}},
    *({"tensors": wrong} for wrong in [*NOT_A_LIST, [], [7], [[]]]),
    {"tensors": 2 * body_of_two()["tensors"][:1]},
    first_tensor(compressor=None),
    first_tensor(compressor=3),
    first_tensor(data=None),
    first_tensor(dtype=None),
    first_tensor(dtype=4),
    first_tensor(shape=None),
    first_tensor(shape="7, 256"),
    first_tensor(shape=[7.0, 256]),
    first_tensor(shape=[True, 256]),
    first_tensor(shape=[7, -256]),
    first_tensor(data="text"),
    first_tensor(device="cuda:0"),
    *({"pages": wrong} for wrong in ["", "some", None, True, ["new"], {}]),
    *({"compat": wrong} for wrong in [5, b"c" * 32, ["c"]]),
    *({"draft_tokens": wrong} for wrong in [3, [1], [0, 0, 0], [0, -1], [0, 1.0], [True, 0], {}]),
    {"draft_tokens": [4, 0]},
    {"draft_tokens": [0, SLACK + 1]},
    {"draft_tokens": [0, HUGE]},
]


@pytest.mark.parametrize("changes", MALFORMED, ids=lambda changes: title(changes)[:60])
def test_malformed(changes):
    with refused("malformed"):
        parse_step(body_of_two() | changes, RULES)


@pytest.mark.parametrize(("length", "most"), [(0, 0), (1, 1), (SLACK, SLACK), (SLACK + 1, SLACK)])
def test_drafts_are_of_the_step_s_own_tokens_and_within_the_slack(length, most):
    body = step_body([("r", 0, length)], draft_tokens=[most])
    assert parse_step(body, RULES).draft_tokens.tolist() == [most]
    with refused("malformed"):
        parse_step(body | {"draft_tokens": [most + 1]}, RULES)


@pytest.mark.parametrize("field", sorted(body_of_two()))
def test_a_field_that_is_missing(field):
    body = body_of_two()
    del body[field]
    with refused("malformed") as caught:
        parse_step(body, RULES)
    assert field in caught.value.message


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        *(("unsupported_version", {"version": version}) for version in (0, 2, -1, HUGE)),
        ("compat_mismatch", {"compat": ""}),
        ("compat_mismatch", {"compat": RULES.compat.upper()}),
        ("unknown_compressor", first_tensor(compressor="layers.9.hca")),
        ("unknown_compressor", first_tensor(compressor="")),
        ("bad_dtype", first_tensor(dtype="fp16")),
        ("bad_dtype", first_tensor(dtype="float32")),
        ("bad_dtype", first_tensor(dtype="int32")),
        ("bad_shape", first_tensor(shape=[6, 256])),
        ("bad_shape", first_tensor(shape=[256, 7])),
        ("bad_shape", first_tensor(shape=[7, 2, 128])),
        ("bad_shape", first_tensor(shape=[7 * 256])),
        ("bad_shape", first_tensor(shape=[2**62, 2**62])),
        ("bad_shape", first_tensor(dtype="bf16", shape=[14, 256])),
        ("bad_shape", {"positions": [0, 1, 2, 5, 6, 7]}),
        ("bad_shape", {"positions": [0, 1, 2, 5, 6, 7, 8, 0]}),
        ("bad_shape", {"positions": ints([0, 1, 2, 5, 6, 7, 8]) | {"shape": [7, 1]}}),
        ("bad_shape", {"positions": ints([0, 1, 2, 5, 6, 7, 8]) | {"shape": [8]}}),
        ("bad_dtype", {"positions": ints([0, 1, 2, 5, 6, 7, 8]) | {"dtype": "int16"}}),
        ("bad_dtype", {"positions": tensor(np.zeros(7, np.float32))}),
        ("bad_dtype", {"query_start_loc": tensor(np.zeros(3, np.float32))}),
        ("bad_shape", {"query_start_loc": ints([0, 3, 7]) | {"shape": [1, 3]}}),
        *(
            ("bad_query_start_loc", {"query_start_loc": wrong})
            for wrong in ([], [0], [0, 7], [0, 3, 7, 7], [1, 3, 7], [0, 3, 6], [0, 4, 7], [0, -3, 7], [0, 3, HUGE])
        ),
        ("bad_query_start_loc", {"query_start_loc": ints([0, 3, 8])}),
        ("bad_query_start_loc", first_request(num_tokens=4)),
        ("bad_query_start_loc", first_request(num_tokens=HUGE)),
        *(
            ("bad_positions", {"positions": wrong})
            for wrong in (
                [1, 2, 3, 5, 6, 7, 8],
                [0, 1, 2, 4, 5, 6, 7],
                [0, 2, 1, 5, 6, 7, 8],
                [0, 1, 2, 5, 6, 7, 7],
                [0, 1, -2, 5, 6, 7, 8],
                [0, 1, 2, 5, 6, 7, HUGE],
                [0, 1, 2, 5, 6, 7, -(2**63) - 1],
            )
        ),
        ("bad_positions", {"positions": ints([0, 1, 2, 5, 6, 7, 9], "int32")}),
        ("bad_positions", first_request(start=-1)),
        ("bad_positions", first_request(start=1)),
        ("bad_positions", first_request(start=MAX_POSITION - 2)),
        ("bad_positions", first_request(start=HUGE)),
    ],
    ids=title,
)
def test_well_formed_but_wrong(code, changes):
    with refused(code):
        parse_step(body_of_two() | changes, RULES)


def test_rows_that_query_start_loc_claims_must_be_there():
    body = body_of_two()
    short = step_body([("r1", 0, 3), ("r2", 5, 3)])
    with refused("bad_query_start_loc"):
        parse_step(body | {"positions": short["positions"], "tensors": short["tensors"]}, RULES)


@pytest.mark.parametrize(
    ("input_dtype", "sent", "accepted"),
    [
        ("bf16", "bf16", True),
        ("bf16", "fp32", False),
        ("fp32", "fp32", True),
        ("fp32", "bf16", False),
        ("any", "bf16", True),
        ("any", "fp32", True),
        ("any", "int32", False),
    ],
)
def test_input_dtypes(input_dtype, sent, accepted):
    part = SMALL["compressors"][0] | {"input_dtype": input_dtype}
    item_type = np.uint16 if sent == "bf16" else np.uint32
    body = step_body([("r", 0, 3)], [HCA])
    body["tensors"] = [tensor(np.zeros((3, 256), item_type), HCA, sent)]
    strict = rules(SMALL | {"compressors": [part]})
    if accepted:
        assert parse_step(body, strict).tensors[HCA].dtype == sent
    else:
        with refused("bad_dtype", compressor=HCA):
            parse_step(body, strict)


def test_what_is_wrong_is_named():
    with refused("bad_positions", request="r2", row=4):
        parse_step(body_of_two(positions=[0, 1, 2, 5, 7, 7, 8]), RULES)
    with refused("bad_shape", compressor=CSA, expected=[7, 512]):
        parse_step(body_of_two(tensors=[tensor(np.zeros((7, 256), np.float32), CSA)]), RULES)
    with refused("unknown_compressor", compressor="layers.9.hca"):
        parse_step(body_of_two() | first_tensor(compressor="layers.9.hca"), RULES)
    with refused("unsupported_version", version=2):
        parse_step(body_of_two(version=2), RULES)
    with refused("compat_mismatch", compat=RULES.compat):
        parse_step(body_of_two(compat="0" * 32), RULES)


def test_a_long_name_is_not_sent_back():
    with refused("unknown_compressor") as caught:
        parse_step(body_of_two() | first_tensor(compressor="x" * 1_000_000), RULES)
    assert len(str(caught.value.body())) < 1000


def _extend_tensors(name: str, **changes: Any) -> Callable[[Body], None]:
    def break_(body: Body) -> None:
        body["tensors"] = [*body["tensors"], body["tensors"][0] | {"compressor": name} | changes]

    return break_


def _change_tensor(index: int, **changes: Any) -> Callable[[Body], None]:
    def break_(body: Body) -> None:
        body["tensors"][index] |= changes

    return break_


def _set(**changes: Any) -> Callable[[Body], None]:
    return lambda body: body.update(changes)


def _change_request(**changes: Any) -> Callable[[Body], None]:
    return lambda body: body["requests"][1].update(changes)


BY_PRECEDENCE: dict[str, list[Callable[[Body], None]]] = {
    "malformed": [
        _set(extra=1),
        _set(step_id="a b"),
        _set(draft_tokens=[SLACK + 1, 0]),
        _set(pages="some"),
        _change_request(id="r1"),
        _change_tensor(1, shape="wide"),
        _change_tensor(1, shape=[-1, 512]),
        _change_tensor(1, dtype=32),
        _change_tensor(1, data="text"),
        _extend_tensors(CSA),
    ],
    "unsupported_version": [_set(version=2)],
    "compat_mismatch": [_set(compat="0" * 32)],
    "unknown_compressor": [_extend_tensors("layers.9.hca")],
    "bad_shape": [_change_tensor(0, shape=[1, 256])],
    "bad_query_start_loc": [_set(query_start_loc=[0, 3, 8]), _set(query_start_loc=[0, 3, HUGE])],
    "bad_positions": [
        _set(positions=[0, 1, 2, 5, 6, 7, 9]),
        _set(positions=[0, 1, 2, 5, 6, 7, HUGE]),
        _change_request(start=HUGE),
        _change_request(start=-1),
    ],
}
"""In the contract's order; each breaks a body in one way and leaves the rest of it as it was."""

PAIRS = [
    pytest.param(first, a, b, id=f"{first}[{i}] before {second}[{j}]")
    for first, second in itertools.combinations(BY_PRECEDENCE, 2)
    for i, a in enumerate(BY_PRECEDENCE[first])
    for j, b in enumerate(BY_PRECEDENCE[second])
]


@pytest.mark.parametrize(("code", "earlier", "later"), PAIRS)
def test_the_earlier_of_two_errors_wins(code, earlier, later):
    body = body_of_two()
    later(body)
    earlier(body)
    with refused(code):
        parse_step(body, RULES)


def test_a_shape_and_a_dtype_that_are_both_wrong_are_wrong_before_positions():
    body = body_of_two(positions=[HUGE] * 7) | first_tensor(dtype="int32")
    with refused("bad_dtype"):
        parse_step(body, RULES)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=3),
    st.binary(max_size=9),
    st.lists(st.integers(-2, 9), max_size=4),
    st.dictionaries(st.sampled_from(["dtype", "shape", "data", "id"]), st.integers(0, 9) | st.text(max_size=5)),
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all that lies in a body, bytes not looked into."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [path, *(place for key, value in items for place in places(value, (*path, key)))]


PLACES = places(body_of_two())[1:]


def replaced(node: Any, path: tuple[Any, ...], value: Any) -> Any:
    if not path:
        return value
    copied = node.copy()
    copied[path[0]] = replaced(node[path[0]], path[1:], value)
    return copied


@given(st.sampled_from(PLACES), JUNK)
def test_whatever_stands_anywhere_the_answer_is_a_step_or_a_refusal(place, junk):
    try:
        outcome = parse_step(replaced(body_of_two(), place, junk), RULES).num_tokens
    except ServiceError as error:
        outcome = error.status
    assert outcome in (7, 400, 409)
