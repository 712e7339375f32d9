"""Tiny random models of any transformers family: a few layers, a window shorter than the sequences, fp32."""

from __future__ import annotations

from typing import Any

import torch

VOCAB = 128
WINDOW = 8

#: Sizes that any family may have under one of these names; a family takes those that its default config knows.
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "sliding_window": WINDOW,
    "use_sliding_window": True,
    "max_window_layers": 2,
    "attention_dropout": 0.0,
    # other names of the same things
    "n_embd": 64,
    "n_layer": 4,
    "n_head": 4,
    "n_positions": 128,
    "n_ctx": 128,
    "n_inner": 96,
    "dff": 96,
    "ffn_dim": 96,
    "rotary_dim": 8,
    "word_embed_proj_dim": 64,
    "embedding_size": 64,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "top_k_experts": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "prefix_dense_intermediate_size": 96,
    "expert_ffn_hidden_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    # latent attention
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    # odds and ends
    "query_pre_attn_scalar": 20,
    "mlp_hidden_size": 96,
    "kv_channels": 16,
    "v_dim": 16,
    "dim_model_base": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

#: Families with recurrent layers: small states, chunks shorter than the sequences, attention in every second layer.
_ALTERNATING = ["linear_attention", "full_attention"] * 2
_MAMBA_HEADS = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 4}
_DELTA_NET = {
    "layer_types": _ALTERNATING,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
}
_RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"state_size": 8, "num_heads": 8, "n_groups": 2, "chunk_size": 4},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 0,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "bamba": {"attn_layer_indices": [1, 3], **_MAMBA_HEADS},
    "granitemoehybrid": {"layer_types": _ALTERNATING, **_MAMBA_HEADS},
    "falcon_h1": {"mamba_d_ssm": 128, **_MAMBA_HEADS},
    "nemotron_h": {
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 4,
        "sliding_window": None,
        "moe_shared_expert_intermediate_size": 32,
        "use_mamba_kernels": False,
    },
    "qwen3_next": _DELTA_NET,
    "qwen3_5_text": _DELTA_NET,
    "qwen3_5_moe_text": _DELTA_NET,
    "olmo_hybrid": {**_DELTA_NET, "linear_num_key_heads": 4},
    "kimi_linear": {"layer_types": _ALTERNATING, "linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 32},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "rwkv": {"rescale_every": 2, "context_length": 128},
}

#: What single families need beyond that.
_SPECIAL: dict[str, dict[str, Any]] = {
    # by default only one layer in six is a full one
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    # the last two layers read the keys and values of the two before them
    **{
        family: {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 16,
        }
        for family in ("gemma3n_text", "gemma4_text")
    },
    "gemma2": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "phi4_multimodal": {
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2},
    },
    # their windows are applied in the mask alone and refused: see test_refusals
    "phimoe": {"sliding_window": None},
    "qwen2_moe": {"use_sliding_window": False},
    **_RECURRENT,
}


def tiny_config(model_type: str, **overrides: Any) -> Any:
    """A small config of the family, made by its own config class."""
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    known = kind().to_dict().keys() | set(getattr(kind, "attribute_map", {}))
    small = {key: value for key, value in _SMALL.items() if key in known}
    if model_type == "gemma3n_text":  # these two are lists over the layers by default
        small |= {"intermediate_size": [96] * 6, "activation_sparsity_pattern": [0.0] * 6, "laurel_rank": 8}
    if "kv_lora_rank" in known:  # latent attention: every head has keys of its own, made of the parts named above
        small.pop("head_dim", None)
        small["num_key_value_heads"] = small["num_attention_heads"]
    return kind(**{**small, **_SPECIAL.get(model_type, {}), **overrides})


def tiny_model(model_type: str, seed: int = 0, **overrides: Any) -> Any:
    """A random model in fp32, in eval mode, with transformers' eager attention."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = tiny_config(model_type, **overrides)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    randomise_small_parameters(model)
    return model.eval().requires_grad_(False)


def randomise_small_parameters(model: Any) -> None:
    """Biases, norms and sinks are born as zeros or ones, which hides mistakes."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
