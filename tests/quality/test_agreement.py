from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from infermix.errors import InfermixError, UserError
from infermix.quality.agreement import AgreementEvaluator
from infermix.quality.components import AgreementOptions
from infermix.quality.divergence import compare_logits, first_difference, top2_margin

TOKEN_A, TOKEN_B = 100, 101


def evaluate(engine: Any, reference: Any, make_context: Any, **options: Any) -> Any:
    settings = {"num_sequences": 3, "num_tokens": 12, "prompt_tokens": 4, "new_tokens": 6, **options}
    context = make_context(lambda: reference)
    metrics = AgreementEvaluator(AgreementOptions(**settings), context).evaluate(engine)
    return {metric.name.partition("[")[0]: metric for metric in metrics}


def two_way(margin: Any, flip_at: Any = None) -> Any:
    """Logits whose top two are tokens A and B, `margin` apart; B leads where the length is `flip_at`."""

    def next_logits(tokens: Any) -> Any:
        logits = torch.full((259,), -10.0)
        sign = -1 if flip_at is not None and len(tokens) == flip_at else 1
        logits[TOKEN_A], logits[TOKEN_B] = sign * margin / 2, -sign * margin / 2
        return logits

    return next_logits


def test_an_engine_agrees_with_itself(table_engine: Any, copycat: Any, evaluator_context: Any) -> None:
    found = evaluate(table_engine(copycat), table_engine(copycat), evaluator_context)
    assert found["kl_divergence"].value == 0
    assert found["top1_agreement"].value == 1
    assert found["first_divergence"].value == 6
    assert found["greedy_identical"].value == 1
    assert all(metric.details["lossless"] for metric in found.values())
    assert found["kl_divergence"].details["num_positions"] == 33


def test_names_carry_the_protocol(table_engine: Any, copycat: Any, evaluator_context: Any) -> None:
    found = evaluate(table_engine(copycat), table_engine(copycat), evaluator_context, protocol="decode")
    assert found["kl_divergence"].name == "kl_divergence[pydoc_topics,decode,sequences=3,tokens=12]"
    name = "first_divergence[pydoc_topics,prompts=3,prompt_tokens=4,tokens=6]"
    assert found["first_divergence"].name == name


def test_kl_is_reference_to_cell_in_nats(table_engine: Any, evaluator_context: Any) -> None:
    found = evaluate(table_engine(two_way(1.0)), table_engine(two_way(3.0)), evaluator_context)
    p, q = two_way(3.0)(()).double().softmax(-1), two_way(1.0)(()).double().softmax(-1)
    assert found["kl_divergence"].value == pytest.approx(float((p * (p / q).log()).sum()))
    assert found["kl_divergence"].stderr == pytest.approx(0, abs=1e-12)
    assert found["kl_divergence"].details["max_logit_difference"] == pytest.approx(1.0)
    assert found["top1_agreement"].value == 1


