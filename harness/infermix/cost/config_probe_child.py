"""Runs in a child process: lets transformers resolve a config and lists the weights of the model it stands for.

Reads `{"config": {...}, "directory": str | null, "trust_remote_code": bool}` from standard input and writes one JSON
object. The model is built on torch's meta device, so that no weight is allocated.
"""

from __future__ import annotations

import json
import sys
from typing import Any

_TRACE = "infermix_trace"
#: Config attributes that every family answers to through its attribute map.
COMMON = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "max_position_embeddings",
    "tie_word_embeddings",
    "layer_types",
    "sliding_window",
)


def probe(request: dict[str, Any]) -> dict[str, Any]:
    """What transformers makes of a config.

    `config` (resolved), `tensors` [[name, shape], ...] (tied ones once), `attention`: per layer what its attention
    function is handed, and `traced`, whether that was seen in a forward pass or only read off the modules. `states`:
    per recurrent layer [name, shape, dtype] of what it carries in a model of bfloat16, `null` if no forward ran.
    """
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM

    calls: list[dict[str, Any]] = []
    AttentionInterface.register(_TRACE, _recorder(calls))
    config = _config(request)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=_TRACE, trust_remote_code=request["trust_remote_code"]
        )
    traced = _trace(model, calls)
    text = config.get_text_config()
    resolved = dict(text.to_dict())
    for name in COMMON:
        value = getattr(text, name, None)
        if value is not None:
            resolved[name] = value
    attention = calls if traced else [_read_off(each, resolved) for each in model.modules() if _is_attention(each)]
    return {
        "config": json.loads(json.dumps(resolved, default=str)),
        "architecture": type(model).__name__,
        "tensors": [[name, list(parameter.shape)] for name, parameter in model.named_parameters()],
        "attention": attention,
        "traced": traced,
        "states": _carried(model.to(torch.bfloat16), resolved),
    }


def _recorder(calls: list[dict[str, Any]]) -> Any:
    handed: list[tuple[int | None, Any, Any]] = []

    def attention(module: Any, q: Any, k: Any, v: Any, attention_mask: Any = None, **keywords: Any) -> Any:
        if not calls:
            handed.clear()
        # held, so that no later tensor takes the place of an earlier one
        handed.append((getattr(module, "layer_idx", None), k, v))
        calls.append(
            {
                "layer_idx": getattr(module, "layer_idx", None),
                "num_heads": q.shape[1],
                "num_kv_heads": k.shape[1],
                "key_dim": k.shape[3],
                "value_dim": v.shape[3],
                "window": keywords.get("sliding_window") or None,
                "softcap": bool(keywords.get("softcap")),
                "sinks": keywords.get("s_aux") is not None,
                "kv_from": next((idx for idx, key, value in handed[:-1] if key is k and value is v), None),
            }
        )
        return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]), None

    return attention


def _trace(model: Any, calls: list[dict[str, Any]]) -> bool:
    """One forward on the meta device; routing by value, which meta tensors lack, becomes a batched product."""
    import torch

    ids = torch.zeros(1, 3, dtype=torch.long, device="meta")
    for experts in (None, "batched_mm"):
        calls.clear()
        try:
            if experts is not None:
                model.set_experts_implementation(experts)
            with torch.no_grad():
                model(input_ids=ids, position_ids=ids, use_cache=False)
        except Exception:  # any family may do what meta tensors cannot; the modules' attributes are read instead
            continue
        if calls:
            return True
    return False


def _carried(model: Any, config: dict[str, Any]) -> dict[str, Any] | None:
    """Shapes of recurrent states, from two tokens on the meta device; a model without any is not run."""
    import torch

    from infermix.cost.carried import carrier_of
    from infermix.roles.families import is_stateful

    carrier = carrier_of(model) if is_stateful(config) else None
    if carrier is None:
        return {}
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    arguments = carrier.arguments(None)
    try:
        with torch.no_grad():
            output = model(input_ids=ids, position_ids=ids, **arguments)
    except Exception:  # a family may do what meta tensors cannot
        return None
    found = carrier.collect(arguments, output)
    return {
        str(index): [
            [name, list(each.shape[1:]), str(each.dtype).removeprefix("torch.")] for name, each in kept.items()
        ]
        for index, kept in found.items()
    }


def _config(request: dict[str, Any]) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    content = dict(request["config"])
    model_type = content.pop("model_type", None)
    if request["trust_remote_code"] and "auto_map" in content:
        return AutoConfig.from_pretrained(request["directory"], trust_remote_code=True)
    if model_type not in CONFIG_MAPPING:
        raise ValueError(f"transformers knows no model_type {model_type!r}")
    return CONFIG_MAPPING[model_type].from_dict(content)


def _is_attention(module: Any) -> bool:
    named = type(module).__name__.lower()
    return "attention" in named and isinstance(getattr(module, "layer_idx", None), int)


def _read_off(module: Any, config: dict[str, Any]) -> dict[str, Any]:
    window = getattr(module, "sliding_window", None)
    if getattr(module, "is_sliding", True) is False:
        window = None
    heads = int(config.get("num_attention_heads") or 0)
    width = _number(module, "head_dim") or int(config.get("head_dim") or 0)
    own = dict(module.named_parameters())
    return {
        "layer_idx": module.layer_idx,
        "num_heads": heads,
        "num_kv_heads": _kv_heads(module, own, config, heads, width),
        "key_dim": width,
        "value_dim": width,
        "window": window if isinstance(window, int) and window > 0 else None,
        "softcap": bool(getattr(module, "attn_logit_softcapping", None)),
        "sinks": any("sink" in name for name in own),
        "kv_from": None,
    }


def _kv_heads(module: Any, own: dict[str, Any], config: dict[str, Any], heads: int, width: int) -> int:
    keys = own.get("k_proj.weight")
    if keys is not None and width and keys.shape[0] % width == 0:
        return int(keys.shape[0]) // width
    groups = _number(module, "num_key_value_groups")
    return heads // groups if groups else int(config.get("num_key_value_heads") or heads)


def _number(module: Any, name: str) -> int | None:
    value = getattr(module, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def main() -> int:
    try:
        answer = probe(json.load(sys.stdin))
    except Exception as error:  # whatever a foreign config class raises goes to the parent as a sentence
        answer = {"error": f"{type(error).__name__}: {error}"}
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
