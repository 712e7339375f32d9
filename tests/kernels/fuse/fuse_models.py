"""Tiny random decoders of several families, and what the transforms of this folder need to run on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from infermix.engine.bridge import Joint
from infermix.engine.walk import packed_logits, random_sequences
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.transform import TransformContext
from infermix.toolkit.conformance.component import example_model
from torch import Tensor, nn

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
#: Families whose layers are fused as a whole: name -> (model type, settings).
FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, scaled rope, tied, biased": (
        "llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mistral": ("mistral", {"sliding_window": 8, "head_dim": 16}),
    "smollm3, every fourth layer without rotary": ("smollm3", {"num_hidden_layers": 4, "pad_token_id": 0}),
    "gemma": ("gemma", {"head_dim": 16}),
    "phi3, merged already": ("phi3", {"pad_token_id": 0}),
}  # fmt: skip


def tiny(model_type: str, settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    """Norms and biases are not at their neutral initial values."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    kind: Any = CONFIG_MAPPING[model_type]
    torch.manual_seed(0)
    config = kind(**{**SIZES, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.data.add_(torch.randn(parameter.shape) * 0.1)
    return model.to(dtype).eval()


def transform_context(device: str = "cpu", dtype: str = "float32") -> TransformContext:
    facts = replace(example_model(), dtype=dtype, max_position_embeddings=256)
    return TransformContext(device=device, dtype=dtype, seed=0, facts=facts, max_num_seqs=8, max_model_len=256)


def part(role: Role, name: str, **options: Any) -> Any:
    component = load_catalogue().find(role, name).component
    return component.build(component.options(**options), None)


def logits_in_full(model: nn.Module, lengths: tuple[int, ...]) -> list[Tensor]:
    """transformers' own, each sequence alone."""
    with torch.no_grad():
        return [
            model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
            for ids in random_sequences(lengths, 96, 0)
        ]


def logits_packed(model: nn.Module, lengths: tuple[int, ...], attention: str, kv: str) -> list[Tensor]:
    """Through the joint, walked in chunks and single tokens."""
    with torch.no_grad():
        return packed_logits(
            Joint(model),
            part(Role.ATTENTION, attention),
            part(Role.KV, kv, **({"block_size": 4} if kv == "paged" else {})),
            random_sequences(lengths, 96, 0),
            device=torch.device("cpu"),
            dtype=torch.float32,
            kept_rows=max(lengths),
        )


def worst_error(seen: list[Tensor], expected: list[Tensor]) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(seen, expected, strict=True))
