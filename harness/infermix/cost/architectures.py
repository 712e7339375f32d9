"""Weights of the families whose shape follows from `config.json` alone, in transformers' naming.

The tensors are those of transformers' modules (experts stacked, projections fused where the module fuses them), so
that their count is the count of `model.named_parameters()`; a test compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from infermix.cost.tensors import TensorInfo

Config = Mapping[str, Any]

#: Without these nothing can be said about any of the families.
BASE_KEYS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How a family differs from Llama. Bias fields name a config key, or fix the answer.

    `needs`: keys whose class default is not the one of `optional` below, so that a config without them has to be
    resolved by the class itself (`a|b`: either name will do).
    """

    needs: tuple[str, ...] = ()
    qkv_bias: str | bool = "attention_bias"
    o_bias: str | bool = "attention_bias"
    mlp_bias: str | bool = False
    fused: bool = False
    gated: bool = True
    norms_per_layer: int = 2
    norm_bias: bool = False
    qk_norm: str = ""
    latent: bool = False
    experts: str = ""
    positions: bool = False
    tied: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(mlp_bias="mlp_bias"),
    "mistral": Architecture(needs=("num_key_value_heads", "sliding_window"), qkv_bias=False, o_bias=False),
    "qwen2": Architecture(needs=("num_key_value_heads",), qkv_bias=True, o_bias=False),
    "qwen3": Architecture(needs=("num_key_value_heads", "head_dim"), qk_norm="head"),
    "gemma": Architecture(needs=("num_key_value_heads", "head_dim"), tied=True),
    "gemma2": Architecture(
        needs=("num_key_value_heads", "head_dim", "sliding_window", "attn_logit_softcapping"),
        norms_per_layer=4,
        tied=True,
    ),
    "gemma3_text": Architecture(
        needs=("num_key_value_heads", "head_dim", "sliding_window"), norms_per_layer=4, qk_norm="head", tied=True
    ),
    "phi3": Architecture(qkv_bias=False, o_bias=False, fused=True),
    "olmo2": Architecture(qk_norm="all"),
    "olmo3": Architecture(needs=("sliding_window",), qk_norm="all"),
    "smollm3": Architecture(needs=("num_key_value_heads",), mlp_bias="mlp_bias", tied=True),
    "starcoder2": Architecture(
        needs=("num_key_value_heads", "use_bias"),
        qkv_bias="use_bias",
        o_bias="use_bias",
        mlp_bias="use_bias",
        gated=False,
        norm_bias=True,
        tied=True,
    ),
    "gpt2": Architecture(
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        fused=True,
        gated=False,
        norm_bias=True,
        positions=True,
        tied=True,
    ),
    "mixtral": Architecture(
        needs=("num_key_value_heads", "num_local_experts", "num_experts_per_tok"),
        qkv_bias=False,
        o_bias=False,
        experts="plain",
    ),
    "qwen2_moe": Architecture(
        needs=(
            "num_key_value_heads",
            "num_experts|num_local_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "shared_expert_intermediate_size",
        ),
        qkv_bias="qkv_bias",
        o_bias=False,
        experts="shared",
    ),
    "qwen3_moe": Architecture(
        needs=(
            "num_key_value_heads",
            "num_experts|num_local_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
        ),
        qk_norm="head",
        experts="plain",
    ),
    "gpt_oss": Architecture(
        needs=("num_key_value_heads", "head_dim", "num_local_experts", "num_experts_per_tok", "sliding_window"),
        experts="biased",
    ),
    "deepseek_v3": Architecture(
        needs=(
            "kv_lora_rank",
            "qk_rope_head_dim",
            "qk_nope_head_dim",
            "v_head_dim",
            "q_lora_rank",
            "n_routed_experts",
            "n_shared_experts",
            "num_experts_per_tok",
            "moe_intermediate_size",
            "first_k_dense_replace",
        ),
        latent=True,
        experts="deepseek",
    ),
}
ARCHITECTURES = {**ARCHITECTURES, "deepseek_v2": ARCHITECTURES["deepseek_v3"]}

