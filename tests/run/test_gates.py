"""Gates: which cells lose their speed, and which must not."""

from __future__ import annotations

from typing import Any

import pytest
from infermix.cell.gates import (
    Baseline,
    Evidence,
    failed_gates,
    output_shares,
    self_check_failure,
)
from infermix.protocol import OutputFigures
from infermix.record.record import QualityRecord


def perplexity(value: float) -> dict[str, QualityRecord]:
    return {"perplexity[text]": QualityRecord(value=value, unit="perplexity", better="lower")}


def agreement(value: float, lossless: bool) -> dict[str, QualityRecord]:
    record = QualityRecord(value=value, unit="ratio", better="higher", details={"lossless": lossless})
    return {"top1_agreement[text]": record}


def judge(baseline: Baseline | None = None, gates: dict[str, float] | None = None, **evidence: Any) -> list[str]:
    facts = Evidence(**{"lossless": True, "dtype": "float32", **evidence})
    return failed_gates(facts, baseline or Baseline(), gates or {})


def test_nothing_known_passes() -> None:
    assert judge() == []


@pytest.mark.parametrize(("value", "passes"), [(14.9, True), (15.1, False)])
def test_perplexity_stays_below_one_and_a_half_times_the_baselines(value: float, passes: bool) -> None:
    reasons = judge(Baseline(quality=perplexity(10.0)), lossless=False, quality=perplexity(value))
    assert (reasons == []) is passes
    if not passes:
        assert "1.51 times the baseline's 10" in reasons[0]


def test_the_experiment_may_say_otherwise() -> None:
    baseline = Baseline(quality=perplexity(10.0))
    assert judge(baseline, {"perplexity_ratio": 2.0}, quality=perplexity(19.0)) == []


def test_other_protocols_are_not_compared() -> None:
    other = {"perplexity[other]": QualityRecord(value=99.0, unit="perplexity", better="lower")}
    assert judge(Baseline(quality=perplexity(10.0)), quality=other) == []


def test_a_lossless_mix_in_float32_must_be_lossless() -> None:
    assert "lossless mix differs" in judge(quality=agreement(0.99, False))[0]
    assert judge(quality=agreement(0.99, True)) == []
    assert judge(lossless=False, quality=agreement(0.5, False)) == []


def test_below_float32_agreement_is_bounded() -> None:
    assert judge(dtype="bfloat16", quality=agreement(0.97, False)) == []
    assert "80.0%" in judge(dtype="bfloat16", quality=agreement(0.80, False))[0]


def test_a_failed_self_check_is_a_reason() -> None:
    assert self_check_failure({"relative_error": 1e-6}) is None
    assert self_check_failure({"passed": False, "reason": "shifted"}) == "the engine's self-check failed: shifted"
    assert judge(self_check={"passed": False})


def test_one_token_everywhere_is_degenerate() -> None:
    broken = [OutputFigures(outputs=4, degenerate=4, single_token=0)] * 2
    assert judge(outputs=broken) == ["every output is the token 0 repeated"]
    assert judge(outputs=broken, dummy=True) == []
    assert judge(outputs=[OutputFigures(outputs=1, degenerate=1, single_token=7)]) == []


def test_repeats_are_compared_with_the_baselines() -> None:
    figures = [OutputFigures(outputs=10, degenerate=8)]
    assert judge(outputs=figures) == []
    assert judge(Baseline(degenerate_share=0.5), outputs=figures) == []
    assert "80% of the outputs" in judge(Baseline(degenerate_share=0.1), outputs=figures)[0]


def test_empty_outputs() -> None:
    assert judge(outputs=[OutputFigures(outputs=10, empty=5)]) == []
    assert "60% of the outputs are empty" in judge(outputs=[OutputFigures(outputs=10, empty=6)])[0]
    assert output_shares([]) == {}
