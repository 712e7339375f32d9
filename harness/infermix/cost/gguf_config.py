"""A GGUF's metadata as the `config.json` values that they stand for."""

from __future__ import annotations

from typing import Any

from infermix.cost.gguf_header import GgufHeader
from infermix.errors import UserError

#: `general.architecture` -> transformers `model_type`.
MODEL_TYPES = {
    "llama": "llama",
    "mistral": "mistral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gemma": "gemma",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "starcoder2": "starcoder2",
    "gpt2": "gpt2",
    "gpt-oss": "gpt_oss",
    "olmo2": "olmo2",
    "smollm3": "smollm3",
}
_REQUIRED = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
}
_OPTIONAL = {
    "intermediate_size": "feed_forward_length",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
_TOKENS = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
#: Tables that a GGUF carries beside the model's own weights.
NOT_PARAMETERS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


def gguf_config(header: GgufHeader) -> dict[str, Any]:
    """Raises `UserError` when a value that every model needs is not there."""
    architecture = header.architecture
    config: dict[str, Any] = {"model_type": MODEL_TYPES.get(architecture, architecture)}
    for name, key in _REQUIRED.items():
        value = header.metadata.get(f"{architecture}.{key}")
        if value is None:
            raise UserError(f"the GGUF metadata has no {architecture}.{key}", where=str(header.path))
        config[name] = value
    for name, key in _OPTIONAL.items():
        value = header.metadata.get(f"{architecture}.{key}")
        if value is not None:
            config[name] = _single(value)
    for name, key in _TOKENS.items():
        if f"tokenizer.ggml.{key}" in header.metadata:
            config[name] = header.metadata[f"tokenizer.ggml.{key}"]
    return config | _from_tensors(header)


def _single(value: Any) -> Any:
    """Per-layer lists collapse when all layers agree."""
    return value[0] if isinstance(value, list) and len(set(value)) == 1 else value


def _from_tensors(header: GgufHeader) -> dict[str, Any]:
    shapes = {tensor.name: tensor.shape for tensor in header.tensors}
    if "token_embd.weight" not in shapes:
        raise UserError("the GGUF file has no tensor token_embd.weight", where=str(header.path))
    biased = "blk.0.attn_q.bias" in shapes
    return {
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": biased,
        "qkv_bias": biased,
        "use_bias": biased,
        "mlp_bias": "blk.0.ffn_down.bias" in shapes,
    }
