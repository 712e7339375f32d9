"""Silent traps are refused: by name and config before anything loads, by the probe once a model is there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from infermix.engine.bridge import Joint
from infermix.engine.probe import AttentionCall, LayerProbe
from infermix.errors import Unsupported
from infermix.roles.families import DRIVEN, REFUSED, check_family, family_note
from tiny_models import tiny_model

TRAPS = """
bloom mpt falcon xglm openai-gpt llama4 diffllama dory hrm_text zamba zamba2 stablelm nemotron deepseek_v32 doge
deepseek_v4 mamba mamba2 falcon_mamba jamba qwen3_next qwen3_5_text lfm2 granitemoehybrid nemotron_h olmo_hybrid
kimi_linear
"""


@pytest.mark.parametrize("model_type", TRAPS.split())
def test_known_traps_are_refused_with_a_reason(model_type: str) -> None:
    reason = check_family(model_type, {})
    assert reason is not None
    assert reason.startswith(f"{model_type}: ")


def test_no_family_is_both_driven_and_refused() -> None:
    assert not DRIVEN & REFUSED.keys()


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("llama", {}),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}),
        ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}),
        ("phimoe", {"sliding_window": 131072, "max_position_embeddings": 131072}),
        ("qwen2_moe", {"sliding_window": 4096, "use_sliding_window": False, "max_position_embeddings": 8192}),
        (
            "phi3",
            {
                "rope_scaling": {"type": "longrope"},
                "max_position_embeddings": 4096,
                "original_max_position_embeddings": 4096,
            },
        ),
        ("somebodys_llama", {"num_hidden_layers": 2}),
    ],
)
def test_allowed(model_type: str, config: dict[str, Any]) -> None:
    assert check_family(model_type, config) is None


@pytest.mark.parametrize(
    ("model_type", "config", "word"),
    [
        ("llama", {"layer_types": ["chunked_attention", "full_attention"]}, "chunked_attention"),
        ("qwen3", {"layer_types": ["linear_attention", "full_attention"]}, "recurrent"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "both directions"),
        ("phi3", {"rope_scaling": {"type": "longrope"}, "max_position_embeddings": 131072}, "longrope"),
        ("llama", {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}}, "dynamic"),
        ("phimoe", {"sliding_window": 2048, "max_position_embeddings": 131072}, "mask"),
        ("somebodys_llama", {"sliding_window": 512}, "sliding_window"),
        ("gemma3", {"text_config": {"model_type": "gemma3_text"}}, "text model"),
    ],
)
def test_refused_by_config(model_type: str, config: dict[str, Any], word: str) -> None:
    assert word in str(check_family(model_type, config))


def test_unknown_families_are_left_to_the_self_check() -> None:
    assert "self-check" in str(family_note("somebodys_llama"))
    assert family_note("llama") is None


#: Families whose refusal by name is lifted here, so that the probe alone has to notice.
PROBED = {
    "bloom": "0 of 4 layers",
    "falcon": "0 of 4 layers",
    "diffllama": "twice",
    "stablelm": "keyword",
    "nemotron": "keyword",
    "doge": "mask",
}


@pytest.mark.parametrize("model_type", PROBED)
def test_the_probe_notices(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infermix.engine.bridge.check_family", lambda model_type, config: None)
    model = tiny_model(model_type)
    before = model.config._attn_implementation
    with pytest.raises(Unsupported, match=PROBED[model_type]):
        Joint(model)
    assert model.config._attn_implementation == before


def test_the_probe_notices_windows_that_stay_in_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infermix.engine.bridge.check_family", lambda model_type, config: None)
    with pytest.raises(Unsupported, match="in its mask alone"):
        Joint(tiny_model("phimoe", sliding_window=8))


def test_groups_of_the_cost_model_must_match() -> None:
    model = tiny_model("llama")
    groups = Joint(model).groups
    assert Joint(model, groups).groups == groups
    with pytest.raises(Unsupported, match="KV groups"):
        Joint(model, (replace(groups[0], window=4),))


def call(**changes: Any) -> AttentionCall:
    import torch

    module = torch.nn.Module()
    module.layer_idx = changes.pop("layer_idx", 0)
    tensors = {name: torch.zeros(1, 2, changes.pop(f"{name}_len", 3), 4) for name in ("query", "key", "value")}
    return AttentionCall(module, **tensors, mask=changes.pop("mask", None), given=changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_idx": None}, "no layer index"),
        ({"layer_idx": -1}, "no layer index"),
        ({"mask": object()}, "mask"),
        ({"key_len": 5}, "5 keys for 3"),
        ({"position_bias": 1.0}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": 0}, "is_causal"),
    ],
)
def test_calls_that_the_batch_cannot_express(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        LayerProbe().see(call(**changes))


def test_a_layer_may_not_change_its_mind() -> None:
    first, second = LayerProbe(), LayerProbe()
    first.see(call(scaling=0.5))
    second.see(call(scaling=0.25))
    with pytest.raises(Unsupported, match="now hands over"):
        second.require_same(first.specs)
