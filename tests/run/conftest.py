"""A tiny model and a way to run sweeps over the fake engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

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
