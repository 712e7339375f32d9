from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from infermix.errors import InfermixError, UserError
from infermix.quality.components import PerplexityOptions
from infermix.quality.perplexity import PerplexityEvaluator, WindowLoss, mean_and_stderr, windows

REPEAT = math.log(2)
OTHER = math.log(2 * 258)


def evaluate(engine: Any, context: Any, text: Any = None, **options: Any) -> Any:
    if text is not None:
        (context.base / "corpus.txt").write_text(text)
        options = {"corpus": "corpus.txt", "num_tokens": None, **options}
    (quality,) = PerplexityEvaluator(PerplexityOptions(**options), context).evaluate(engine)
    return quality


@given(st.integers(1, 60), st.integers(2, 20), st.data())
def test_windows_make_every_token_new_exactly_once(num_tokens: Any, window: Any, data: Any) -> None:
    stride = data.draw(st.integers(1, window))
    plan = list(windows(num_tokens, window, stride))
    new = [token for each in plan for token in range(each.first_new, each.end)]
    assert new == list(range(num_tokens))
    assert all(each.end - each.start <= window and each.start <= each.first_new for each in plan)
    assert all(each.end == min(each.start + window, num_tokens) for each in plan)


def test_windows_overlap_by_window_minus_stride() -> None:
    plan = [(each.start, each.first_new, each.end) for each in windows(10, 4, 3)]
    assert plan == [(0, 0, 4), (3, 4, 7), (6, 7, 10)]


def test_one_window_by_hand(table_engine: Any, copycat: Any, evaluator_context: Any) -> None:
    # a|a b b: one token is given, then a repetition, a change and a repetition are scored.
    quality = evaluate(table_engine(copycat), evaluator_context(), "aabb", window=16)
    nats = (2 * REPEAT + OTHER) / 3
    assert quality.value == pytest.approx(math.exp(nats))
    assert quality.details["nats_per_token"] == pytest.approx(nats)
    assert quality.details["bits_per_byte"] == pytest.approx(nats / math.log(2))
    assert quality.details["num_scored_tokens"] == 3
    assert quality.stderr is None
    assert (quality.better, quality.samples) == ("lower", [pytest.approx(nats)])


def test_disjoint_windows_leave_each_first_token_unscored(
    table_engine: Any, copycat: Any, evaluator_context: Any
) -> None:
    quality = evaluate(table_engine(copycat), evaluator_context(), "aabb", window=2)
    assert quality.samples == [pytest.approx(REPEAT), pytest.approx(REPEAT)]
    assert quality.value == pytest.approx(2.0)


def test_overlapping_windows_score_only_what_is_new(table_engine: Any, copycat: Any, evaluator_context: Any) -> None:
    engine = table_engine(copycat)
    quality = evaluate(engine, evaluator_context(), "abcdefgh", window=4, stride=2)
    assert [(request.first, len(request.token_ids)) for request in engine.scored] == [(1, 4), (2, 4), (2, 4)]
    assert quality.details["num_scored_tokens"] == 7


def test_bos_makes_the_first_token_scorable(
    table_engine: Any, copycat: Any, evaluator_context: Any, byte_tokenizer: Any
) -> None:
    engine = table_engine(copycat)
    quality = evaluate(engine, evaluator_context(), "aabb", window=2, bos="bos")
    assert quality.details["num_scored_tokens"] == 4
    assert all(request.token_ids[0] == byte_tokenizer.bos_token_id for request in engine.scored)
    assert quality.value == pytest.approx(math.exp((2 * REPEAT + 2 * OTHER) / 4))


def test_a_window_as_long_as_the_text_is_the_full_context(table_engine: Any, evaluator_context: Any) -> None:
    def whole_history(tokens: Any) -> Any:
        return torch.sin(torch.arange(259.0) * sum(tokens))

    text = "the quick brown fox"
    full = evaluate(table_engine(whole_history), evaluator_context(), text, window=len(text))
    wider = evaluate(table_engine(whole_history), evaluator_context(), text, window=99, stride=3)
    assert wider.value == full.value
    narrow = evaluate(table_engine(whole_history), evaluator_context(), text, window=6, stride=3)
    assert narrow.value != pytest.approx(full.value, rel=1e-6)


