"""SmoothQuant fitted: the expected error against what rounding does, its slope, and where the descent ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from infermix.roles.quantizer import QuantizerContext
from infermix.spec.validate import Report, check_struct
from infermix.toolkit.conformance.quantizer import calibration_model
from infermix_quant import smooth_fit
from infermix_quant.options import SmoothQuantOptions
from infermix_quant.quantizers_folded import SmoothQuantQuantizer
from infermix_quant.smooth import Rounding, search_alpha, smooth_scale
from infermix_quant.smooth_fit import ExpectedError, fit_scale
from torch import Tensor

SAMPLES = torch.randint(0, 90, (4, 24), generator=torch.Generator().manual_seed(0)).tolist()
CONTEXT = QuantizerContext(device="cpu", dtype="float32", calibration=lambda: SAMPLES)


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _case(seed: int, rows: int = 200, channels: int = 96) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Inputs with some large channels, weights whose columns differ, and outliers that the rows do not show."""
    x = _randn(rows, channels, seed=seed) * torch.exp(1.5 * _randn(channels, seed=seed + 1))
    columns = torch.exp(_randn(channels, seed=seed + 2))
    return x, 1.2 * x.abs().amax(0), [_randn(size, channels, seed=seed + size) * columns for size in (40, 24)]


def _expected(x: Tensor, max_abs: Tensor, weights: list[Tensor], scale: Tensor, static: bool) -> float:
    """The formula, written out in fp64: steps squared times what they meet, for every row and output."""
    x, scale = x.double() / scale.double(), scale.double()
    steps = (max_abs.double() / scale).amax().expand(len(x)) if static else x.abs().amax(1)
    error = 0.0
    for weight in weights:
        scaled = weight.double() * scale
        error += float(steps.square().sum() * scaled.square().sum())
        error += float(scaled.abs().amax(1).square().sum() * x.square().sum())
    return error


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_expected_error_is_the_formula(seed: int, static: bool) -> None:
    x, max_abs, weights = _case(seed)
    expected = ExpectedError(x, max_abs, weights, static=static)
    for scale in (torch.ones(96), smooth_scale(max_abs, weights, 0.5), torch.exp(_randn(96, seed=9))):
        value = float(expected.value(scale.log()))
        assert value == pytest.approx(_expected(x, max_abs, weights, scale, static), rel=1e-4)


@pytest.mark.parametrize("static", [False, True])
def test_rounding_errs_as_expected(static: bool) -> None:
    """Where no channel is so small that all of it rounds to zero. Within a tenth: the largest value of every row and
    output is exact, one in 96, and 400 rows of 64 outputs average the rest."""
    x, weights = _randn(400, 96) * torch.exp(0.3 * _randn(96, seed=1)), [_randn(64, 96, seed=2)]
    scale = torch.exp(0.3 * _randn(96, seed=3))
    measured = Rounding(x, x.abs().amax(0), weights, static=static).error(scale)
    value = float(ExpectedError(x, x.abs().amax(0), weights, static=static).value(scale.log()))
    assert measured == pytest.approx(value / 12 / 127**2, rel=0.1)


@pytest.mark.parametrize("static", [False, True])
def test_the_slope_is_that_of_half_the_logarithm(static: bool) -> None:
    x, max_abs, weights = _case(4)
    expected = ExpectedError(x, max_abs, weights, static=static)
    at = _randn(96, seed=5).requires_grad_()
    (slope,) = torch.autograd.grad(expected.value(at).log() / 2, at)
    torch.testing.assert_close(expected.slope(at.detach()), slope, rtol=1e-4, atol=1e-6)
    assert abs(float(slope.sum())) < 1e-5, "a common factor of all scales changes nothing"


