from __future__ import annotations

from pydoc_data.topics import topics

import msgspec
import pytest
from infermix.errors import UserError
from infermix.workload.components import COMPONENTS, CorpusOptions

CORPUS = next(component for component in COMPONENTS if component.name == "corpus")


def build(context, **options):
    return CORPUS.build(msgspec.convert({"max_new_tokens": 4, **options}, CorpusOptions), context)


def texts(workload, tokenizer, repeat: int = 0) -> list[str]:
    return [tokenizer.decode(request.prompt_ids) for request in workload.requests(repeat)]


@pytest.fixture
def text(tmp_path):
    words = [f"w{index}" for index in range(22)]
    (tmp_path / "t.txt").write_text("\n\n".join(" ".join(words[i : i + 4]) for i in range(0, 22, 4)))


@pytest.mark.usefixtures("text")
def test_prompts_are_cut_in_order_and_exact(make_context, tokenizer) -> None:
    workload = build(make_context(), path="t.txt", num_requests=4, input_tokens=5)
    assert texts(workload, tokenizer) == [
        "w0 w1 w2 w3 w4",
        "w5 w6 w7 w8 w9",
        "w10 w11 w12 w13 w14",
        "w15 w16 w17 w18 w19",
    ]
    assert workload.input_tokens == (5, 5)
    assert workload.requests(0) == workload.requests(3)


@pytest.mark.usefixtures("text")
def test_vary_goes_on_in_the_text(make_context, tokenizer) -> None:
    workload = build(make_context(), path="t.txt", num_requests=2, input_tokens=5, vary=True)
    assert texts(workload, tokenizer, 1) == ["w10 w11 w12 w13 w14", "w15 w16 w17 w18 w19"]
    assert texts(workload, tokenizer, 2) == texts(workload, tokenizer, 0)


@pytest.mark.usefixtures("text")
def test_a_short_text_is_refused_or_used_again(make_context, tokenizer) -> None:
    with pytest.raises(UserError, match=r"t\.txt: .*: 6 prompts are asked for, but there are 4"):
        build(make_context(), path="t.txt", num_requests=6, input_tokens=5)
    again = build(make_context(), path="t.txt", num_requests=6, input_tokens=5, repeat_prompts=True)
    assert texts(again, tokenizer)[4] == "w0 w1 w2 w3 w4"


def test_the_default_text_ships_with_python(make_context, tokenizer) -> None:
    tokenizer.vocab_size = 10**6
    workload = build(make_context(), num_requests=40, input_tokens=64)
    assert {len(request.prompt_ids) for request in workload.requests(0)} == {64}
    begin = topics[min(topics)].split()[:10]
    assert texts(workload, tokenizer)[0].split()[:10] == begin


def test_only_as_much_text_as_needed_is_tokenized(make_context, tokenizer) -> None:
    build(make_context(), num_requests=2, input_tokens=8)
    assert len(tokenizer.encoded) == 1


def test_faults(make_context) -> None:
    with pytest.raises(UserError, match="no such corpus file"):
        build(make_context(), path="none.txt", input_tokens=8)
    with pytest.raises(UserError, match=r"workload.input_tokens: the prompt has 97 tokens, with 4 new ones 101"):
        build(make_context(), input_tokens=97)
    with pytest.raises(UserError, match=r"needs a tokenizer.*\(use: synthetic\)"):
        build(make_context(tokenizer=None), input_tokens=8)


def test_bounds_for_plan() -> None:
    assert CorpusOptions(input_tokens=10, max_new_tokens=5).max_request_tokens() == 15
    assert CorpusOptions(num_requests=3).max_in_flight() == 3


def test_components_are_documented_and_light() -> None:
    for component in COMPONENTS:
        assert component.summary
        assert component.options.__doc__
        schema = msgspec.json.schema(component.options)
        for name, field in schema["$defs"][component.options.__name__]["properties"].items():
            assert "description" in json_text(field), f"{component.name}.{name} is not documented"


def json_text(value: object) -> str:
    return msgspec.json.encode(value).decode()
