"""Where static activation scales end: each observer against its definition on the values themselves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from infermix.roles.quantizer import QuantizerContext
from infermix.toolkit.conformance.quantizer import calibration_model
from infermix_quant.linear_int8 import Int8Linear, int8_weight
from infermix_quant.observers import Magnitudes, choose_peak
from infermix_quant.options import Fp8Options, Int8Options, SmoothQuantOptions
from infermix_quant.quantizers_folded import SmoothQuantQuantizer
from infermix_quant.quantizers_plain import Fp8Quantizer, Int8Quantizer
from infermix_quant.static_scales import round_int8_at
from torch import Tensor

FP8, INT8 = Fp8Quantizer(Fp8Options()), Int8Quantizer(Int8Options())
#: Neighbouring bins of the histogram.
BIN = 2 ** (1 / 32)


def _seen(values: Tensor) -> Magnitudes:
    """In two pieces, as samples come."""
    seen = Magnitudes()
    for piece in values.view(2, -1):
        seen.add(piece)
    return seen


def _values(kind: str) -> Tensor:
    draw = torch.Generator().manual_seed(0)
    values = torch.randn(2, 20000, generator=draw)
    if kind == "outliers":
        values[:, ::500] *= 200
    return values.flatten() if kind != "one-sided" else values.flatten().abs() * 1e-3


def test_minmax_is_exact() -> None:
    values = _values("outliers")
    assert choose_peak(_seen(values), Int8Options(), round_int8_at) == float(values.abs().max())
    assert choose_peak(_seen(torch.zeros(4)), Int8Options(observer="mse"), round_int8_at) > 0


@pytest.mark.parametrize("kind", ["normal", "outliers", "one-sided"])
@pytest.mark.parametrize("percentile", [60.0, 99.0, 99.99, 100.0])
def test_percentile_is_within_a_bin(kind: str, percentile: float) -> None:
    values = _values(kind).abs()
    exact = float(values.kthvalue(max(1, round(len(values) * percentile / 100))).values)
    found = choose_peak(_seen(values), Int8Options(observer="percentile", percentile=percentile), round_int8_at)
    assert exact / BIN <= found <= exact * BIN * 1.001
    assert found <= float(values.max())


@pytest.mark.parametrize("quantizer", [FP8, INT8], ids=["fp8", "int8"])
@pytest.mark.parametrize("kind", ["normal", "outliers", "one-sided"])
def test_mse_errs_hardly_more_than_the_best_clipping(quantizer: Int8Quantizer, kind: str) -> None:
    """Brute force over the values themselves, on a finer grid."""
    values = _values(kind)

    def error(peak: float) -> float:
        return float((quantizer.round_at(values, peak) - values).double().square().mean())

    peak = choose_peak(_seen(values), Int8Options(observer="mse"), quantizer.round_at)
    least = min(error(float(share) * float(values.abs().max())) for share in torch.linspace(0.005, 1, 400))
    assert error(peak) <= 1.05 * least + 1e-18
    if kind == "normal" and quantizer is INT8:
        assert peak < float(values.abs().max())


def test_a_static_int8_linear_clips() -> None:
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(12, 32, generator=draw), torch.randn(5, 32, generator=draw)
    packed, scale = int8_weight(weight)
    fixed = torch.tensor(1.5 / 127)
    seen = torch.round(x / fixed).clamp(-127, 127) * fixed
    expected = seen.double() @ (packed.double() * scale.double()[:, None]).t()
    out = Int8Linear(packed, scale, None, fixed)(x)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert float(seen.abs().max()) == pytest.approx(1.5)


SAMPLES = torch.randint(0, 90, (3, 16), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("observer", ["minmax", "mse"])
def test_static_smoothquant_scales_are_those_behind_the_folded_norm(observer: str) -> None:
    model = calibration_model("llama")
    context = QuantizerContext(device="cpu", dtype="float32", calibration=SAMPLES.tolist)
    options = SmoothQuantOptions(activations="tensor", observer=observer)  # type: ignore[arg-type]
    report = SmoothQuantQuantizer(options).apply(model, context)
    assert f"one static scale per input ({observer})" in report.method
    first = model.model.layers[0]
    inputs: list[Tensor] = []
    hook = first.self_attn.q_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    for sample in SAMPLES:
        model(input_ids=sample[None])
    hook.remove()
    seen = _seen(torch.cat([each.flatten() for each in inputs])[: 3 * 16 * 256 // 2 * 2])
    peak = choose_peak(seen, options, round_int8_at)
    assert float(first.self_attn.q_proj.input_scale) == pytest.approx(peak / 127, rel=1e-5)


def test_static_scales_lose_to_outliers_as_their_observer_allows() -> None:
    """One token in a hundred has an outlier: min-max spends its levels on it, least error clips it."""
    draw = torch.Generator().manual_seed(1)
    weight, x = torch.randn(16, 64, generator=draw), torch.randn(400, 64, generator=draw)
    x[::100, 3] = 300.0
    packed, scale = int8_weight(weight)
    expected = x @ weight.t()
    plain = [row for row in range(400) if row % 100]

    def error(observer: str) -> float:
        choice = SimpleNamespace(observer=observer, percentile=99.9)
        peak = choose_peak(_seen(x.flatten()), choice, round_int8_at)
        out = Int8Linear(packed, scale, None, torch.tensor(peak / 127))(x)
        return float((out - expected)[plain].norm() / expected[plain].norm())

    assert error("percentile") < 0.1 * error("minmax")
