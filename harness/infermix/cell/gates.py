"""Gates: what a cell must pass before its speed may be published."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from infermix.measure.names import DEFAULT_GATES
from infermix.protocol import OutputFigures
from infermix.record.record import QualityRecord


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the gates look at. `lossless`: every part and the engine say so. `dummy`: random weights."""

    lossless: bool
    dtype: str
    dummy: bool = False
    self_check: Mapping[str, Any] = field(default_factory=dict)
    outputs: Sequence[OutputFigures] = ()
    quality: Mapping[str, QualityRecord] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What the gates need of the baseline's record; empty when there is none yet."""

    quality: Mapping[str, QualityRecord] = field(default_factory=dict)
    degenerate_share: float | None = None


def self_check_failure(self_check: Mapping[str, Any]) -> str | None:
    """The reason when an engine's self-check says `passed: false`."""
    if self_check.get("passed", True):
        return None
    return f"the engine's self-check failed: {self_check.get('reason', 'no reason given')}"


def failed_gates(evidence: Evidence, baseline: Baseline, gates: Mapping[str, float]) -> list[str]:
    """One sentence per gate that is not passed; none means that the speed may be published."""
    limits = {**DEFAULT_GATES, **gates}
    checks = (
        _self_check(evidence),
        _degenerate(evidence, baseline, limits),
        _lossless(evidence, limits),
        _perplexity(evidence, baseline, limits["perplexity_ratio"]),
    )
    return [reason for check in checks for reason in check]


def output_shares(outputs: Sequence[OutputFigures]) -> dict[str, float]:
    """Shares over all measured repeats, stored with the record's counters."""
    total = sum(figures.outputs for figures in outputs)
    if not total:
        return {}
    return {
        "degenerate_share": sum(figures.degenerate for figures in outputs) / total,
        "empty_share": sum(figures.empty for figures in outputs) / total,
    }


def _self_check(evidence: Evidence) -> Iterator[str]:
    failure = self_check_failure(evidence.self_check)
    if failure:
        yield failure


def _degenerate(evidence: Evidence, baseline: Baseline, limits: Mapping[str, float]) -> Iterator[str]:
    shares = output_shares(evidence.outputs)
    if not shares:
        return
    if shares["empty_share"] > limits["empty_share"]:
        yield f"{shares['empty_share']:.0%} of the outputs are empty"
    if evidence.dummy:
        return  # random weights may well prefer one token
    tokens = {figures.single_token for figures in evidence.outputs}
    if len(tokens) == 1 and None not in tokens and sum(figures.outputs for figures in evidence.outputs) > 1:
        yield f"every output is the token {tokens.pop()} repeated"
    elif baseline.degenerate_share is not None:
        excess = shares["degenerate_share"] - baseline.degenerate_share
        if excess > limits["degenerate_share"]:
            yield (
                f"{shares['degenerate_share']:.0%} of the outputs repeat one token, "
                f"{baseline.degenerate_share:.0%} of the baseline's do"
            )


def _lossless(evidence: Evidence, limits: Mapping[str, float]) -> Iterator[str]:
    if not evidence.lossless:
        return
    for name, quality in evidence.quality.items():
        if evidence.dtype == "float32" and quality.details.get("lossless") is False:
            yield f"a lossless mix differs from the reference parts: {name} = {quality.value:.6g}"
        elif name.startswith("top1_agreement") and quality.value < limits["top1_agreement"]:
            yield (
                f"a lossless mix agrees with the reference parts on {quality.value:.1%} of the tokens only "
                f"(gate top1_agreement {limits['top1_agreement']:g})"
            )


def _perplexity(evidence: Evidence, baseline: Baseline, limit: float) -> Iterator[str]:
    for name, quality in evidence.quality.items():
        known = baseline.quality.get(name)
        if name.startswith("perplexity") and known is not None and quality.value > limit * known.value:
            yield (
                f"{name} is {quality.value:.4g}, {quality.value / known.value:.2f} times the baseline's "
                f"{known.value:.4g} (gate perplexity_ratio {limit:g})"
            )
