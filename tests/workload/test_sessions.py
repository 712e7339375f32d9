"""Sessions of several turns: prompts that grow, and turns that wait for the one before."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from infermix.errors import UserError
from infermix.workload.assemble import PreparedWorkload
from infermix.workload.components import Constant, RequestClass, Uniform
from infermix.workload.sessions import SessionSource
from infermix.workload.trace_components import SessionsOptions


def load(context: Any, **options: Any) -> PreparedWorkload:
    chosen = SessionsOptions(**{"num_sessions": 3, "turns": 3, "input_tokens": 5, "output_tokens": 4, **options})
    return PreparedWorkload(chosen, 0, SessionSource(chosen, context))


def test_every_turn_repeats_the_session_so_far(make_context: Any) -> None:
    workload = load(make_context(), system_tokens=6, think_s=2.0)
    requests = workload.requests(0)
    assert [len(request.prompt_ids) for request in requests] == [11, 20, 29] * 3
    assert [request.after for request in requests] == ["", "0", "1", "", "3", "4", "", "6", "7"]
    assert [request.think_s for request in requests] == [0.0, 2.0, 2.0] * 3
    for first, second in pairwise(requests):
        if second.after:
            assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert len({request.prompt_ids[:6] for request in requests}) == 1, "one system prompt"
    assert len({request.prompt_ids[:11] for request in requests}) == 3, "and three sessions behind it"
    assert workload.input_tokens == (11, 6 + 3 * 9 - 4)


def test_arrivals_are_those_of_sessions(make_context: Any) -> None:
    requests = load(make_context(), arrivals=Constant(request_rate=2.0)).requests(0)
    assert [request.arrival_s for request in requests if not request.after] == [0.0, 0.5, 1.0]


def test_turns_of_a_session_belong_to_one_class(make_context: Any) -> None:
    classes = (RequestClass(tenant="a"), RequestClass(tenant="b"))
    requests = load(make_context(), num_sessions=20, classes=classes).requests(0)
    by_id = {request.request_id: request for request in requests}
    assert {request.tenant for request in requests} == {"a", "b"}
    assert all(request.tenant == by_id[request.after].tenant for request in requests if request.after)


def test_lengths_and_thinking_can_be_drawn(make_context: Any) -> None:
    options = {"turns": Uniform(min=1, max=4), "input_tokens": Uniform(min=2, max=6), "num_sessions": 30}
    requests = load(make_context(), think_s=1.0, think_exponential=True, **options).requests(0)
    assert len({request.think_s for request in requests if request.after}) > 20
    turns = [sum(not each.after for each in requests), len(requests)]
    assert turns[0] == 30
    assert 45 < turns[1] < 105


def test_a_session_that_could_outgrow_the_model_is_refused(make_context: Any) -> None:
    with pytest.raises(UserError, match="a session of 12 turns may grow to 108 tokens, but a sequence of this model"):
        load(make_context(), turns=12)


def test_nobody_thinks_for_ever() -> None:
    """Times behind it would not fit into nanoseconds, or nobody would live to see the end."""
    with pytest.raises(msgspec.ValidationError, match="<= 1000000"):
        msgspec.convert({"think_s": 1e300}, SessionsOptions)
