"""The transforms `fuse` and `skinny_linear` under Triton's interpreter: run in a process with TRITON_INTERPRET=1."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fuse_models import (
    FUSED,
    logits_in_full,
    logits_packed,
    part,
    tiny,
    transform_context,
    worst_error,
)
from infermix.errors import Unsupported, WrongResult
from infermix.roles.component import Role
from infermix.roles.quantizer import QuantizerContext
from infermix_kernels import norm
from infermix_triton.fuse import FuseTransform
from infermix_triton.linear_skinny import SkinnyLinear, SkinnyLinearTransform
from torch import nn

torch.set_num_threads(1)
LENGTHS = (13, 2)
TOLERANCE = 2e-5
#: Families that are walked through the joint too, which takes seconds here.
PACKED = ("llama, scaled rope, tied, biased", "mistral")


@pytest.mark.parametrize("family", FUSED)
def test_fused_layers_give_the_same_logits(family: str) -> None:
    model = tiny(*FUSED[family])
    expected = logits_in_full(model, LENGTHS)
    num_layers = len(model.model.layers)
    report = FuseTransform().apply(model, transform_context())
    assert report.replaced == {"decoder layer": num_layers, "final norm": 1, "rotary angles": 1}
    assert all(0 <= error < TOLERANCE for error in report.verified.values())
    assert worst_error(logits_in_full(model, LENGTHS), expected) < TOLERANCE
    if family in PACKED:
        assert worst_error(logits_packed(model, LENGTHS, "eager", "paged"), expected) < TOLERANCE


@pytest.mark.parametrize(("attention", "kv"), [("sdpa", "dense"), ("eager", "concat")])
def test_every_layout_takes_fused_layers(attention: str, kv: str) -> None:
    """`concat` lays no pools open: keys are rotated first and written by the store."""
    model = tiny(*FUSED["qwen3"])
    expected = logits_in_full(model, LENGTHS)
    FuseTransform().apply(model, transform_context())
    assert worst_error(logits_packed(model, LENGTHS, attention, kv), expected) < TOLERANCE


def test_eight_bit_layers_are_quantized_merged() -> None:
    """A group lies within a row, so merging rows changes no scale."""
    model, fused = tiny(*FUSED["llama"]), tiny(*FUSED["llama"])
    FuseTransform().apply(fused, transform_context())
    for each, count in ((model, 14), (fused, 8)):
        report = part(Role.QUANTIZER, "rtn", group_size=32).apply(each, QuantizerContext("cpu", "float32"))
        assert len(report.kernels) == count
    assert worst_error(logits_in_full(fused, LENGTHS), logits_in_full(model, LENGTHS)) < TOLERANCE


def test_no_weight_is_held_twice() -> None:
    model = tiny(*FUSED["llama, scaled rope, tied, biased"])
    names = {name for name, _ in model.named_parameters()}
    total = sum(parameter.numel() for parameter in model.parameters())
    FuseTransform().apply(model, transform_context())
    SkinnyLinearTransform(8, measure=False).apply(model, transform_context())
    assert sum(parameter.numel() for parameter in model.parameters()) == total
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "model.layers.0.self_attn.q_proj.weight" in names
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == 4 * total


@pytest.mark.parametrize(
    ("model_type", "settings", "replaced", "why"),
    [
        ("granite", {"residual_multiplier": 0.5}, {"RMSNorm": 5, "gated MLP": 2}, "layer output differs"),
        ("gemma2", {"head_dim": 16}, {"RMSNorm": 9, "gated MLP": 2}, "4 norms"),
        ("olmo2", {}, {"RMSNorm": 9, "gated MLP": 2}, "span several heads"),
        ("mixtral", {"num_local_experts": 2}, {"RMSNorm": 5}, "no linear gate_proj"),
        ("cohere", {}, {"gated MLP": 2}, "1 norms"),
    ],
)
def test_other_layers_are_kept_with_a_reason(
    model_type: str, settings: dict[str, Any], replaced: dict[str, int], why: str
) -> None:
    model = tiny(model_type, settings)
    expected = logits_in_full(model, LENGTHS)
    report = FuseTransform().apply(model, transform_context())
    assert report.replaced == replaced
    assert why in report.kept["decoder layers"]
    assert set(report.verified) == set(replaced)
    assert worst_error(logits_in_full(model, LENGTHS), expected) < TOLERANCE


def test_a_model_without_anything_to_fuse_is_refused() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(Unsupported, match="nothing to fuse in GPT2LMHeadModel"):
        FuseTransform().apply(model, transform_context())


def test_one_strange_layer_keeps_all() -> None:
    model = tiny(*FUSED["llama"])
    model.model.layers[1].extra = nn.Parameter(torch.zeros(3))
    report = FuseTransform().apply(model, transform_context())
    assert "layer 1: LlamaDecoderLayer has a parameter extra" in report.kept["decoder layers"]
    assert type(model.model.layers[0]).__name__ == "LlamaDecoderLayer"


class Scaling(nn.Module):
    """A body that does something with what its layers return."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.layers, self.norm, self.rotary_emb = body.layers, body.norm, body.rotary_emb

    def forward(self, inputs_embeds: torch.Tensor, position_ids: torch.Tensor, **given: Any) -> Any:
        hidden = inputs_embeds
        angles = self.rotary_emb(hidden, position_ids)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=angles, **given)
        return SimpleNamespace(last_hidden_state=self.norm(hidden * 0.5))


