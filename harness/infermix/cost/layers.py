"""What each decoder layer asks of attention and KV: windows, head shapes, experts; from a complete config."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from infermix.cost.architectures import experts_per_token, has_experts, num_experts
from infermix.roles.facts import LayerFacts, LayerKind, StateTensor

Config = Mapping[str, Any]
WindowRule = Callable[[Config, int], bool]

RECURRENT_TYPES = frozenset({"linear_attention", "conv", "mamba", "mamba2", "recurrent", "gated_delta_net"})


def _every(config: Config, layer: int) -> bool:
    return True


def _if_enabled(config: Config, layer: int) -> bool:
    return bool(config.get("use_sliding_window"))


def _upper_layers(config: Config, layer: int) -> bool:
    return _if_enabled(config, layer) and layer >= config.get("max_window_layers", 28)


def _alternate_lower_layers(config: Config, layer: int) -> bool:
    below = layer < config.get("max_window_layers", 28)
    return _if_enabled(config, layer) and below and (layer + 1) % 2 != 0


def _without_rope(config: Config, layer: int) -> bool:
    rope = config.get("no_rope_layers")
    has_rope = rope[layer] if rope else (layer + 1) % config.get("no_rope_layer_interval", 4) != 0
    return _if_enabled(config, layer) and not has_rope


def _all_but_each(default: int) -> WindowRule:
    def rule(config: Config, layer: int) -> bool:
        period = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or default
        return (layer + 1) % period != 0

    return rule


#: Families whose class ignores `layer_types`.
_UNIFORM: Mapping[str, WindowRule] = {
    "mistral": _every,
    "mixtral": _every,
    "phi3": _every,
    "starcoder2": _every,
    "qwen3_moe": _if_enabled,
}
#: Which layers get the window when the config has no `layer_types`.
_BY_LAYER: Mapping[str, WindowRule] = {
    "qwen2": _upper_layers,
    "qwen3": _upper_layers,
    "qwen2_moe": _alternate_lower_layers,
    "smollm3": _without_rope,
    "gemma2": _all_but_each(2),
    "gpt_oss": _all_but_each(2),
    "olmo3": _all_but_each(4),
    "gemma3_text": _all_but_each(6),
}


def layer_window(config: Config, layer: int) -> int | None:
    """Tokens that the layer may look back on, its own included; `None` for all of them."""
    window, family = config.get("sliding_window"), config["model_type"]
    if not window:
        return None
    if family in _UNIFORM:
        return int(window) if _UNIFORM[family](config, layer) else None
    if config.get("layer_types"):
        # Qwen2's family blanks the window unless it is switched on, whatever the layer types say
        switched = family not in ("qwen2", "qwen3", "qwen2_moe", "smollm3") or config.get("use_sliding_window")
        return int(window) if switched and config["layer_types"][layer] == "sliding_attention" else None
    rule = _BY_LAYER.get(family)
    return int(window) if rule is not None and rule(config, layer) else None


def head_shape(config: Config) -> tuple[int, int, int]:
    """(KV heads, key width, value width) of one layer's cache; MLA is counted expanded, one KV head per head."""
    if config.get("kv_lora_rank"):
        keys = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
        return config["num_attention_heads"], keys, config["v_head_dim"]
    return config["num_key_value_heads"], config["head_dim"], config["head_dim"]


def layers_of(config: Config) -> tuple[LayerFacts, ...]:
    """Layers of a family that `architectures` knows."""
    kv_heads, keys, values = head_shape(config)
    return tuple(
        LayerFacts(
            kind="attention",
            num_heads=config["num_attention_heads"],
            num_kv_heads=kv_heads,
            key_dim=keys,
            value_dim=values,
            window=layer_window(config, layer),
            **_latent(config),
            **_routing(config, layer),
        )
        for layer in range(config["num_hidden_layers"])
    )


def probed_layers(
    config: Config,
    modules: tuple[Mapping[str, Any], ...],
    states: Mapping[int, tuple[StateTensor, ...]] | None = None,
) -> tuple[LayerFacts, ...]:
    """Layers of any other family, from what transformers hands to its attention layers and what the others carry."""
    by_layer = {module["layer_idx"]: module for module in modules}
    layers = (
        _probed_layer(config, layer, by_layer.get(layer)) for layer in range(config.get("num_hidden_layers") or 0)
    )
    return tuple(replace(layer, states=(states or {}).get(index, ())) for index, layer in enumerate(layers))


def _probed_layer(config: Config, layer: int, module: Mapping[str, Any] | None) -> LayerFacts:
    if module is None:
        return LayerFacts(_kind_without_attention(config, layer), 0, 0, 0, 0, **_routing(config, layer))
    shape = {
        name: module[name] for name in ("num_heads", "num_kv_heads", "key_dim", "value_dim", "window", "kv_from")
    }
    return LayerFacts(kind="attention", **shape, **_latent(config), **_routing(config, layer))


def _latent(config: Config) -> dict[str, Any]:
    """Widths of the compressed row and of the rotary key, where the attention layers are MLA."""
    if not config.get("kv_lora_rank") or not config.get("qk_rope_head_dim"):
        return {}
    return {"latent_dim": int(config["kv_lora_rank"]), "rope_dim": int(config["qk_rope_head_dim"])}


def _kind_without_attention(config: Config, layer: int) -> LayerKind:
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if kinds and layer < len(kinds):
        return "recurrent" if kinds[layer] in RECURRENT_TYPES else "other"
    return "recurrent"


def _routing(config: Config, layer: int) -> dict[str, Any]:
    if not has_experts(config, layer):
        return {}
    return {"num_experts": num_experts(config), "num_experts_per_token": experts_per_token(config)}
