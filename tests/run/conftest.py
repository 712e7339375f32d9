"""A tiny model and a way to run sweeps over the fake engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import save_file

PLUGIN = str(Path(__file__).with_name("fake_plugin.py"))

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}


def write_weights(folder: Path) -> None:
    """Random weights for `CONFIG`."""
    draw = np.random.default_rng(0)
    hidden, ffn, kv = 16, 32, 8
    shapes = {"model.embed_tokens.weight": (64, hidden), "model.norm.weight": (hidden,)}
    for layer in range(2):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        shapes |= {f"{at}.self_attn.{name}_proj.weight": (kv, hidden) for name in "kv"}
        shapes |= {f"{at}.mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (hidden, ffn)
    tensors = {name: draw.normal(0, 0.3, shape).astype("float32") for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def real_model(tmp_path: Path) -> dict[str, Any]:
    """A model with stored weights and without a tokenizer, as a value for `model`."""
    folder = tmp_path / "real"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_weights(folder)
    return {"source": "real"}


@pytest.fixture
def plugin() -> str:
    return PLUGIN


@pytest.fixture
def experiment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes an experiment over the fake engine; keyword arguments replace top-level keys."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))

    def write(**keys: Any) -> Path:
        document = {
            "name": "fakes",
            "model": {"source": "model", "weights": "dummy"},
            "engine": {"use": "fake"},
            "workload": {"use": "fake"},
            "measure": {"repeats": 2, "max_warmup": 1, "time_limit_s": 60},
            "limits": {"num_threads": 1},
            **keys,
        }
        path = tmp_path / "experiment.yaml"
        path.write_text(yaml.safe_dump(document))
        return path

    return write
