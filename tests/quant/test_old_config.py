"""The form of `config.json` that transformers 4 understands, written by hand."""

from __future__ import annotations

import pytest
from infermix.errors import Unsupported
from infermix.toolkit.old_config import transformers4_config


def test_plain_rotary_parameters() -> None:
    new = {"model_type": "llama", "dtype": "bfloat16", "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}
    assert transformers4_config(new) == {
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "rope_theta": 1e5,
        "rope_scaling": None,
    }


def test_scaled_and_partial_rotary_parameters() -> None:
    rope = {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0, "partial_rotary_factor": 0.5}
    assert transformers4_config({"rope_parameters": rope}) == {
        "rope_theta": 5e5,
        "partial_rotary_factor": 0.5,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
    }


def test_an_old_config_stays() -> None:
    old = {"rope_theta": 1e4, "rope_scaling": None, "torch_dtype": "float32"}
    assert transformers4_config(old) == old


def test_parameters_per_kind_of_layer_are_refused() -> None:
    with pytest.raises(Unsupported, match="differ between layers"):
        transformers4_config({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}})