_OPTIONAL: Mapping[str, bool] = {"qkv_bias": True, "use_bias": True}
#: GPT-2's names of the common keys.
_ALIASES = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
}


def normalised(config: Config) -> dict[str, Any]:
    """The config with common key names; `head_dim` and `num_key_value_heads` filled where the heads fix them."""
    full = dict(config)
    for name, alias in _ALIASES.items():
        if full.get(name) is None and full.get(alias) is not None:
            full[name] = full[alias]
    heads, hidden = full.get("num_attention_heads"), full.get("hidden_size")
    if full.get("model_type") == "gpt2" and hidden and full.get("intermediate_size") is None:
        full["intermediate_size"] = 4 * hidden
    if full.get("num_key_value_heads") is None:
        full["num_key_value_heads"] = heads
    if full.get("head_dim") is None and heads and isinstance(heads, int) and isinstance(hidden, int):
        full["head_dim"] = hidden // heads
    return full


def missing_keys(config: Config) -> list[str]:
    """Keys that `config.json` leaves to the class although its default cannot be known here."""
    architecture = ARCHITECTURES[config["model_type"]]
    full = normalised(config)
    return [key for key in BASE_KEYS if full.get(key) is None] + [
        key for key in architecture.needs if not any(name in config for name in key.split("|"))
    ]


def is_tied(config: Config) -> bool:
    """Whether the output layer shares the embedding."""
    default = ARCHITECTURES[config["model_type"]].tied
    value = config.get("tie_word_embeddings")
    return default if value is None else bool(value)


def num_experts(config: Config) -> int:
    for key in ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        if config.get(key):
            return int(config[key])
    return 0


def experts_per_token(config: Config) -> int:
    for key in ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk"):
        if config.get(key):
            return int(config[key])
    return 0


def has_experts(config: Config, layer: int) -> bool:
    """Whether the MLP of this layer is a mixture of experts."""
    if not num_experts(config) or layer < (config.get("first_k_dense_replace") or 0):
        return False
    if layer in (config.get("mlp_only_layers") or ()):
        return False
    return (layer + 1) % (config.get("decoder_sparse_step") or 1) == 0


def model_tensors(config: Config) -> Iterator[TensorInfo]:
    """Every parameter of the model, tied ones once. `config` is `normalised` and complete."""
    architecture = ARCHITECTURES[config["model_type"]]
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield TensorInfo("embed_tokens.weight", (vocab, hidden))
    if architecture.positions:
        yield TensorInfo("wpe.weight", (config["max_position_embeddings"], hidden))
    for layer in range(config["num_hidden_layers"]):
        yield from _layer(config, architecture, layer)
    yield TensorInfo("norm", (hidden * (2 if architecture.norm_bias else 1),))
    if not is_tied(config):
        yield TensorInfo("lm_head.weight", (vocab, hidden))


def _layer(config: Config, architecture: Architecture, layer: int) -> Iterator[TensorInfo]:
    attention: Callable[[Config, Architecture], Iterator[TensorInfo]]
    attention = _latent_attention if architecture.latent else _attention
    yield from attention(config, architecture)
    if has_experts(config, layer):
        yield from _experts(config, architecture)
    else:
        yield from _mlp(config, architecture)
    size = architecture.norms_per_layer * config["hidden_size"]
    yield TensorInfo("norms", (size * (2 if architecture.norm_bias else 1),))


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[TensorInfo]:
    yield TensorInfo(f"{name}.weight", (rows, columns))
    if bias:
        yield TensorInfo(f"{name}.bias", (rows,))


def _flag(config: Config, rule: str | bool) -> bool:
    if isinstance(rule, bool):
        return rule
    value = config.get(rule)
    return _OPTIONAL.get(rule, config["model_type"] == "gpt_oss") if value is None else bool(value)


