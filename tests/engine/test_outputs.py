"""Several outputs of one prompt: independent draws that share the prompt's KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from infermix.engine.forks import output_seed
from infermix.errors import UserError
from infermix.measure.drive import drive
from infermix.roles.request import Request, SamplingParams

Build = Callable[..., Any]
PROMPT = tuple(range(6, 25))


def request(num_outputs: int, name: str = "r", **sampling: Any) -> Request:
    given = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3, "num_outputs": num_outputs, **sampling}
    return Request(request_id=name, prompt_ids=PROMPT, sampling=SamplingParams(**given))


def outputs(engine: Any, wanted: Request) -> list[list[int]]:
    (sample,) = drive(engine, [wanted], None, keep_outputs=1).requests
    return [output.output_ids for output in sample.outputs]


@pytest.mark.parametrize("decoder", ["autoregressive", "prompt_lookup", "jacobi"])
@pytest.mark.parametrize("kv", [("paged", {"block_size": 4}), "dense", "concat"], ids=str)
def test_each_output_is_the_one_of_its_seed(build_engine: Build, kv: Any, decoder: str) -> None:
    plain = build_engine(parts={"kv": kv})
    alone = [outputs(plain, request(1, seed=output_seed(3, index)))[0] for index in range(4)]
    engine = build_engine(parts={"kv": kv, "decoder": decoder})
    found = outputs(engine, request(4))
    assert found == alone
    assert len({tuple(each) for each in found}) == 4
    assert engine.report().counters["forked_tokens"] == 3 * (len(PROMPT) - 1)


def test_full_blocks_of_the_prompt_are_there_once(build_engine: Build) -> None:
    """19 prompt tokens in blocks of 4: four full blocks are shared, the fifth is copied."""
    engine = build_engine(parts={"kv": ("paged", {"block_size": 4})})
    engine.submit(request(4, ignore_eos=True))
    engine.step()
    engine.step()
    assert engine._space.usage().allocated_tokens == 4 * (4 + 4 * 1)


@pytest.mark.parametrize("scheduler", ["static", ("continuous", {"max_num_seqs": 2})], ids=str)
def test_outputs_that_are_not_let_in_at_once_are_computed_later(build_engine: Build, scheduler: Any) -> None:
    expected = outputs(build_engine(), request(4))
    engine = build_engine(parts={"kv": ("paged", {"block_size": 4}), "scheduler": scheduler})
    assert outputs(engine, request(4)) == expected
    assert engine._space.usage().allocated_tokens == 0


def test_a_prompt_in_chunks_and_one_token(build_engine: Build) -> None:
    chunked = ("continuous", {"max_num_batched_tokens": 5, "chunked": True})
    expected = outputs(build_engine(), request(3))
    assert outputs(build_engine(parts={"scheduler": chunked}), request(3)) == expected
    single = outputs(build_engine(), request(3, max_new_tokens=1))
    assert single == [each[:1] for each in expected]


def test_the_request_ends_with_its_last_output(build_engine: Build) -> None:
    engine = build_engine()
    repeat = drive(engine, [request(4), request(2, "s"), request(1, "t")], None, keep_outputs=3)
    by_id = {sample.request_id: sample for sample in repeat.requests}
    assert [len(by_id[name].outputs) for name in "rst"] == [4, 2, 1]
    assert all(output.finish_reason for sample in repeat.requests for output in sample.outputs)
    assert not engine.has_work


def test_a_forked_request_has_all_its_outputs(build_engine: Build) -> None:
    """It begins with the KV of a running one, and its further outputs with its own."""
    child = Request(request_id="child", prompt_ids=(*PROMPT, 30, 31), sampling=request(3).sampling)
    expected = outputs(build_engine(), child)
    engine = build_engine(parts={"kv": ("paged", {"block_size": 4})})
    engine.submit(request(1, "parent", ignore_eos=True))
    engine.step()
    engine.fork("parent", child)
    found: dict[int, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            if event.request_id == "child":
                found.setdefault(event.output, []).extend(event.token_ids)
    assert [found.get(output) for output in range(3)] == expected


def test_outputs_that_hold_what_the_next_request_needs_give_it_back(build_engine: Build) -> None:
    """The first request ends in the step that forks its further outputs, nothing else runs; five blocks in all."""
    asked = [
        Request(request_id="a", prompt_ids=PROMPT[:6], sampling=request(3, max_new_tokens=1).sampling),
        Request(request_id="b", prompt_ids=PROMPT[:18], sampling=request(1, max_new_tokens=2).sampling),
    ]
    expected = [[output.output_ids for output in sample.outputs] for sample in driven(build_engine(), asked)]
    block = 4 * 2 * 2 * 2 * 16 * 4
    engine = build_engine(
        parts={"kv": ("paged", {"block_size": 4})}, max_model_len=20, kv_memory_bytes=(5 + 1) * block
    )
    assert [[output.output_ids for output in sample.outputs] for sample in driven(engine, asked)] == expected


def driven(engine: Any, asked: list[Request]) -> list[Any]:
    return sorted(drive(engine, asked, None, keep_outputs=len(asked)).requests, key=lambda sample: sample.request_id)


def test_greedy_outputs_are_refused(build_engine: Build) -> None:
    with pytest.raises(UserError, match="3 greedy outputs, which would be equal"):
        build_engine().submit(request(3, temperature=0.0))


def test_a_reset_forgets_outputs_that_have_not_begun(build_engine: Build) -> None:
    engine = build_engine()
    engine.submit(request(4))
    engine.reset()
    assert not engine.has_work
    assert len(outputs(engine, request(1))) == 1
