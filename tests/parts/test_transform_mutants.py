"""The check of model transforms must catch those that change the logits or do not tell what they did."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from infermix.roles.component import Component, Role
from infermix.roles.transform import TransformReport
from infermix.toolkit.conformance import TRANSFORM_FAMILIES, check_transform
from torch import nn

GOOD: dict[str, Any] = {"name": "t", "replaced": {"linear": 2}, "verified": {"linear": 1e-7}}


class Wrapped(nn.Module):
    """A linear with a mistake in it, or none."""

    def __init__(self, inner: nn.Module, mistake: str) -> None:
        super().__init__()
        self.inner, self._mistake, self._calls = inner, mistake, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._calls += 1
        wrong = {
            "none": False,
            "always": True,
            "second time": self._calls > 4,
            "single tokens": x.shape[1] == 1,
            "long prompts": x.shape[1] > 32,
        }[self._mistake]
        out = self.inner(x)
        return out * 1.05 if wrong else out


class Transform:
    def __init__(self, mistake: str = "none", stage: str = "before_quantizer", **report: Any) -> None:
        self.stage, self._mistake, self._report = stage, mistake, {**GOOD, **report}

    def apply(self, model: Any, context: Any) -> TransformReport:
        body = model.base_model
        layer = body.layers[0] if hasattr(body, "layers") else body.h[0]
        name = "down_proj" if hasattr(layer.mlp, "down_proj") else "c_proj"
        setattr(layer.mlp, name, Wrapped(getattr(layer.mlp, name), self._mistake))
        return TransformReport(**self._report)


def component(part: Any, **fields: Any) -> Component:
    return Component(
        name="t", role=Role.TRANSFORM, summary="for tests", build=lambda options, context: part, **fields
    )


@pytest.mark.parametrize("family", TRANSFORM_FAMILIES)
def test_a_harmless_transform_passes(family: str) -> None:
    assert check_transform(component(Transform()), family=family).replaced == {"linear": 2}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_harmless_transform_passes_in_16_bits(dtype: str) -> None:
    check_transform(component(Transform()), dtype=dtype)


@pytest.mark.parametrize("family", TRANSFORM_FAMILIES)
@pytest.mark.parametrize("mistake", ["always", "second time", "single tokens", "long prompts"])
def test_changed_logits_are_caught(mistake: str, family: str) -> None:
    with pytest.raises(AssertionError, match="changes the logits"):
        check_transform(component(Transform(mistake)), family=family)


def test_a_lossy_transform_may_change_them() -> None:
    check_transform(component(Transform("always"), lossless=lambda options: False))


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ({"name": "other"}, "is called 'other'"),
        ({"replaced": {"linear": 0}}, "counts of zero"),
        ({"replaced": {}, "verified": {}}, "does not say why"),
        ({"kept": {"norm": " "}}, "without a reason"),
        ({"verified": {"norm": 0.0}}, "did not replace"),
        ({"verified": {"linear": 0.1}}, "errors beyond"),
        ({"verified": {"linear": float("nan")}}, "errors beyond"),
    ],
)  # fmt: skip
def test_reports_that_do_not_fit_are_caught(report: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_transform(component(Transform(**report)))


def test_an_unknown_stage_is_caught() -> None:
    with pytest.raises(AssertionError, match="stage 'sometime'"):
        check_transform(component(Transform(stage="sometime")))
