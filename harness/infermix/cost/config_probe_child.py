"""Runs in a child process: lets transformers resolve a config and lists the weights of the model it stands for.

Reads `{"config": {...}, "directory": str | null, "trust_remote_code": bool}` from standard input and writes one JSON
object. The model is built on torch's meta device, so that no weight is allocated.
"""

from __future__ import annotations

import json
import sys
from typing import Any

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
    """`config` (resolved), `tensors` [[name, shape], ...] (tied ones once), `attention` (one entry per module)."""
    import torch
    from transformers import AutoModelForCausalLM

    config = _config(request)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=request["trust_remote_code"])
    text = config.get_text_config()
    resolved = dict(text.to_dict())
    for name in COMMON:
        value = getattr(text, name, None)
        if value is not None:
            resolved[name] = value
    tensors = [[name, list(parameter.shape)] for name, parameter in model.named_parameters()]
    return {
        "config": json.loads(json.dumps(resolved, default=str)),
        "architecture": type(model).__name__,
        "tensors": tensors,
        "attention": [_attention(module) for module in model.modules() if _is_attention(module)],
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


def _attention(module: Any) -> dict[str, Any]:
    window = getattr(module, "sliding_window", None)
    if getattr(module, "is_sliding", True) is False:
        window = None
    own = dict(module.named_parameters())
    keys = own.get("k_proj.weight", own.get("key.weight"))
    return {
        "layer_idx": module.layer_idx,
        "window": window if isinstance(window, int) and window > 0 else None,
        "head_dim": _number(module, "head_dim"),
        "key_rows": int(keys.shape[0]) if keys is not None else None,
        "groups": _number(module, "num_key_value_groups"),
        "sinks": any("sink" in name for name in own),
        "softcap": bool(getattr(module, "attn_logit_softcapping", None)),
    }


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
