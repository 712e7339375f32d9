"""What `plan` says of decoders inside decoders, and of drafts that do not fit the target."""

from __future__ import annotations

from pathlib import Path

import pytest
from infermix.compose import compose
from infermix.errors import UserErrors
from infermix.plugins import load_catalogue
from infermix.spec.load import load_experiment
from llada import write_llada

CATALOGUE = load_catalogue()


def verdict(tmp_path: Path, model: Path, decoder: str, kv: str = "dense") -> str:
    """Empty when the cell runs, otherwise its reasons."""
    path = tmp_path / "x.yaml"
    path.write_text(
        f"model: {model}\ndevice: cpu\ndtype: float32\nparts:\n  kv: {kv}\n  decoder: {decoder}\n"
        "workload: {use: corpus, input_tokens: 8, max_new_tokens: 8}\nlimits: {max_model_len: 64}\n"
    )
    (plan,) = compose(load_experiment(path), CATALOGUE)
    return "; ".join(plan.reasons)


@pytest.mark.parametrize(
    ("decoder", "message"),
    [
        ("decoder: jacobbi", "x.yaml:6:42: parts.decoder.decoder: no decoder component is called 'jacobbi'"),
        ("decoder: jacobi, decoder_options: {num: 3}", "parts.decoder.decoder_options.num: unknown key"),
        ("decoder: jacobi, decoder_options: {num_draft_tokens: 99}", "num_draft_tokens: expected int <= 63, got 99"),
        ("decoder: medusa, decoder_options: {heads: nowhere}", "decoder_options.heads: "),
        ("decoder: token_healing", "token_healing inside token_healing: raise num_tokens instead"),
    ],
)
def test_an_inner_decoder_is_checked_as_any(tiny_llama: Path, tmp_path: Path, decoder: str, message: str) -> None:
    with pytest.raises(UserErrors) as raised:
        verdict(tmp_path, tiny_llama, f"{{use: token_healing, {decoder}}}")
    assert message in str(raised.value)


def test_what_an_inner_decoder_needs(tiny_llama: Path, tmp_path: Path) -> None:
    healed = "{use: token_healing, decoder: lookahead}"
    assert verdict(tmp_path, tiny_llama, healed) == ""
    assert "decoder 'lookahead' needs kv:move, which kv 'none'" in verdict(tmp_path, tiny_llama, healed, kv="none")
    twice = "{use: constrained, constraint: {use: regex, pattern: a}, decoder: token_healing, decoder_options: %s}"
    found = verdict(tmp_path, tiny_llama, twice % "{decoder: lookahead}", kv="none")
    assert "decoder 'lookahead' needs kv:move" in found


def test_a_draft_of_another_vocabulary(tiny_llama: Path, tmp_path: Path) -> None:
    """Also where a decoder inside another one drafts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16,
                         num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    write_llada(tmp_path / "masks")
    reason = f"the draft model {tmp_path / 'other'} has 97 tokens in its vocabulary, the target 96"
    drafting = f"{{use: speculative, draft: {tmp_path / 'other'}}}"
    assert verdict(tmp_path, tiny_llama, drafting) == f"decoder 'speculative': {reason}"
    inside = f"{{use: token_healing, decoder: speculative, decoder_options: {{draft: {tmp_path / 'other'}}}}}"
    assert reason in verdict(tmp_path, tiny_llama, inside)
    masks = verdict(tmp_path, tiny_llama, f"{{use: speculative, draft: {tmp_path / 'masks'}}}")
    assert "fills in masks and predicts no next token" in masks


def test_layers_that_the_model_lacks(tiny_llama: Path, tmp_path: Path) -> None:
    assert verdict(tmp_path, tiny_llama, "{use: self_speculative, skip_layers: [1]}") == ""
    for layers in ("[2]", "[0, 1]", "[1, 1]"):
        found = verdict(tmp_path, tiny_llama, f"{{use: self_speculative, skip_layers: {layers}}}")
        assert f"skip_layers {layers} do not fit a model with layers 0 to 1: name each layer once" in found


def test_options_of_no_quantizer(tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UserErrors, match="draft_quantizer_options need a draft_quantizer"):
        verdict(tmp_path, tiny_llama, "{use: speculative, draft: target, draft_quantizer_options: {bits: 4}}")
