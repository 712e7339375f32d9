from __future__ import annotations

import statistics

import msgspec
import pytest
from infermix.errors import UserError
from infermix.workload.components import COMPONENTS, LogNormal, SyntheticOptions, Uniform

SYNTHETIC = next(component for component in COMPONENTS if component.name == "synthetic")


def build(context, **options):
    options = {"output_tokens": 5, **options}
    return SYNTHETIC.build(msgspec.convert(options, SyntheticOptions), context)


def prompts(workload, repeat: int = 0) -> list[tuple[int, ...]]:
    return [request.prompt_ids for request in workload.requests(repeat)]


def test_lengths_are_exact(make_context) -> None:
    requests = build(make_context(), num_requests=50, input_tokens=17, output_tokens=9).requests(0)
    assert {len(request.prompt_ids) for request in requests} == {17}
    assert {request.sampling.max_new_tokens for request in requests} == {9}
    assert all(request.sampling.ignore_eos for request in requests)
    assert len({request.request_id for request in requests}) == 50


def test_special_and_unknown_tokens_are_avoided(make_context) -> None:
    workload = build(make_context(), num_requests=100, input_tokens=50, output_tokens=1)
    assert {token for prompt in prompts(workload) for token in prompt} == set(range(3, 60))


def test_without_a_tokenizer_the_whole_vocabulary_is_drawn(make_context) -> None:
    workload = build(make_context(tokenizer=None, vocab_size=8), input_tokens=90, output_tokens=1)
    assert {token for prompt in prompts(workload) for token in prompt} == set(range(8))


def test_prompts_share_nothing_but_the_asked_prefix(make_context) -> None:
    found = prompts(build(make_context(), input_tokens=40, output_tokens=1, shared_prefix_tokens=30))
    assert {len(prompt) for prompt in found} == {40}
    assert len({prompt[:30] for prompt in found}) == 1
    assert len({prompt[30:] for prompt in found}) == len(found)


def test_several_prefixes_are_taken_in_turn(make_context) -> None:
    options = {"num_requests": 7, "input_tokens": 40, "output_tokens": 1, "shared_prefix_tokens": 30}
    found = prompts(build(make_context(), num_prefixes=3, **options))
    assert len({prompt[:30] for prompt in found}) == 3
    assert [prompt[:30] for prompt in found[:3]] * 2 == [prompt[:30] for prompt in found[:6]]
    assert len({prompt[30:] for prompt in found}) == 7
    assert prompts(build(make_context(), num_prefixes=1, **options)) == prompts(build(make_context(), **options))


def test_several_prefixes_need_a_length(make_context) -> None:
    with pytest.raises(msgspec.ValidationError, match="num_prefixes 3 needs shared_prefix_tokens"):
        build(make_context(), num_prefixes=3)


@pytest.mark.parametrize(
    "length", [{"use": "uniform", "min": 5, "max": 12}, {"use": "lognormal", "median": 8, "min": 5, "max": 12}]
)
def test_length_distributions_keep_their_bounds(make_context, length) -> None:
    workload = build(make_context(), num_requests=300, input_tokens=length, output_tokens=length)
    assert {len(prompt) for prompt in prompts(workload)} == set(range(5, 13))
    assert {request.sampling.max_new_tokens for request in workload.requests(0)} == set(range(5, 13))
    assert workload.input_tokens == (5, 12)


def test_the_median_of_a_lognormal_is_what_was_asked(make_context) -> None:
    length = {"use": "lognormal", "median": 200, "sigma": 0.8, "max": 100_000}
    workload = build(make_context(max_model_len=10**6), num_requests=2000, input_tokens=length)
    assert statistics.median(map(len, prompts(workload))) == pytest.approx(200, rel=0.08)


