"""SmoothQuant's search of alpha: its objective in fp64, the rows it looks at, what the record says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from infermix.roles.quantizer import QuantizerContext
from infermix.spec.validate import Report, check_struct
from infermix.toolkit.conformance.quantizer import calibration_model
from infermix.toolkit.layerwise import walk_layers
from infermix.toolkit.linears import find_linears
from infermix_quant import smooth
from infermix_quant.observe import InputGroup, observe
from infermix_quant.options import SmoothQuantOptions
from infermix_quant.quantizers_folded import SmoothQuantQuantizer
from infermix_quant.smooth import ALPHAS, search_alpha, smooth_scale
from torch import Tensor

SAMPLES = torch.randint(0, 90, (4, 24), generator=torch.Generator().manual_seed(0)).tolist()
CONTEXT = QuantizerContext(device="cpu", dtype="float32", calibration=lambda: SAMPLES)


def _randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _case(seed: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Inputs with some large channels, weights whose columns differ, and an outlier that the rows do not show."""
    x = _randn(60, 32, seed=seed) * torch.exp(1.5 * _randn(32, seed=seed + 1))
    weights = [_randn(size, 32, seed=seed + size) * torch.exp(_randn(32, seed=seed + 2)) for size in (8, 5)]
    return x, 1.5 * x.abs().amax(0), weights


def _squared_error(x: Tensor, max_abs: Tensor, weights: list[Tensor], scale: Tensor, static: bool) -> float:
    x, scale = x.double(), scale.double()
    step = (x / scale).abs().amax(1, keepdim=True) if not static else (max_abs.double() / scale).amax()
    seen = torch.round(x / scale / (step / 127)) * step / 127
    error = 0.0
    for weight in weights:
        scaled = weight.double() * scale
        peak = scaled.abs().amax(1, keepdim=True) / 127
        error += float((seen @ (torch.round(scaled / peak) * peak).t() - x @ weight.double().t()).square().sum())
    return error


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_search_finds_the_smallest_error_of_the_grid(seed: int, static: bool) -> None:
    x, max_abs, weights = _case(seed)
    found = search_alpha(x, max_abs, weights, static=static)
    errors: dict[float | None, float] = {
        alpha: _squared_error(x, max_abs, weights, smooth_scale(max_abs, weights, alpha), static) for alpha in ALPHAS
    }
    errors[None] = _squared_error(x, max_abs, weights, torch.ones(32), static)
    assert errors[found.alpha] == pytest.approx(min(errors.values()), rel=1e-3)
    power = sum(float((x.double() @ weight.double().t()).square().sum()) for weight in weights)
    assert found.error**2 * power == pytest.approx(errors[found.alpha], rel=1e-3)


def test_an_input_that_every_alpha_harms_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alpha 0 makes the weights' columns equal, and the inputs of the largest ones too large for the others."""
    monkeypatch.setattr(smooth, "ALPHAS", (0.0,))
    x, weight = _randn(60, 32), _randn(8, 32, seed=1)
    weight[0, 3] = 1000
    found = search_alpha(x, x.abs().amax(0), [weight[1:], weight], static=False)
    assert found.alpha is None
    assert torch.equal(found.scale, torch.ones(32))
    _, report = _error(alpha="search", fold="all")
    assert report.details["folded_inputs"] == 6 - report.details["alphas"]["none"]


def test_what_the_static_scale_has_to_hold_counts() -> None:
    """A channel that is large in no row seen: scales per row ignore it, the static one does not."""
    x, _, weights = _case(0)
    max_abs = x.abs().amax(0)
    max_abs[4] *= 1000
    per_row, static = (search_alpha(x, max_abs, weights, static=each) for each in (False, True))
    assert static.error > per_row.error
    assert static.scale[4] > per_row.scale[4]


def _groups(rows: int) -> list[InputGroup]:
    model = calibration_model("llama")
    layer = next(iter(walk_layers(model, SAMPLES)))
    inside = [linear for linear in find_linears(model, ("*lm_head",))[0] if linear.name.startswith(f"{layer.name}.")]
    return observe(layer, inside, gram=True, rows=rows)


def test_rows_are_drawn_from_every_sample() -> None:
    group, everything = _groups(rows=10)[1], _groups(rows=10_000)[1]  # of `o_proj`: no two rows are the same
    assert group.rows is not None
    assert everything.rows is not None
    assert everything.gram is not None
    assert len(everything.rows) == 4 * 24
    torch.testing.assert_close(everything.rows.t() @ everything.rows, everything.gram, rtol=1e-3, atol=1e-3)
    assert len(group.rows) == 4 * 3, "rounded up to as many of every sample"
    sample_of = (group.rows[:, None] == everything.rows).all(-1).float().argmax(1) // 24
    assert sample_of.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert torch.equal(group.rows, _groups(rows=10)[1].rows)
    before = group.rows
    group.divide(torch.full((256,), 4.0))
    torch.testing.assert_close(group.rows, before / 4)
    assert _groups(rows=0)[0].rows is None


def _outlier_model() -> Any:
    """Channels of the first layer's norms are large, those of the second are as they come."""
    model = calibration_model("llama")
    for norm in (model.model.layers[0].input_layernorm, model.model.layers[0].post_attention_layernorm):
        norm.weight.data[[3, 70, 200]] *= 300
    return model


def _error(**options: Any) -> tuple[float, Any]:
    model, ids = _outlier_model(), torch.tensor(SAMPLES)
    before = model(input_ids=ids).logits
    report = SmoothQuantQuantizer(SmoothQuantOptions(**options)).apply(model, CONTEXT)
    return float((model(input_ids=ids).logits - before).norm() / before.norm()), report


@pytest.mark.parametrize("activations", ["token", "tensor"])
def test_inputs_get_alphas_of_their_own(activations: str) -> None:
    searched, report = _error(alpha="search", fold="all", activations=activations)
    alphas = report.details["alphas"]
    assert len(alphas) > 1
    assert sum(alphas.values()) == 6
    assert report.details["folded_inputs"] == 6 - alphas.get("none", 0)
    assert 0 < report.details["mean_output_error"] < 0.1
    assert "alpha searched per input, folded into linears too" in report.method
    assert searched < 0.2


def test_searched_alphas_are_as_good_as_the_best_common_one() -> None:
    searched, _ = _error(alpha="search", fold="all")
    assert searched <= 1.02 * min(_error(alpha=alpha, fold="all")[0] for alpha in (0.25, 0.5, 0.75))


def test_a_fixed_alpha_is_not_searched() -> None:
    _, report = _error(alpha=0.5)
    assert "alphas" not in report.details
    assert "alpha 0.5" in report.method


def test_other_words_than_search_are_refused() -> None:
    report = Report()
    taken = [check_struct({"alpha": alpha}, SmoothQuantOptions, (), report) for alpha in ("search", 1, 0.35)]
    assert [each.alpha for each in taken if each is not None] == ["search", 1, 0.35]
    assert not report.errors
    for wrong in ("serach", 1.5):
        assert check_struct({"alpha": wrong}, SmoothQuantOptions, ("quantizer",), report) is None
    assert "search" in str(report.errors[0])
    assert "1.5" in str(report.errors[1])
    assert all("quantizer.alpha" in str(error) for error in report.errors)
