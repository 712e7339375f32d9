"""Outputs under a regular expression and a JSON schema, through xgrammar."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoding import generate
from infermix.errors import InfermixError, Unsupported, UserError
from infermix.roles.request import Request, SamplingParams, Sequence
from infermix.toolkit.masking import MaskedDecoder

xgrammar = pytest.importorskip("xgrammar")

Build = Callable[..., Any]
STOP = 5
#: Printable ASCII, one token a character; the tiny model has 96 tokens.
VOCABULARY = ["</s>" if index == STOP else chr(32 + index) for index in range(96)]
PATTERN = r"(ab|cd){1,4}[0-9]{2}"
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"],
          "additionalProperties": False}  # fmt: skip


def masks(kind: str) -> Any:
    """Compiled as the plugin compiles it."""
    from infermix_xgrammar.constrained import GrammarMasks, _compiled
    from infermix_xgrammar.plugin import ConstrainedOptions, JsonConstraint, RegexConstraint

    info = xgrammar.TokenizerInfo(VOCABULARY, xgrammar.VocabType.RAW, vocab_size=96, stop_token_ids=[STOP])
    constraint = RegexConstraint(pattern=PATTERN) if kind == "regex" else JsonConstraint(schema=SCHEMA)
    return GrammarMasks(_compiled(ConstrainedOptions(constraint=constraint), info))


def texts(engine: Any, kind: str, **sampling: Any) -> list[str]:
    engine._decoder = MaskedDecoder(engine._decoder, masks(kind))
    wanted = [
        Request(
            request_id=str(index), prompt_ids=(7 + index, 9),
            sampling=SamplingParams(max_new_tokens=40, seed=index, **sampling),
        )
        for index in range(4)
    ]  # fmt: skip
    found = generate(engine, wanted)
    assert all(tokens[-1] == STOP for tokens in found.values())
    return ["".join(VOCABULARY[token] for token in tokens[:-1]) for tokens in found.values()]


@pytest.mark.parametrize("decoder", ["autoregressive", "prompt_lookup", "jacobi"])
def test_regular_expression(build_engine: Build, decoder: str) -> None:
    found = texts(build_engine(parts={"decoder": decoder}), "regex", temperature=1.0)
    assert all(re.fullmatch(PATTERN, text) for text in found), found
    assert found == texts(build_engine(), "regex", temperature=1.0)


def test_json_schema(build_engine: Build) -> None:
    for text in texts(build_engine(parts={"decoder": "jacobi"}), "schema"):
        assert set(json.loads(text)) == {"n"}


def test_without_a_tokenizer(build_engine: Build) -> None:
    with pytest.raises(Unsupported, match="needs a transformers tokenizer"):
        build_engine(parts={"decoder": constrained({"use": "regex", "pattern": "a+"})})


def test_a_broken_expression() -> None:
    from infermix_xgrammar.constrained import _compiled
    from infermix_xgrammar.plugin import ConstrainedOptions, RegexConstraint

    info = xgrammar.TokenizerInfo(VOCABULARY, xgrammar.VocabType.RAW, vocab_size=96, stop_token_ids=[STOP])
    with pytest.raises(UserError) as caught:
        _compiled(ConstrainedOptions(constraint=RegexConstraint(pattern="(a")), info)
    assert caught.value.key == "parts.decoder.constraint"


def constrained(constraint: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    import msgspec
    from infermix_xgrammar.plugin import JsonConstraint, RegexConstraint

    return "constrained", {"constraint": msgspec.convert(constraint, JsonConstraint | RegexConstraint)}


def test_all_rows_at_once_are_filled_like_each() -> None:
    """Outputs in different places, one at its end, rows behind right and wrong drafts; what `bits` held is gone."""
    wanted = [("", ""), ("ab", ""), ("ab", "c"), ("ab", "cx"), ("abcd01", ""), ("ab12", "\0"), ("cdcd", "1")]
    sequences = {text: sequence_of(text, index) for index, text in enumerate(dict.fromkeys(t for t, _ in wanted))}
    sequences["abcd01"].tokens.append(STOP)
    rows = [(sequences[text], ids(drafts)) for text, drafts in wanted]
    together, one_by_one = masks("regex"), masks("regex")
    for _ in range(2):  # the second time matchers are there already
        bits, expected = torch.full((len(rows), 3), 12345, dtype=torch.int32), torch.full((len(rows), 3), -1).int()
        limited = [one_by_one.fill(sequence, own, expected, row) for row, (sequence, own) in enumerate(rows)]
        assert together.fill_all([seq for seq, _ in rows], [own for _, own in rows], bits) == any(limited)
        assert torch.equal(bits, expected)
        assert [bool((row == -1).all()) for row in bits] == [not each for each in limited]
        sequences["ab"].tokens += ids("ab")
    assert not together.fill_all([sequences["abcd01"]], [()], torch.zeros(1, 3, dtype=torch.int32))


def test_rows_that_are_begun_are_those_that_are_filled() -> None:
    sequences = [sequence_of(text, index) for index, text in enumerate(["", "ab", "abc", "abcd01", "cd1"])]
    sequences[3].tokens.append(STOP)
    beside, together = masks("regex"), masks("regex")
    with torch.inference_mode():  # as an engine does; the thread is not in it
        for behind in ("", "1", "2"):
            for sequence in (sequences[1], sequences[4]) if behind == "1" else (sequences[1],) if behind else ():
                sequence.tokens += ids(behind)
            bits, expected = torch.empty(5, 3, dtype=torch.int32), torch.zeros(5, 3, dtype=torch.int32)
            assert beside.begin(sequences, bits)() == together.fill_all(sequences, [()] * 5, expected)
            assert torch.equal(bits, expected)


def test_a_token_that_breaks_the_constraint_is_said_when_it_is_waited_for() -> None:
    sequences = [sequence_of("ab", index) for index in range(4)]
    begun, bits = masks("regex"), torch.empty(4, 3, dtype=torch.int32)
    begun.begin(sequences, bits)()
    sequences[2].tokens += ids("x")
    with pytest.raises(InfermixError, match="request '2' breaks the constraint"):
        begun.begin(sequences, bits)()


def test_a_token_that_breaks_the_constraint() -> None:
    right, wrong = sequence_of("ab", 0), sequence_of("ax", 1)
    with pytest.raises(InfermixError, match="request '1' breaks the constraint"):
        masks("regex").fill_all([right, wrong], [(), ()], torch.zeros(2, 3, dtype=torch.int32))


def ids(text: str) -> tuple[int, ...]:
    return tuple(STOP if letter == "\0" else VOCABULARY.index(letter) for letter in text)


def sequence_of(output: str, seq_id: int) -> Sequence:
    request = Request(request_id=str(seq_id), prompt_ids=(7, 9), sampling=SamplingParams())
    return Sequence(seq_id, request, [7, 9, *ids(output)], 2)
