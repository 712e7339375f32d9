"""Tiny random models on disk and a way to build a native engine over them: fixtures for several test folders."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.cost.machine import machine_facts
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.plugins import Catalogue, load_catalogue
from infermix.roles.component import PART_ROLES, Choice, Role
from infermix.roles.engine import EngineContext
from infermix.spec.experiment import DEFAULT_PARTS, ModelSource

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def catalogue() -> Catalogue:
    return load_catalogue()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, 4 heads over 2 KV heads of 16, vocabulary 96, 256 positions, sharp logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=5, bos_token_id=1,
        initializer_range=0.2, tie_word_embeddings=False,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("tiny_llama")
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


@pytest.fixture
def build_engine(catalogue: Catalogue, tiny_llama: Path) -> Callable[..., Any]:
    """`build_engine(parts={"kv": ("paged", {"block_size": 4})}, engine={...}, device="cpu", **context)`."""
    built = []

    def choose(role: Role, name: str, options: dict[str, Any]) -> Choice:
        registered = catalogue.find(role, name)
        return Choice(registered, registered.component.options(**options))

    def build(parts: dict[str, Any] | None = None, engine: dict[str, Any] | None = None, **given: Any) -> Any:
        wanted = {**{role: (name, {}) for role, name in DEFAULT_PARTS.items()}, **(parts or {})}
        choices = {}
        for role in PART_ROLES:
            entry = wanted[role.value]
            name, options = (entry, {}) if isinstance(entry, str) else entry
            choices[role] = choose(role, name, options)
        source = resolve_source(ModelSource(source=str(given.pop("model", tiny_llama))), Path("."))
        context = EngineContext(
            source=source,
            facts=read_model_facts(source, dtype="float32", dummy=False),
            machine=machine_facts(given.pop("device", "cpu")),
            dtype="float32",
            parts=choices,
            max_model_len=given.pop("max_model_len", 128),
            max_num_seqs=given.pop("max_num_seqs", 8),
            seed=0,
            clock_ns=time.perf_counter_ns,
            find=catalogue.find,
            **given,
        )
        native = choose(Role.ENGINE, "native", engine or {})
        built.append(native.component.build(native.options, context))
        return built[-1]

    yield build
    for engine in built:
        engine.close()