@pytest.mark.parametrize("seed", range(4))
def test_the_logarithm_is_convex(seed: int) -> None:
    x, max_abs, weights = _case(seed)
    expected = ExpectedError(x, max_abs, weights, static=False)
    left, right = 2 * _randn(96, seed=seed + 50), 2 * _randn(96, seed=seed + 60)
    between = expected.value((left + right) / 2).log()
    assert between <= (expected.value(left).log() + expected.value(right).log()) / 2 + 1e-6


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_fitted_scales_err_less_than_the_best_exponent(seed: int, static: bool) -> None:
    x, max_abs, weights = _case(seed)
    fitted = fit_scale(x, max_abs, weights, static=static)
    searched = search_alpha(x, max_abs, weights, static=static)
    rounding = Rounding(x, max_abs, weights, static=static)
    assert rounding.error(fitted.scale) < 0.995 * rounding.error(searched.scale)
    assert fitted.alpha == searched.alpha
    assert fitted.ratio == pytest.approx(rounding.error(fitted.scale) / rounding.error(searched.scale))
    assert fitted.error == pytest.approx(rounding.relative(rounding.error(fitted.scale)))


def test_where_the_descent_ends_hardly_depends_on_where_it_began() -> None:
    x, max_abs, weights = _case(1)
    expected = ExpectedError(x, max_abs, weights, static=False)
    starts = (torch.ones(96), smooth_scale(max_abs, weights, 0.5), smooth_scale(max_abs, weights, 0.8))
    ends = [float(expected.value(smooth_fit._passed(expected, start)[-1].log())) for start in starts]
    assert max(ends) < 1.02 * min(ends)


def test_what_errs_no_less_than_its_start_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    x, max_abs, weights = _case(2)
    monkeypatch.setattr(smooth_fit, "_passed", lambda expected, start: [start * torch.exp(3 * _randn(96, seed=7))])
    fitted = fit_scale(x, max_abs, weights, static=False)
    assert torch.equal(fitted.scale, search_alpha(x, max_abs, weights, static=False).scale)
    assert fitted.ratio == 1


@pytest.mark.parametrize("dead", ["input", "weight", "both"])
def test_channels_of_zeros_keep_finite_scales(dead: str) -> None:
    x, _, weights = _case(0)
    if dead != "weight":
        x[:, 5] = 0
    if dead != "input":
        for weight in weights:
            weight[:, 5] = 0
    fitted = fit_scale(x, x.abs().amax(0), weights, static=False)
    assert bool(fitted.scale.isfinite().all())
    assert float(fitted.scale.min()) > 0
    assert fitted.ratio < 1


def test_an_input_of_zeros_has_no_error() -> None:
    fitted = fit_scale(torch.zeros(8, 6), torch.zeros(6), [_randn(4, 6)], static=False)
    assert bool(fitted.scale.isfinite().all())
    assert fitted.error == 0


def _applied(**options: Any) -> tuple[float, Any]:
    model, ids = calibration_model("llama"), torch.tensor(SAMPLES)
    for norm in (model.model.layers[0].input_layernorm, model.model.layers[0].post_attention_layernorm):
        norm.weight.data[[3, 70, 200]] *= 300
    before = model(input_ids=ids).logits
    report = SmoothQuantQuantizer(SmoothQuantOptions(fold="all", **options)).apply(model, CONTEXT)
    return float((model(input_ids=ids).logits - before).norm() / before.norm()), report


@pytest.mark.parametrize("activations", ["token", "tensor"])
def test_a_model_is_fitted_input_by_input(activations: str) -> None:
    error, report = _applied(alpha="fit", activations=activations)
    searched, other = _applied(alpha="search", activations=activations)
    details = report.details
    assert sum(details["start_alphas"].values()) == 6
    assert details["folded_inputs"] == 6
    assert 0.3 < details["mean_ratio_to_start"] < 1
    assert details["mean_output_error"] < other.details["mean_output_error"]
    assert error < searched
    assert "scales fitted per input, folded into linears too" in report.method


def test_fit_is_a_value_of_alpha() -> None:
    report = Report()
    taken = check_struct({"alpha": "fit"}, SmoothQuantOptions, (), report)
    assert taken is not None
    assert taken.alpha == "fit"
    assert check_struct({"alpha": "fitted"}, SmoothQuantOptions, ("quantizer",), report) is None
    assert "fit" in str(report.errors[0])
