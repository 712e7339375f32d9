"""`config.json` in the form that transformers 4 understands.

Version 5 writes rotary parameters under one key that version 4 ignores without a word: it then computes with the base
of its class defaults, and the model gives plausible, wrong numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infermix.errors import Unsupported


def transformers4_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same model in the old form. Raises `Unsupported` for what that form cannot say."""
    old = {key: value for key, value in config.items() if key not in ("rope_parameters", "dtype")}
    if "dtype" in config:
        old["torch_dtype"] = config["dtype"]
    rope = config.get("rope_parameters")
    if not rope:
        return old
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise Unsupported("rotary parameters that differ between layers have no form in transformers 4")
    rest = dict(rope)
    for key in ("rope_theta", "partial_rotary_factor"):
        if key in rest:
            old[key] = rest.pop(key)
    old["rope_scaling"] = None if rest.get("rope_type", "default") == "default" else rest
    return old