def test_the_name_carries_the_protocol(table_engine: Any, copycat: Any, evaluator_context: Any) -> None:
    engine = table_engine(copycat)
    quality = evaluate(engine, evaluator_context(), window=8, stride=4, num_tokens=20, protocol="decode")
    assert quality.name == "perplexity[pydoc_topics,decode,window=8,stride=4,bos=none,tokens=20]"
    assert {request.protocol for request in engine.scored} == {"decode"}
    assert len(quality.details["corpus_sha256"]) == 64


def test_a_context_is_given_before_anything_is_scored(
    table_engine: Any, copycat: Any, evaluator_context: Any
) -> None:
    engine = table_engine(copycat)
    quality = evaluate(engine, evaluator_context(), "abcdefghij", window=6, stride=2, min_context=4)
    assert [(request.first, len(request.token_ids)) for request in engine.scored] == [(4, 6), (4, 6), (4, 6)]
    assert quality.details["num_scored_tokens"] == 6
    assert quality.name.endswith("tokens=10,min_context=4]")
    with pytest.raises(ValueError, match="min_context 6 leaves nothing to score of window 6"):
        PerplexityOptions(window=6, min_context=6)
    with pytest.raises(UserError, match="the corpus has 4 tokens, 5 are the least"):
        evaluate(engine, evaluator_context(), "abcd", window=6, min_context=4)


def test_stderr_is_that_of_a_ratio() -> None:
    losses = [WindowLoss(4.0, 2), WindowLoss(2.0, 2), WindowLoss(3.0, 1)]
    mean, stderr = mean_and_stderr(losses)
    assert mean == pytest.approx(9 / 5)
    residuals = [4 - 2 * mean, 2 - 2 * mean, 3 - mean]
    assert stderr == pytest.approx(math.sqrt(sum(r * r for r in residuals) * 3 / 2) / 5)


def test_max_tokens_is_the_longest_scored_sequence(table_engine: Any, copycat: Any, evaluator_context: Any) -> None:
    cases: list[dict[str, Any]] = [
        {"num_tokens": 12, "window": 4, "stride": 2},
        {"num_tokens": 12, "window": 6, "bos": "bos"},
        {"num_tokens": 9, "window": 64},
    ]
    for options in cases:
        engine = table_engine(copycat)
        evaluate(engine, evaluator_context(), "abcdefghijkl", **options)
        longest = max(len(request.token_ids) for request in engine.scored)
        assert PerplexityOptions(**options).max_tokens() == longest


def test_a_stride_beyond_the_window_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves gaps"):
        PerplexityOptions(window=4, stride=5)


def test_a_short_corpus_says_how_long_it_is(table_engine: Any, copycat: Any, evaluator_context: Any) -> None:
    with pytest.raises(UserError, match=r"corpus\.txt: the corpus has 4 tokens, but 9 are asked for"):
        evaluate(table_engine(copycat), evaluator_context(), "aabb", num_tokens=9)


@pytest.mark.parametrize(
    ("content", "message"), [(None, "no such corpus file"), (b" \n", "is empty"), (b"\xff\xfe\x00", "not UTF-8")]
)
def test_a_bad_corpus_file_is_named(
    content: Any, message: Any, table_engine: Any, copycat: Any, evaluator_context: Any
) -> None:
    context = evaluator_context()
    if content is not None:
        (context.base / "bad.txt").write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        evaluate(table_engine(copycat), context, corpus="bad.txt")
    assert "bad.txt" in str(caught.value)


def test_a_model_without_tokenizer_is_refused(table_engine: Any, copycat: Any, evaluator_context: Any) -> None:
    engine = table_engine(copycat)
    engine.tokenizer = None
    with pytest.raises(UserError, match="no tokenizer"):
        evaluate(engine, evaluator_context(), "aabb")


def test_bos_without_a_bos_token_is_refused(
    table_engine: Any, copycat: Any, evaluator_context: Any, byte_tokenizer: Any
) -> None:
    byte_tokenizer.bos_token_id = None
    with pytest.raises(UserError, match="no BOS token"):
        evaluate(table_engine(copycat, byte_tokenizer), evaluator_context(), "aabb", bos="bos")


def test_log_probabilities_that_are_not_finite_are_an_error(table_engine: Any, evaluator_context: Any) -> None:
    engine = table_engine(lambda tokens: torch.full((259,), float("nan")))
    with pytest.raises(InfermixError, match="not finite"):
        evaluate(engine, evaluator_context(), "aabb")
