"""What `plan` says of models that fill in masks, and of decoders, layouts and evaluators beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from infermix.compose import compose
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.errors import UserError, UserErrors
from infermix.plugins import load_catalogue
from infermix.spec.experiment import ModelSource
from infermix.spec.load import load_experiment
from llada import MASK, PlainLLaDA, write_llada

CATALOGUE = load_catalogue()
PARTS = "attention: sdpa, kv: none, decoder: diffusion"


@pytest.fixture(scope="module")
def llada(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llada(tmp_path_factory.mktemp("llada"))


def verdict(tmp_path: Path, model: Path, parts: str, *, engine: str = "native", more: str = "") -> list[str]:
    """The reasons why the cell does not run; none when it does."""
    path = tmp_path / "x.yaml"
    path.write_text(
        f"model: {model}\ndevice: cpu\ndtype: float32\nengine: {engine}\n"
        + (f"parts: {{{parts}}}\n" if parts else "")
        + ("" if "workload:" in more else "workload: {use: corpus, input_tokens: 8, max_new_tokens: 8}\n")
        + f"limits: {{max_model_len: 64}}\n{more}"
    )
    (plan,) = compose(load_experiment(path), CATALOGUE)
    assert plan.runs == (not plan.reasons)
    return list(plan.reasons)


def test_it_runs(llada: Path, tmp_path: Path) -> None:
    assert verdict(tmp_path, llada, PARTS) == []
    assert verdict(tmp_path, llada, "attention: eager, kv: none, decoder: {use: diffusion, threshold: 0.9}") == []


@pytest.mark.parametrize(
    "decoder",
    [
        *("autoregressive", "jacobi", "prompt_lookup", "lookahead", "beam", "synthetic_acceptance", "token_healing"),
        "self_speculative",
        "{use: speculative, draft: target}",
        "{use: constrained, constraint: {use: regex, pattern: a}}",
    ],
)
def test_a_decoder_that_goes_on_is_refused(llada: Path, tmp_path: Path, decoder: str) -> None:
    reasons = verdict(tmp_path, llada, f"attention: sdpa, kv: none, decoder: {decoder}")
    name = decoder.removeprefix("{use: ").partition(",")[0]
    assert (
        "the model needs decoder:unmasks (it fills in masks and predicts no next token, as for decoder: diffusion), "
        f"which decoder '{name}' does not provide"
    ) in reasons


@pytest.mark.parametrize("engine", ["transformers", "vllm", "simulated"])
def test_an_engine_that_goes_on_is_refused(llada: Path, tmp_path: Path, engine: str) -> None:
    reasons = verdict(tmp_path, llada, "" if engine != "simulated" else "decoder: autoregressive", engine=engine)
    assert any(reason.startswith("the model needs decoder:unmasks") for reason in reasons)


@pytest.mark.parametrize("kv", ["paged", "dense", "concat", "hybrid", "quantized", "h2o"])
def test_a_layout_that_keeps_keys_is_refused(llada: Path, tmp_path: Path, kv: str) -> None:
    kv = "{use: h2o, budget: 9}" if kv == "h2o" else kv
    reasons = verdict(tmp_path, llada, f"attention: sdpa, kv: {kv}, decoder: diffusion")
    (reason,) = [each for each in reasons if "kv:recompute" in each]
    assert "tokens see what is behind them: their keys change with every step, as in kv: none" in reason


def test_causal_attention_is_refused(llada: Path, tmp_path: Path) -> None:
    reasons = verdict(tmp_path, llada, "attention: triton, kv: none, decoder: diffusion")
    assert "the model needs attn:noncausal, which attention 'triton' does not provide" in reasons


def test_a_causal_model_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    reason = (
        "decoder 'diffusion' needs model:bidirectional, which llama models do not have (models that fill in masks "
        "do, with is_causal: false in their config)"
    )
    assert verdict(tmp_path, tiny_llama, "kv: none, decoder: {use: diffusion, mask_token_id: 3}") == [reason]


def test_a_missing_mask_token_is_told(tmp_path: Path) -> None:
    model = write_llada(tmp_path / "silent", mask_token_id=None)
    (reason,) = verdict(tmp_path, model, PARTS)
    assert "needs model:mask_token" in reason
    assert "set parts.decoder.mask_token_id" in reason
    assert verdict(tmp_path, model, "kv: none, decoder: {use: diffusion, mask_token_id: 95}") == []


def test_nobody_scores_such_a_model(llada: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "text.txt"
    corpus.write_text("some words " * 50)
    quality = "quality: [{use: perplexity, corpus: text.txt, window: 16, stride: 8}, agreement]\n"
    reasons = "; ".join(verdict(tmp_path, llada, PARTS, more=quality))
    for name in ("perplexity", "agreement"):
        assert f"evaluator '{name}' needs engine:score" in reasons
    assert "which no engine does for a model that fills in masks" in reasons


def test_a_library_that_runs_it_as_causal_is_refused(llada: Path, tmp_path: Path) -> None:
    quantizer = "quantizer: {use: autoawq, calibration: {corpus: pydoc_data.topics}}"
    reasons = verdict(tmp_path, llada, f"{PARTS}, {quantizer}")
    assert any("quantizer 'autoawq' needs model:autoawq" in reason for reason in reasons)


def test_a_threshold_on_random_tokens_says_nothing(llada: Path, tmp_path: Path) -> None:
    synthetic = "workload: {use: synthetic, input_tokens: 8, output_tokens: 8, ignore_eos: true}\n"
    decoder = "attention: sdpa, kv: none, decoder: {use: diffusion, threshold: 0.9}"
    (reason,) = verdict(tmp_path, llada, decoder, more=synthetic)
    assert "how many predictions reach a threshold on random tokens" in reason
    assert verdict(tmp_path, llada, PARTS, more=synthetic) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("block_length: 0", "block_length"),
        ("steps_per_block: 0", "steps_per_block"),
        ("threshold: 0", "threshold"),
        ("threshold: 1.5", "threshold"),
        ("remasking: best", "remasking"),
        ("threshold: 0.9, steps_per_block: 4", "both say how many predictions a step keeps"),
        ("threshold: 0.9, remasking: random", "a probability, which remasking: random does not look at"),
        ("mask_token_id: -1", "mask_token_id"),
    ],
)
def test_wrong_options(llada: Path, tmp_path: Path, options: str, message: str) -> None:
    with pytest.raises(UserErrors, match=message):
        verdict(tmp_path, llada, f"kv: none, decoder: {{use: diffusion, {options}}}")


def test_facts_are_those_of_the_published_config(llada: Path) -> None:
    facts = read_model_facts(resolve_source(ModelSource(source=str(llada)), Path()))
    assert facts.num_parameters == sum(each.numel() for each in PlainLLaDA(llada).weights.values())
    assert (facts.vocab_size, facts.max_position_embeddings, facts.mask_token_id) == (96, 256, MASK)
    (layer, _) = facts.layers
    assert (layer.num_heads, layer.num_kv_heads, layer.key_dim) == (4, 2, 16)
    assert {"attn:noncausal", "kv:recompute", "decoder:unmasks", "model:bidirectional", "model:mask_token"} <= (
        facts.features
    )
    assert facts.notes == ("llada is run as llama that attends in both directions, not by its own code",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_type": "sequential"}, "read with block_type 'llama' only, not 'sequential'"),
        ({"include_qkv_bias": True}, "read with include_qkv_bias False only, not True"),
        ({"rope": False}, "read with rope True only, not False"),
        ({"attention_layer_norm": True}, "read with attention_layer_norm False only"),
        ({"d_model": None}, "model_type 'llada' and has no d_model"),
        ({"rms_norm_eps": None}, "model_type 'llada' and has no rms_norm_eps"),
    ],
)
def test_other_variants_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model = write_llada(tmp_path / "m")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(UserError, match=message):
        resolve_source(ModelSource(source=str(model)), Path())


def test_the_shipped_shape_is_as_large_as_the_checkpoint() -> None:
    """LLaDA-8B-Instruct: its index says 16,031,162,368 bytes of bfloat16."""
    facts = read_model_facts(resolve_source(ModelSource(source="shape:llada-8b", weights="dummy"), Path()))
    assert (facts.weight_bytes, facts.mask_token_id) == (16_031_162_368, 126_336)


def test_any_family_may_fill_in_masks(tmp_path: Path) -> None:
    """A known shape as a masked-diffusion model: what such a model of that size would cost."""
    path = tmp_path / "x.yaml"
    path.write_text(
        "model: {source: 'shape:llama-3.2-1b', weights: dummy, config: {is_causal: false, mask_token_id: 7}}\n"
        f"device: cpu\nparts: {{{PARTS}}}\nworkload: {{use: synthetic, input_tokens: 8, output_tokens: 8}}\n"
    )
    (plan,) = compose(load_experiment(path), CATALOGUE)
    assert plan.reasons == ()
    assert plan.facts is not None
    assert plan.facts.mask_token_id == 7


def test_a_window_in_both_directions_is_refused(tmp_path: Path) -> None:
    config = {
        "model_type": "mistral", "vocab_size": 96, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
        "sliding_window": 16, "is_causal": False, "mask_token_id": 3, "head_dim": 16,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = f"{{source: {tmp_path / 'config.json'}, weights: dummy}}"
    path = tmp_path / "x.yaml"
    path.write_text(
        f"model: {model}\ndevice: cpu\nparts: {{{PARTS}}}\nworkload: {{use: synthetic, input_tokens: 8}}\n"
    )
    (plan,) = compose(load_experiment(path), CATALOGUE)
    assert any("its sliding window reaches in both directions" in reason for reason in plan.reasons)
