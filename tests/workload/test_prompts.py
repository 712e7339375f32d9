from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from infermix.errors import UserError
from infermix.workload.components import COMPONENTS, PromptsOptions

PROMPTS = next(component for component in COMPONENTS if component.name == "prompts")
SPEC_BENCH = Path(__file__).resolve().parents[3] / "shared" / "data" / "prompts" / "spec_bench_480.jsonl"
SYSTEM, USER = {"role": "system", "content": "a"}, {"role": "user", "content": "b"}


@pytest.fixture
def write(tmp_path: Path):
    """Writes `p.jsonl` from objects, or from raw lines where they are texts."""

    def write_lines(*lines) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "p.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")

    return write_lines


def build(context, **options):
    options = {"path": "p.jsonl", "max_new_tokens": 8, **options}
    return PROMPTS.build(msgspec.convert(options, PromptsOptions), context)


def texts(workload, tokenizer, repeat: int = 0) -> list[str]:
    return [tokenizer.decode(request.prompt_ids) for request in workload.requests(repeat)]


@pytest.mark.parametrize("name", ["prompt", "text"])
def test_plain_text_is_sent_as_it_is(make_context, write, tokenizer, name) -> None:
    write({name: "a b c"}, {name: "d"})
    requests = build(make_context()).requests(0)
    assert [request.prompt_ids for request in requests] == [(10, 11, 12), (13,)]
    assert {request.sampling.max_new_tokens for request in requests} == {8}
    assert {request.sampling.ignore_eos for request in requests} == {False}


@pytest.mark.parametrize(
    ("data", "chat", "expected"),
    [
        ({"prompt": "a b"}, "auto", (10, 11)),
        ({"prompt": "a b"}, False, (10, 11)),
        ({"prompt": "a b"}, True, (1, 10, 11, 2)),
        ({"turns": ["a b", "c"]}, "auto", (1, 10, 11, 2)),
        ({"turns": ["a b", "c"]}, False, (10, 11)),
        (
            {"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]},
            "auto",
            (1, 10, 2, 1, 11, 2),
        ),
    ],
)
def test_chat(make_context, write, data, chat, expected) -> None:
    write(data)
    assert build(make_context(), chat=chat).requests(0)[0].prompt_ids == expected


def test_bos(make_context, write) -> None:
    write({"prompt": "a b"})
    assert build(make_context(), bos=True).requests(0)[0].prompt_ids == (1, 10, 11)


def test_bos_without_such_a_token(make_context, write, tokenizer) -> None:
    write({"prompt": "a b"})
    tokenizer.bos_token_id = None
    with pytest.raises(UserError, match=r"workload.bos: the tokenizer has no BOS token"):
        build(make_context(), bos=True)


def test_a_field_can_be_named(make_context, write, tokenizer) -> None:
    write({"prompt": "no", "question": "yes"})
    assert texts(build(make_context(), field="question"), tokenizer) == ["yes"]


def test_only_what_is_needed_is_tokenized(make_context, write, tokenizer) -> None:
    write(*[{"prompt": f"w{index}"} for index in range(30)])
    assert texts(build(make_context(), num_requests=3), tokenizer) == ["w0", "w1", "w2"]
    assert len(tokenizer.encoded) == 3


def test_round_robin_takes_the_first_of_each_category_in_turn(make_context, write, tokenizer) -> None:
    rows = [("a1", "A"), ("a2", "A"), ("a3", "A"), ("b1", "B"), ("c1", "C"), ("b2", "B")]
    write(*[{"prompt": text, "kind": kind} for text, kind in rows])
    workload = build(make_context(), order="round_robin", category_field="kind")
    assert texts(workload, tokenizer) == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert [request.category for request in workload.requests(0)] == ["A", "B", "C", "A", "B", "A"]
    assert texts(build(make_context(), category_field="kind"), tokenizer)[:3] == ["a1", "a2", "a3"]


def test_repeats_are_the_same_unless_they_vary(make_context, write, tokenizer) -> None:
    write(*[{"prompt": f"w{index}"} for index in range(5)])
    same = build(make_context(), num_requests=2)
    assert same.requests(0) == same.requests(7)
    vary = build(make_context(), num_requests=2, vary=True)
    assert texts(vary, tokenizer, 1) == ["w2", "w3"]
    assert texts(vary, tokenizer, 2) == ["w4", "w0"]


def test_too_few_prompts(make_context, write, tokenizer) -> None:
    write({"prompt": "a"}, "", {"prompt": "b"}, "   ")
    with pytest.raises(UserError, match=r"5 prompts are asked for, but there are 2 .*repeat_prompts: true"):
        build(make_context(), num_requests=5)
    again = build(make_context(), num_requests=5, repeat_prompts=True)
    assert texts(again, tokenizer) == ["a", "b", "a", "b", "a"]
    assert len({request.request_id for request in again.requests(0)}) == 5


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        ({"prompt": ""}, {}, r"p\.jsonl:2:1: the prompt is empty"),
        ({"prompt": " \n"}, {}, r"p\.jsonl:2:1: the prompt is empty"),
        ({"turns": [""]}, {}, r"p\.jsonl:2:1: the prompt is empty"),
        ({"messages": [{"role": "user", "content": ""}]}, {}, r"p\.jsonl:2:1: the prompt is empty"),
        ({"turns": []}, {}, r"p\.jsonl:2:1: field 'turns' must be .* not empty"),
        ({"prompt": 7}, {}, r"p\.jsonl:2:1: field 'prompt' must be a text"),
        ({"messages": [{"role": "user"}]}, {}, r"p\.jsonl:2:1: messages\[0\]: a message needs"),
        ({"messages": [{"role": "user", "content": "a"}]}, {"chat": False}, r"p\.jsonl:2:1: .*chat is false"),
        ({"promt": "a", "id": 1}, {}, r"p\.jsonl:2:1: no field 'prompt or text or messages or turns'; .* promt, id"),
        (
            {"prompt": "a"},
            {"field": "prompts"},
            r"p\.jsonl:1:1: no field 'prompts'; the line has prompt \(did you mean",
        ),
        ({"prompt": "a"}, {"order": "round_robin"}, r"p\.jsonl:1:1: no field 'category'; the line has prompt"),
        ({"prompt": "w " * 93}, {}, r"p\.jsonl:2:1: the prompt has 93 tokens, with 8 new ones 101, .* may have 100"),
        ('{"prompt": "a",}', {}, r"p\.jsonl:2:\d+: not JSON"),
        ('["a"]', {}, r"p\.jsonl:2:1: expected a JSON object, got list"),
    ],
)
def test_faults_name_their_line(make_context, write, line, options, message) -> None:
    write({"prompt": "a b"}, line)
    with pytest.raises(UserError, match=message):
        build(make_context(), **options)