def test_a_body_that_reads_its_layers_output_is_kept() -> None:
    model = tiny(*FUSED["llama"])
    model.model = body = Scaling(model.model)
    layers = body.layers
    report = FuseTransform().apply(model, transform_context())
    assert "more with the output of its layers" in report.kept["decoder layers"]
    assert body.layers is layers


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = norm.add_rms_norm
    monkeypatch.setattr(norm, "add_rms_norm", lambda x, *args, **given: right(x * 1.001, *args, **given))
    with pytest.raises(WrongResult, match="fused layer differs"):
        FuseTransform().apply(tiny(*FUSED["llama"]), transform_context())


def test_the_transformed_model_knows_no_batches_of_rows() -> None:
    model = tiny(*FUSED["llama"])
    FuseTransform().apply(model, transform_context())
    with pytest.raises(Unsupported, match="one packed row, not a batch of 2"):
        model(
            input_ids=torch.zeros(2, 3, dtype=torch.int64), position_ids=torch.arange(3).repeat(2, 1), use_cache=False
        )


@pytest.mark.parametrize("max_rows", [1, 8, 16])
def test_skinny_linears_give_the_same_logits(max_rows: int) -> None:
    model = tiny(*FUSED["qwen2"])
    expected = logits_in_full(model, (1, 8, 13))
    report = SkinnyLinearTransform(max_rows, measure=True).apply(model, transform_context())
    assert report.replaced == {"linear": 15}
    assert 0 < report.verified["linear"] < 1e-6
    assert worst_error(logits_in_full(model, (1, 8, 13)), expected) < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_one_row_of_a_fused_layer_is_gated_in_its_product(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SiLU and GELU; more rows gate in a launch of their own, and so does a product that torch computes."""
    model = tiny(*FUSED[family])
    expected = logits_in_full(model, (1, 2))
    FuseTransform().apply(model, transform_context())
    report = SkinnyLinearTransform(8, measure=False).apply(model, transform_context())
    assert report.replaced["gated product"] == len(model.model.layers)
    assert 0 < report.verified["gated product"] < 1e-6
    layer = model.model.layers[0]
    assert layer.gate_up_proj.gated(torch.zeros(1, 64), layer.activation) is not None
    assert layer.gate_up_proj.gated(torch.zeros(2, 64), layer.activation) is None
    assert worst_error(logits_in_full(model, (1, 2)), expected) < TOLERANCE


def test_rows_beyond_the_limit_are_torchs() -> None:
    linear = nn.Linear(32, 8)
    model = nn.Sequential(linear)
    SkinnyLinearTransform(2, measure=False).apply(model, transform_context())
    (module,) = model
    assert isinstance(module, SkinnyLinear)
    assert module.rows == (False, True, True)
    x = torch.randn(3, 1, 32)
    assert torch.equal(module(x), linear(x))
    assert torch.allclose(module(x[:2]), linear(x[:2]), atol=1e-5)
    assert module(x[:0]).shape == (0, 1, 8)


def test_a_model_without_plain_linears_is_refused() -> None:
    with pytest.raises(Unsupported, match="no plain linear left"):
        SkinnyLinearTransform(8, measure=False).apply(nn.Sequential(nn.Embedding(3, 4)), transform_context())
