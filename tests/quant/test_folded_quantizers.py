"""AWQ and SmoothQuant: the objective, the folding, the direction of the scales."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from infermix.roles.quantizer import QuantizerContext
from infermix.toolkit.conformance.quantizer import calibration_model
from infermix.toolkit.layerwise import walk_layers
from infermix.toolkit.linears import find_linears
from infermix_quant.awq import AwqSettings, clip_and_round, search_scale
from infermix_quant.folding import find_fold
from infermix_quant.gptq import output_error
from infermix_quant.grid import round_groups
from infermix_quant.observe import observe
from infermix_quant.options import AwqOptions, SmoothQuantOptions
from infermix_quant.quantizers_folded import AwqQuantizer, SmoothQuantQuantizer

SAMPLES = torch.randint(0, 90, (4, 24), generator=torch.Generator().manual_seed(0)).tolist()
CONTEXT = QuantizerContext(device="cpu", dtype="float32", calibration=lambda: SAMPLES)


def _randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [3, 4])
def test_scaled_and_clipped_weights_are_better_than_rounded_ones(bits: int, symmetric: bool) -> None:
    x, weight = _randn(200, 64), _randn(16, 64, seed=1)
    x[:, ::16] *= 20
    gram, settings = x.t() @ x, AwqSettings(bits, 32, symmetric)
    plain = output_error(weight, round_groups(weight, bits, 32, symmetric).dequantize(), gram)
    scale = search_scale([(weight, settings)], gram, x.abs().mean(0), 20)
    scaled_gram = gram / scale / scale[:, None]
    unclipped = clip_and_round(weight * scale, None, settings).dequantize() / scale
    clipped = clip_and_round(weight * scale, scaled_gram, settings).dequantize() / scale
    assert output_error(weight, unclipped, gram) < 0.75 * plain
    assert output_error(weight, clipped, gram) < output_error(weight, unclipped, gram)


def test_the_search_is_the_smallest_of_all_candidates() -> None:
    from infermix_quant.awq import channel_scale

    x, weight = _randn(100, 32) * torch.logspace(-1, 1, 32), _randn(8, 32, seed=1)
    settings = AwqSettings(4, 16, False)
    found = search_scale([(weight, settings)], x.t() @ x, x.abs().mean(0), 20)

    def error(scale: torch.Tensor) -> float:
        rounded = round_groups(weight * scale, 4, 16, False).dequantize() / scale
        return float((x @ (rounded - weight).t()).square().sum())

    candidates = [channel_scale(x.abs().mean(0), step / 20) for step in range(20)]
    assert error(found) == pytest.approx(min(map(error, candidates)), rel=1e-4)


@pytest.mark.parametrize(
    ("family", "folded"),
    [
        ("llama", {"q_proj", "gate_proj", "down_proj"}),
        ("gemma2", {"q_proj", "gate_proj", "down_proj"}),
        ("gpt2", {"c_attn", "c_fc"}),
        ("phi3", {"qkv_proj", "gate_up_proj"}),
    ],
)
def test_folds_are_found_by_structure_and_change_nothing(family: str, folded: set[str]) -> None:
    """`o_proj` behind grouped heads, GPT-2's projections and fused gates have no operator that takes the scales."""
    model = calibration_model(family)
    ids = torch.tensor(SAMPLES)
    before = model(input_ids=ids).logits
    seen = set()
    for layer in walk_layers(model, SAMPLES[:1]):
        found, _ = find_linears(model, ("*lm_head",))
        inside = [linear for linear in found if linear.name.startswith(f"{layer.name}.")]
        for group in observe(layer, inside, gram=False):
            fold = find_fold(layer, group)
            if fold is not None:
                seen.add(group.linears[0].name.rsplit(".", 1)[-1])
                fold.apply(torch.rand(group.linears[0].in_features) + 0.5)
    torch.testing.assert_close(model(input_ids=ids).logits, before, rtol=1e-3, atol=1e-4)
    assert seen == folded


def test_one_value_head_per_query_head_lets_o_proj_fold() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=96,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().requires_grad_(False)
    report = AwqQuantizer(AwqOptions(group_size=32)).apply(model, CONTEXT)
    assert report.details["folded_inputs"] == report.details["inputs"] == 4


def _outlier_model() -> torch.nn.Module:
    """Three channels of every norm are a hundred times larger; the linears' weights stay as they are."""
    model = calibration_model("llama")
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data[[3, 70, 200]] *= 100
    return model


def _error_of(model: torch.nn.Module, quantizer: object) -> float:
    ids = torch.tensor(SAMPLES)
    before = model(input_ids=ids).logits
    quantizer.apply(model, CONTEXT)  # type: ignore[attr-defined]
    return float((model(input_ids=ids).logits - before).norm() / before.norm())


def test_smoothquant_rescues_planted_outliers() -> None:
    plain = _error_of(_outlier_model(), SmoothQuantQuantizer(SmoothQuantOptions(skip=("*lm_head",), alpha=0.0)))
    smooth = _error_of(_outlier_model(), SmoothQuantQuantizer(SmoothQuantOptions(alpha=0.5)))
    assert smooth < 0.5 * plain


@pytest.mark.parametrize(("fold", "folded"), [("norms", 4), ("all", 6)])
def test_smoothquant_folds_into_norms_or_linears_too(fold: Literal["norms", "all"], folded: int) -> None:
    """Two layers: two norms each, and `up_proj`; `v_proj` is read by several query heads here."""
    report = SmoothQuantQuantizer(SmoothQuantOptions(fold=fold)).apply(_outlier_model(), CONTEXT)
    assert report.details["folded_inputs"] == folded
    assert ("linears" in report.method) == (fold == "all")


def test_outliers_behind_a_linear_are_rescued_by_folding_into_it() -> None:
    def errors(fold: Literal["norms", "all"]) -> float:
        model = _outlier_model()
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.up_proj.weight[5] *= 200
                layer.mlp.down_proj.weight[:, 5] /= 200
        return _error_of(model, SmoothQuantQuantizer(SmoothQuantOptions(fold=fold)))

    assert errors("all") < 0.7 * errors("norms")


def test_smoothquant_divides_activations_and_multiplies_weights() -> None:
    model = _outlier_model()
    norm = model.model.layers[0].input_layernorm
    before = norm.weight.clone()
    SmoothQuantQuantizer(SmoothQuantOptions()).apply(model, CONTEXT)
    ratio = before / norm.weight
    assert ratio[3] > 3 * ratio.median()


def test_awq_is_better_than_rounding_through_a_model() -> None:
    awq = _error_of(_outlier_model(), AwqQuantizer(AwqOptions(bits=3)))
    plain = _error_of(_outlier_model(), AwqQuantizer(AwqOptions(bits=3, grid=2, clip=False, bits_for={"*": 3})))
    assert awq < plain
