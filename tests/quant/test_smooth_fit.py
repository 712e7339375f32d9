"""SmoothQuant fitted: the expected error against what rounding does, its slope, and where the descent ends."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from infermix.roles.quantizer import QuantizerContext
from infermix.spec.validate import Report, check_struct
from infermix.toolkit.conformance.quantizer import calibration_model
from infermix_quant import quantizers_folded, smooth_fit
from infermix_quant.options import SmoothQuantOptions
from infermix_quant.quantizers_folded import SmoothQuantQuantizer
from infermix_quant.smooth import Rounding, search_alpha, smooth_scale
from infermix_quant.smooth_fit import ExpectedError, Fitted, fit_scale
from torch import Tensor

SAMPLES = torch.randint(0, 90, (40, 24), generator=torch.Generator().manual_seed(0)).tolist()
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


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[::2], x[1::2]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_fitted_scales_err_less_on_rows_that_they_were_not_made_for(seed: int, static: bool) -> None:
    x, max_abs, weights = _case(seed, rows=800)
    seen, judging = _halves(x)
    fitted = fit_scale(x, max_abs, weights, static=static)
    searched = search_alpha(seen, max_abs, weights, static=static)
    rounding = Rounding(judging, max_abs, weights, static=static)
    assert rounding.error(fitted.scale) < 0.995 * rounding.error(searched.scale)
    assert fitted.alpha == searched.alpha
    assert torch.equal(fitted.start, searched.scale)
    assert fitted.ratio == pytest.approx(rounding.error(fitted.scale) / rounding.error(searched.scale))
    assert fitted.error == pytest.approx(rounding.relative(rounding.error(fitted.scale)))


@pytest.mark.parametrize("share", [0.003, 0.03, 0.3])
def test_channels_that_hardly_fire_are_not_given_away(share: float) -> None:
    """Half of the channels are 0 in most rows: what 100 rows show of them is not what 3,000 others need."""
    draw = torch.Generator().manual_seed(5)
    x, _, weights = _case(5, rows=3200)
    x[:, ::2] *= torch.rand(3200, 48, generator=draw) < share
    max_abs = x.abs().amax(0)
    fitted = fit_scale(x[:200], max_abs, weights, static=False)
    unseen = Rounding(x[200:], max_abs, weights, static=False)
    assert unseen.error(fitted.scale) < 1.05 * unseen.error(fitted.start)


def test_the_start_is_searched_for_on_rows_from_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = []

    def search(rows: Tensor, *others: Any, **more: Any) -> Any:
        given.append(rows)
        return search_alpha(rows, *others, **more)

    monkeypatch.setattr(smooth_fit, "search_alpha", search)
    monkeypatch.setattr(smooth_fit, "SEARCH_ROWS", 50)
    x, max_abs, weights = _case(6, rows=400)
    fit_scale(x, max_abs, weights, static=False)
    assert torch.equal(given[0], x[::8])


def test_from_a_near_start_the_descent_ends_in_one_place() -> None:
    x, max_abs, weights = _case(1)
    expected = ExpectedError(x, max_abs, weights, static=False)
    starts = (torch.ones(96), smooth_scale(max_abs, weights, 0.5), smooth_scale(max_abs, weights, 0.8))
    ends = [float(expected.value(smooth_fit._passed(expected, start)[-1].log())) for start in starts]
    assert max(ends) < 1.02 * min(ends)


def test_steps_shrink_to_nothing() -> None:
    x, max_abs, weights = _case(1)
    scales = smooth_fit._passed(ExpectedError(x, max_abs, weights, static=False), torch.ones(96))
    moved = [float((after / before).log().abs().mean()) for before, after in itertools.pairwise(scales)]
    assert moved[0] > moved[1] > moved[2]
    assert moved[2] < 0.1


def test_what_errs_no_less_than_its_start_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    x, max_abs, weights = _case(2)
    monkeypatch.setattr(smooth_fit, "_passed", lambda expected, start: [start * torch.exp(3 * _randn(96, seed=7))])
    fitted = fit_scale(x, max_abs, weights, static=False)
    assert fitted.scale is fitted.start
    assert fitted.ratio == 1


@pytest.mark.parametrize("dead", ["input", "weight", "both"])
def test_channels_that_show_nothing_stay_where_they_began(dead: str) -> None:
    x, _, weights = _case(0, rows=800)
    if dead != "weight":
        x[:, 5] = 0
    if dead != "input":
        for weight in weights:
            weight[:, 5] = 0
    fitted = fit_scale(x, x.abs().amax(0), weights, static=False)
    assert fitted.ratio < 1
    assert fitted.scale[5] == pytest.approx(float(fitted.start[5]), rel=1e-5)


@pytest.mark.parametrize("rows", [torch.zeros(8, 6), torch.ones(1, 6)])
def test_inputs_that_say_too_little_keep_the_start(rows: Tensor) -> None:
    fitted = fit_scale(rows, rows.abs().amax(0), [_randn(4, 6)], static=False)
    assert torch.equal(fitted.scale, fitted.start)
    assert bool(fitted.scale.isfinite().all())
    assert fitted.ratio == 1


@pytest.mark.gpu
def test_two_fits_on_a_gpu_are_one() -> None:
    x, max_abs, weights = _case(3, rows=2000, channels=512)
    there = [weight.cuda() for weight in weights]
    once, again = (fit_scale(x.cuda(), max_abs.cuda(), there, static=False) for _ in range(2))
    assert torch.equal(once.scale, again.scale)
    assert once.ratio < 1


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
    assert details["kept_start"] < 6
    assert 0.3 < details["mean_ratio_to_start"] < 1
    assert details["mean_output_error"] < 1.1 * other.details["mean_output_error"]
    assert error < 1.05 * searched
    assert "scales fitted per input, folded into linears too" in report.method


def test_fit_is_a_value_of_alpha() -> None:
    report = Report()
    taken = check_struct({"alpha": "fit"}, SmoothQuantOptions, (), report)
    assert taken is not None
    assert taken.alpha == "fit"
    assert check_struct({"alpha": "fitted"}, SmoothQuantOptions, ("quantizer",), report) is None
    assert "fit" in str(report.errors[0])


def test_scales_that_fp16_does_not_hold_give_way_to_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(rows: Tensor, max_abs: Tensor, weights: list[Tensor], *, static: bool) -> Fitted:
        start = smooth_scale(max_abs, weights, 0.5)
        return Fitted(0.5, torch.full_like(start, 1e9), 0.01, start, 0.25)

    monkeypatch.setattr(quantizers_folded, "fit_scale", found)
    model = calibration_model("llama").half()
    report = SmoothQuantQuantizer(SmoothQuantOptions(fold="all", alpha="fit")).apply(model, CONTEXT)
    assert report.details["folded_inputs"] == 6
    assert report.details["kept_start"] == 6, "the record says that nothing was fitted"
    assert report.details["mean_ratio_to_start"] == 1
    assert report.details["mean_output_error"] == pytest.approx(0.02)
    assert bool(model(input_ids=torch.tensor(SAMPLES)).logits.isfinite().all())


def test_rows_to_fit_and_to_judge_are_kept() -> None:
    assert SmoothQuantQuantizer(SmoothQuantOptions(alpha="fit")).num_rows == 4096
    assert SmoothQuantQuantizer(SmoothQuantOptions(alpha="search")).num_rows == 512
    assert SmoothQuantQuantizer(SmoothQuantOptions()).num_rows == 0
