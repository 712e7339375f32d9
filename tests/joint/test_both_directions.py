"""Families whose config says `is_causal: false`: every token sees every other, packed as in a full forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from infermix.engine.bridge import Joint
from infermix.engine.loader import _ready
from infermix.engine.self_check import self_check
from infermix.errors import Unsupported
from infermix_reference.attention_sdpa import SdpaAttention
from infermix_reference.kv_none import RecomputeLayout

SIZES = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.2, "is_causal": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "olmo2": {},
    "phi": {},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "mixtral": {"num_local_experts": 4, "sliding_window": None},
}


def model_of(family: str, **changes: Any) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**SIZES, **FAMILIES[family], **changes})
    return _ready(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_as_in_a_full_forward(family: str) -> None:
    model = model_of(family)
    with torch.inference_mode():
        joint = Joint(model)
        joint.detach()
        texts = ([3, 4, 5, 6], [3, 4, 5, 9])
        first = [joint.reference(torch.tensor(text), 4)[0] for text in texts]
        given = {"device": torch.device("cpu"), "dtype": torch.float32}
        figures = self_check(model, joint, SdpaAttention(), RecomputeLayout(), **given)
    assert (first[0] - first[1]).abs().max() > 1e-3, "the first token does not see the last one"
    assert not any(layer.causal for layer in joint.layers.values())
    assert figures["relative_error"] <= figures["tolerance"] == 1e-4


def test_without_it_the_same_model_is_causal() -> None:
    joint = Joint(model_of("llama", is_causal=True))
    assert joint.causal
    assert all(layer.causal for layer in joint.layers.values())


def test_a_window_in_both_directions_is_refused() -> None:
    with pytest.raises(Unsupported, match="its sliding window reaches in both directions"):
        Joint(model_of("mixtral", sliding_window=8))