def _attention(config: Config, architecture: Architecture) -> Iterator[TensorInfo]:
    hidden, width = config["hidden_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    bias = _flag(config, architecture.qkv_bias)
    if architecture.fused:
        yield from _linear("self_attn.qkv_proj", queries + 2 * keys, hidden, bias)
    else:
        yield from _linear("self_attn.q_proj", queries, hidden, bias)
        yield from _linear("self_attn.k_proj", keys, hidden, bias)
        yield from _linear("self_attn.v_proj", keys, hidden, bias)
    yield from _linear("self_attn.o_proj", hidden, queries, _flag(config, architecture.o_bias))
    if architecture.qk_norm:
        yield TensorInfo("qk_norm", (2 * width if architecture.qk_norm == "head" else queries + keys,))
    if architecture.experts == "biased":
        yield TensorInfo("sinks", (config["num_attention_heads"],))


def _latent_attention(config: Config, architecture: Architecture) -> Iterator[TensorInfo]:
    """DeepSeek's MLA: keys and values through one latent per token, queries through another if `q_lora_rank`."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    latent, rope, nope = config["kv_lora_rank"], config["qk_rope_head_dim"], config["qk_nope_head_dim"]
    queries, value, rank = heads * (nope + rope), config["v_head_dim"], config["q_lora_rank"]
    bias = bool(config.get("attention_bias"))
    if rank:
        yield from _linear("self_attn.q_a_proj", rank, hidden, bias)
        yield TensorInfo("q_a_layernorm", (rank,))
        yield from _linear("self_attn.q_b_proj", queries, rank, False)
    else:
        yield from _linear("self_attn.q_proj", queries, hidden, False)
    yield from _linear("self_attn.kv_a_proj_with_mqa", latent + rope, hidden, bias)
    yield TensorInfo("kv_a_layernorm", (latent,))
    yield from _linear("self_attn.kv_b_proj", heads * (nope + value), latent, False)
    yield from _linear("self_attn.o_proj", hidden, heads * value, bias)


def _mlp(config: Config, architecture: Architecture) -> Iterator[TensorInfo]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    bias = _flag(config, architecture.mlp_bias)
    if architecture.gated and architecture.fused:
        yield from _linear("mlp.gate_up_proj", 2 * inner, hidden, bias)
    elif architecture.gated:
        yield from _linear("mlp.gate_proj", inner, hidden, bias)
        yield from _linear("mlp.up_proj", inner, hidden, bias)
    else:
        yield from _linear("mlp.c_fc", inner, hidden, bias)
    yield from _linear("mlp.down_proj", hidden, inner, bias)


def _experts(config: Config, architecture: Architecture) -> Iterator[TensorInfo]:
    hidden, count, biased = config["hidden_size"], num_experts(config), architecture.experts == "biased"
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    yield from _linear("mlp.gate", count, hidden, biased)
    yield TensorInfo("mlp.experts.gate_up_proj", (count, 2 * inner, hidden))
    yield TensorInfo("mlp.experts.down_proj", (count, hidden, inner))
    if biased:
        yield TensorInfo("experts.biases", (count * (2 * inner + hidden),))
    shared = _shared_width(config, architecture, inner)
    if shared:
        yield from _linear("mlp.shared_experts.gate_proj", shared, hidden, False)
        yield from _linear("mlp.shared_experts.up_proj", shared, hidden, False)
        yield from _linear("mlp.shared_experts.down_proj", hidden, shared, False)
    if architecture.experts == "shared":
        yield TensorInfo("shared_expert_gate", (hidden,))


def _shared_width(config: Config, architecture: Architecture, inner: int) -> int:
    if architecture.experts == "deepseek":
        return inner * (config.get("n_shared_experts") or 0)
    return int(config["shared_expert_intermediate_size"]) if architecture.experts == "shared" else 0