def test_every_repeat_is_the_same_unless_it_should_vary(make_context) -> None:
    options = {"input_tokens": {"use": "uniform", "min": 5, "max": 12}, "output_tokens": 5}
    arrivals = {"use": "poisson", "request_rate": 3.0}
    same = build(make_context(), **options, arrivals=arrivals)
    assert same.requests(0) == same.requests(4) == build(make_context(), **options, arrivals=arrivals).requests(1)
    vary = build(make_context(), **options, arrivals=arrivals, vary=True)
    first, second = vary.requests(0), vary.requests(1)
    assert first == same.requests(0)
    assert vary.requests(1) == second
    for one, other in zip(first, second, strict=True):
        assert one.prompt_ids != other.prompt_ids
        assert one.sampling.seed != other.sampling.seed
    assert first[1].arrival_s != second[1].arrival_s


def test_the_seed_is_the_experiments_unless_given(make_context) -> None:
    base = prompts(build(make_context(seed=3), input_tokens=9))
    assert base != prompts(build(make_context(seed=4), input_tokens=9))
    assert base == prompts(build(make_context(seed=4), input_tokens=9, seed=3))


def test_draws_are_the_same_on_every_machine(make_context) -> None:
    request = build(make_context(tokenizer=None, vocab_size=1000), num_requests=1, input_tokens=4).requests(0)[0]
    assert (request.prompt_ids, request.sampling.seed) == ((31, 458, 501, 330), 2004269581)


def test_arrivals_and_prompts_come_from_separate_streams(make_context) -> None:
    plain = build(make_context(), input_tokens=9)
    open_loop = build(make_context(), input_tokens=9, arrivals={"use": "gamma", "request_rate": 1.0})
    assert prompts(plain) == prompts(open_loop)
    assert [r.sampling.seed for r in plain.requests(0)] == [r.sampling.seed for r in open_loop.requests(0)]


def test_each_request_has_its_own_seed_and_the_asked_sampling(make_context) -> None:
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1, "stop": ["x"]}
    requests = build(make_context(), input_tokens=9, **options, stop_token_ids=[7], ignore_eos=False).requests(0)
    assert len({request.sampling.seed for request in requests}) == len(requests)
    sampling = requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.7, 5, 0.9, 0.1)
    assert (sampling.repetition_penalty, sampling.stop, sampling.stop_token_ids) == (1.1, ("x",), (7,))
    assert sampling.ignore_eos is False


def test_a_request_that_cannot_fit_is_refused_when_built(make_context) -> None:
    with pytest.raises(UserError, match="add up to 101 tokens, but a sequence of this model may have 100"):
        build(make_context(), input_tokens=91, output_tokens=10)
    build(make_context(), input_tokens=90, output_tokens=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"concurrency": 2, "arrivals": {"use": "poisson", "request_rate": 1.0}}, "exclude each other"),
        ({"input_tokens": {"use": "uniform", "min": 9, "max": 5}}, "min 9 is above max 5"),
        ({"input_tokens": {"use": "lognormal", "median": 50, "max": 20}}, "median 50 must lie between"),
        ({"input_tokens": 20, "shared_prefix_tokens": 21}, "longer than the shortest prompt"),
        ({"input_tokens": 0}, ">= 1"),
        ({"arrivals": {"use": "poisson", "request_rate": 0}}, "> 0"),
        ({"arrivals": {"use": "burst", "request_rate": 1}}, "'burst'"),
        ({"top_p": 1.5}, "<= 1"),
        ({"stop": ["a", ""]}, "stop holds an empty text"),
        ({"num_request": 5}, "num_request"),
    ],
)
def test_options_are_checked(options, message) -> None:
    with pytest.raises(msgspec.ValidationError, match=message):
        msgspec.convert(options, SyntheticOptions)


def test_bounds_for_plan() -> None:
    assert SyntheticOptions(input_tokens=10, output_tokens=Uniform(min=1, max=5)).max_request_tokens() == 15
    assert SyntheticOptions(input_tokens=LogNormal(median=10, max=40), output_tokens=5).max_request_tokens() == 45
    assert SyntheticOptions(num_requests=7).max_in_flight() == 7
    assert SyntheticOptions(num_requests=7, concurrency=3).max_in_flight() == 3
    assert SyntheticOptions(num_requests=2, concurrency=3).max_in_flight() == 2