def test_pieces_are_scored_together_behind_their_context(
    table_engine: Any, copycat: Any, evaluator_context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("infermix.quality.agreement.ROWS_PER_CALL", 24)
    calls: list[int] = []

    class Counted(table_engine):  # type: ignore[misc]
        def score(self, requests: Any) -> Any:
            calls.append(len(requests))
            assert all(request.first == 5 for request in requests)
            return super().score(requests)

    engine = Counted(two_way(0.5, flip_at=7))
    found = evaluate(engine, table_engine(two_way(0.5)), evaluator_context, min_context=5, new_tokens=0)
    assert calls == [2, 1]
    assert found["kl_divergence"].name == "kl_divergence[pydoc_topics,prefill,sequences=3,tokens=12,min_context=5]"
    assert found["kl_divergence"].details["num_positions"] == 21
    assert found["top1_agreement"].samples == pytest.approx([1 - 1 / 7] * 3)
    with pytest.raises(ValueError, match="min_context 12 leaves nothing to compare of num_tokens 12"):
        AgreementOptions(num_tokens=12, prompt_tokens=4, min_context=12)


def test_a_flip_with_a_clear_margin_is_not_lossless(table_engine: Any, evaluator_context: Any) -> None:
    found = evaluate(table_engine(two_way(0.5, flip_at=7)), table_engine(two_way(0.5)), evaluator_context)
    top1 = found["top1_agreement"]
    assert top1.value == pytest.approx(1 - 1 / 11)
    assert (top1.details["disagreements"], top1.details["excused"]) == (3, 0)
    assert not top1.details["lossless"]
    first = found["first_divergence"]
    assert first.details["divergences"] == [3, 3, 3]
    assert first.value == 3
    assert found["greedy_identical"].value == 0
    assert not first.details["lossless"]


def test_a_near_tie_is_excused_but_only_rarely(table_engine: Any, evaluator_context: Any) -> None:
    tie = {"near_tie": 1e-3, "num_tokens": 110, "new_tokens": 6}
    found = evaluate(table_engine(two_way(1e-4, flip_at=7)), table_engine(two_way(1e-4)), evaluator_context, **tie)
    top1 = found["top1_agreement"]
    assert (top1.details["disagreements"], top1.details["excused"]) == (3, 3)
    assert top1.details["excused_share"] == pytest.approx(3 / (3 * 109))
    assert top1.details["lossless"]
    greedy = found["first_divergence"]
    assert greedy.details["excused"] == 3
    # Three of 12 compared tokens is more than the 1 % that may be excused.
    assert not greedy.details["lossless"]


def test_the_margin_counts_where_the_outputs_part(table_engine: Any, evaluator_context: Any) -> None:
    def tie_at_seven(flipped: bool) -> Any:
        clear, tie = two_way(0.5), two_way(1e-4, flip_at=7 if flipped else None)
        return lambda tokens: tie(tokens) if len(tokens) == 7 else clear(tokens)

    engine, reference = table_engine(tie_at_seven(True)), table_engine(tie_at_seven(False))
    found = evaluate(engine, reference, evaluator_context, num_tokens=6)
    assert found["first_divergence"].details["divergences"] == [3, 3, 3]
    assert found["first_divergence"].details["excused"] == 3


def test_greedy_tokens_can_be_left_out(table_engine: Any, copycat: Any, evaluator_context: Any) -> None:
    found = evaluate(table_engine(copycat), table_engine(copycat), evaluator_context, new_tokens=0)
    assert sorted(found) == ["kl_divergence", "top1_agreement"]


def test_the_reference_is_closed_also_after_an_error(table_engine: Any, copycat: Any, evaluator_context: Any) -> None:
    reference = table_engine(copycat)
    evaluate(table_engine(copycat), reference, evaluator_context)
    assert reference.closed
    reference = table_engine(copycat)
    broken = table_engine(lambda tokens: torch.full((259,), float("nan")))
    with pytest.raises(InfermixError, match="not finite"):
        evaluate(broken, reference, evaluator_context)
    assert reference.closed


def test_a_corpus_must_hold_all_sequences(table_engine: Any, copycat: Any, evaluator_context: Any) -> None:
    with pytest.raises(UserError, match="tokens, but 3000000000 are asked for"):
        evaluate(table_engine(copycat), table_engine(copycat), evaluator_context, num_tokens=10**9)


def test_options_state_the_longest_sequence() -> None:
    assert AgreementOptions(num_tokens=50, prompt_tokens=40, new_tokens=20).max_tokens() == 60
    assert AgreementOptions(num_tokens=90, prompt_tokens=40, new_tokens=20).max_tokens() == 90
    with pytest.raises(ValueError, match="prompt_tokens"):
        AgreementOptions(num_tokens=8, prompt_tokens=9)


def test_compare_logits_matches_torch_over_many_chunks() -> None:
    torch.manual_seed(0)
    reference, cell = torch.randn(150, 40), torch.randn(150, 40)
    found = compare_logits(reference, cell, near_tie=0.1)
    log_p, log_q = reference.double().log_softmax(-1), cell.double().log_softmax(-1)
    expected = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="sum")
    assert found.kl == pytest.approx(float(expected))
    differs = reference.argmax(-1) != cell.argmax(-1)
    assert found.disagreements == int(differs.sum())
    assert found.excused == int((differs & (top2_margin(reference) < 0.1)).sum()) > 0
    assert found.max_logit_difference == pytest.approx(float((reference - cell).abs().max()))


def test_masked_tokens_on_both_sides_contribute_nothing() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf]])
    found = compare_logits(logits, logits.clone(), near_tie=0.0)
    assert (found.kl, found.max_logit_difference) == (0.0, 0.0)


def test_logits_of_different_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="shape"):
        compare_logits(torch.zeros(2, 3), torch.zeros(2, 4), near_tie=0.0)


@pytest.mark.parametrize(
    ("reference", "cell", "expected"),
    [([1, 2, 3], [1, 2, 3], None), ([1, 2, 3], [1, 9, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [5], 0)],
)
def test_first_difference(reference: Any, cell: Any, expected: Any) -> None:
    assert first_difference(reference, cell) == expected