def test_no_chat_template(make_context, write, tokenizer) -> None:
    write({"turns": ["a"]})
    tokenizer.has_template = False
    with pytest.raises(UserError, match=r"p\.jsonl:1:1: the tokenizer has no chat template \(chat: false sends"):
        build(make_context())
    assert build(make_context(), chat=False).requests(0)[0].prompt_ids == (10,)


def test_missing_file_empty_file_and_wrong_encoding(make_context, write, tmp_path) -> None:
    with pytest.raises(UserError, match=r"q\.jsonl: workload.path: there is no such file"):
        build(make_context(), path="q.jsonl")
    write("")
    with pytest.raises(UserError, match=r"p\.jsonl: there are no prompts"):
        build(make_context())
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(UserError, match="not UTF-8"):
        build(make_context())


def test_line_separators_inside_a_text_do_not_end_the_line(make_context, tmp_path, tokenizer) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "a\u2028b"}\r\n{"prompt": "c"}\r\n', encoding="utf-8-sig")
    assert len(build(make_context()).requests(0)) == 2


def test_dummy_models_need_synthetic(make_context, write) -> None:
    write({"prompt": "a"})
    with pytest.raises(UserError, match=r"needs a tokenizer.*\(use: synthetic\)"):
        build(make_context(tokenizer=None))


def test_bounds_for_plan() -> None:
    assert PromptsOptions(path="x").max_request_tokens() is None
    assert PromptsOptions(path="x").max_in_flight() is None
    assert PromptsOptions(path="x", num_requests=9).max_in_flight() == 9
    assert PromptsOptions(path="x", concurrency=4).max_in_flight() == 4


@pytest.mark.skipif(not SPEC_BENCH.is_file(), reason="the data set is not here")
def test_spec_bench_in_turn(make_context) -> None:
    context = make_context(base=SPEC_BENCH.parent, max_model_len=10**6)
    workload = build(context, path=SPEC_BENCH.name, num_requests=32, order="round_robin")
    categories = [request.category for request in workload.requests(0)]
    assert len(set(categories[:13])) == 13
    assert categories[:13] == categories[13:26]
