"""Masked-diffusion language models: published configs, in the terms of the transformers family they are made of.

They are published with code of their own, which is not run: a body that transformers has, with attention in both
directions, and other names for values and weights. The translated config says `is_causal: false`, which transformers
reads in every family; `published_as` remembers whose names the weights have.

- LLaDA (Nie et al., 2025, "Large Language Diffusion Models", arXiv 2502.09992) is a Llama.
- Dream (Ye et al., 2025, "Dream 7B", arXiv 2508.15487) is a Qwen2. It was made from a causal model and still predicts
  the token behind the one that it reads: `shifted_predictions`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from infermix.errors import UserError


@dataclass(frozen=True)
class _Published:
    """`family` is transformers' `model_type`; `keys` maps its names of values to the published ones.

    `only` are values of which one is read, `stated` keys that must be there, since the published class has other
    defaults than the family. `weights` maps patterns of published tensor names to transformers' names, `shifted` says
    that a row predicts the token behind its own.
    """

    family: str
    architecture: str
    keys: Mapping[str, str]
    only: Mapping[str, Any]
    stated: tuple[str, ...] = ()
    weights: Mapping[str, str] = field(default_factory=dict)
    shifted: bool = False


_SAME = ("rms_norm_eps", "rope_theta", "mask_token_id", "eos_token_id", "bos_token_id", "pad_token_id")
_DTYPES = ("torch_dtype", "dtype")
_QWEN2 = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "vocab_size", "max_position_embeddings", "hidden_act", "tie_word_embeddings", "rope_scaling", "rope_parameters",
)  # fmt: skip
_BLOCK = r"^model\.transformer\.blocks\.(\d+)\."

PUBLISHED: Mapping[str, _Published] = {
    "llada": _Published(
        family="llama",
        architecture="LlamaForCausalLM",
        keys={
            "hidden_size": "d_model",
            "num_hidden_layers": "n_layers",
            "num_attention_heads": "n_heads",
            "num_key_value_heads": "n_kv_heads",
            "intermediate_size": "mlp_hidden_size",
            "max_position_embeddings": "max_sequence_length",
            "vocab_size": "embedding_size",
            "tie_word_embeddings": "weight_tying",
            **{name: name for name in (*_SAME, *_DTYPES)},
        },
        only={
            "block_type": "llama",
            "activation_type": "silu",
            "layer_norm_type": "rms",
            "layer_norm_with_affine": True,
            "attention_layer_norm": False,
            "block_group_size": 1,
            "rope": True,
            "alibi": False,
            "include_bias": False,
            "include_qkv_bias": False,
            "bias_for_layer_norm": False,
            "input_emb_norm": False,
            "scale_logits": False,
            "multi_query_attention": False,
        },
        stated=(
            "block_type",
            "activation_type",
            "layer_norm_type",
            "rope",
            "include_bias",
            "weight_tying",
            "rms_norm_eps",
        ),
        weights={
            # transformers fills in one group of a pattern, not two.
            _BLOCK + r"q_proj\.": r"model.layers.\1.self_attn.q_proj.",
            _BLOCK + r"k_proj\.": r"model.layers.\1.self_attn.k_proj.",
            _BLOCK + r"v_proj\.": r"model.layers.\1.self_attn.v_proj.",
            _BLOCK + r"attn_out\.": r"model.layers.\1.self_attn.o_proj.",
            _BLOCK + r"ff_proj\.": r"model.layers.\1.mlp.gate_proj.",
            _BLOCK + r"up_proj\.": r"model.layers.\1.mlp.up_proj.",
            _BLOCK + r"ff_out\.": r"model.layers.\1.mlp.down_proj.",
            _BLOCK + r"attn_norm\.": r"model.layers.\1.input_layernorm.",
            _BLOCK + r"ff_norm\.": r"model.layers.\1.post_attention_layernorm.",
            r"^model\.transformer\.wte\.": "model.embed_tokens.",
            r"^model\.transformer\.ln_f\.": "model.norm.",
            r"^model\.transformer\.ff_out\.": "lm_head.",
        },
    ),
    "Dream": _Published(
        family="qwen2",
        architecture="Qwen2ForCausalLM",
        keys={name: name for name in (*_QWEN2, *_SAME, *_DTYPES)},
        only={"use_mrope": False, "use_sliding_window": False, "block_size": None},
        shifted=True,
    ),
}
#: What every config must say.
_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")


def in_known_terms(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The config as the family's own; any other one comes back as it is.

    Raises `UserError` for one that lacks a value, or asks for what its family does not have.
    """
    name = str(config.get("model_type"))
    published = PUBLISHED.get(name)
    if published is None:
        return config
    values = {ours: config[theirs] for ours, theirs in published.keys.items() if config.get(theirs) is not None}
    # Rows of the embedding, where they are said to be more than the vocabulary.
    values.setdefault("vocab_size", config.get("vocab_size"))
    missing = [published.keys[key] for key in _SIZES if values.get(key) is None]
    missing += [key for key in published.stated if config.get(key) is None]
    if missing:
        raise UserError(f"the config says model_type {name!r} and has no {missing[0]}", where=where)
    _refuse_variants(config, published, where)
    translated = {
        **values,
        "model_type": published.family,
        "architectures": [published.architecture],
        "is_causal": False,
        "published_as": name,
    }
    return {**translated, "shifted_predictions": True} if published.shifted else translated


def weight_names(config: Mapping[str, Any]) -> dict[str, str]:
    """Patterns of the tensor names in the files -> transformers' names, of a translated config; empty otherwise."""
    published = PUBLISHED.get(str(config.get("published_as")))
    return dict(published.weights) if published else {}


def _refuse_variants(config: Mapping[str, Any], published: _Published, where: str) -> None:
    for key, value in published.only.items():
        given = config.get(key, value)
        if given != value and (given or value):  # null stands for false
            raise UserError(
                f"models of type {config['model_type']} are read with {key} {value!r} only, not {given!r}",
                where=where,
            )
