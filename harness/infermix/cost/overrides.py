"""`model.config`: single config values that an experiment replaces."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from infermix.errors import UserError
from infermix.spec.experiment import ModelSource

#: Keys that decide the shape of some weight; replacing one under real weights cannot work.
SHAPE_KEYS = frozenset(
    [
        "attention_bias",
        "decoder_sparse_step",
        "first_k_dense_replace",
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "kv_lora_rank",
        "mlp_bias",
        "mlp_only_layers",
        "model_type",
        "moe_intermediate_size",
        "n_embd",
        "n_head",
        "n_inner",
        "n_layer",
        "n_positions",
        "n_routed_experts",
        "n_shared_experts",
        "num_attention_heads",
        "num_experts",
        "num_hidden_layers",
        "num_key_value_heads",
        "num_local_experts",
        "q_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "qkv_bias",
        "shared_expert_intermediate_size",
        "tie_word_embeddings",
        "use_bias",
        "v_head_dim",
        "vocab_size",
    ]
)
#: Other keys that may be set although a `config.json` leaves them out.
OTHER_KEYS = frozenset(
    [
        "attn_logit_softcapping",
        "bos_token_id",
        "eos_token_id",
        "final_logit_softcapping",
        "hidden_act",
        "is_causal",
        "layer_types",
        "mask_token_id",
        "max_position_embeddings",
        "max_window_layers",
        "n_group",
        "norm_topk_prob",
        "num_experts_per_tok",
        "num_experts_per_token",
        "original_max_position_embeddings",
        "pad_token_id",
        "partial_rotary_factor",
        "query_pre_attn_scalar",
        "rms_norm_eps",
        "rope_parameters",
        "rope_scaling",
        "rope_theta",
        "routed_scaling_factor",
        "sliding_window",
        "sliding_window_pattern",
        "topk_group",
        "topk_method",
        "use_sliding_window",
    ]
)

#: Older spellings, which transformers does not read where `rope_parameters` is there.
_OUTRANKED = frozenset({"rope_theta", "rope_scaling"})


def apply_overrides(config: Mapping[str, Any], model: ModelSource, *, real: bool) -> dict[str, Any]:
    """The config with `model.config` on top.

    Raises `UserError` for a key that neither this config nor the list above has (a typo would do nothing), for a
    size that is none, and, for real weights, for one that changes a weight's shape.
    """
    known = set(config) | SHAPE_KEYS | OTHER_KEYS
    for key, value in model.config.items():
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            raise UserError(
                f"{key!r} is no value of this model's config",
                key=f"model.config.{key}",
                hint=f"did you mean {close[0]!r}?" if close else None,
            )
        if real and key in SHAPE_KEYS and config.get(key) != value:
            raise UserError(
                f"{key!r} changes the shape of weights, which are real here",
                key=f"model.config.{key}",
                hint="it can be set with `weights: dummy`",
            )
        if key in _OUTRANKED and config.get("rope_parameters") and "rope_parameters" not in model.config:
            raise UserError(
                f"{key!r} has no effect beside the config's rope_parameters",
                key=f"model.config.{key}",
                hint=f"set rope_parameters, here {dict(config['rope_parameters'])}",
            )
        before = config.get(key)
        if key in SHAPE_KEYS and type(before) is int and value is not None and not _is_size(value):
            raise UserError(f"expected a whole number as {before}, got {value!r}", key=f"model.config.{key}")
    return {**config, **model.config}


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0
