"""From a resolved source to what vLLM reads: a directory, a config, and the tokens that end a text."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infermix import paths
from infermix.cost.source import CONFIG, fetch_weights, read_config
from infermix.engine.hf_cache import converted_gguf
from infermix.engine.tokenizer import as_ids
from infermix.roles.engine import Tokenizer
from infermix.roles.facts import ResolvedSource

GENERATION_CONFIG = "generation_config.json"


@dataclass(frozen=True)
class ModelFiles:
    """`directory` holds the weights (for dummy ones: a config alone); `config_directory` the config, if elsewhere."""

    directory: Path
    load_format: str
    config_directory: Path | None = None


def model_files(source: ResolvedSource, progress: Callable[[str, float], None]) -> ModelFiles:
    """Make `source` readable by vLLM. A GGUF becomes safetensors in the user's cache, as for the native engine.

    The config is written to the cache where the experiment overrides it or where there is nothing else (a shape).
    """
    if source.kind == "gguf":
        assert source.file is not None
        return ModelFiles(converted_gguf(source.file, progress), "auto")
    if source.kind == "dummy":
        return ModelFiles(_dummy_directory(source), "dummy")
    source = fetch_weights(source)
    if not source.config or dict(source.config) == read_config(source.directory / CONFIG):
        return ModelFiles(source.directory, "auto")
    return ModelFiles(source.directory, "auto", _written(source.config))


def _dummy_directory(source: ResolvedSource) -> Path:
    """The source's own directory where its config is used as it is: one with code of its own needs those files."""
    path = source.directory / CONFIG
    as_it_is = path.is_file() and dict(source.config) == read_config(path)
    return source.directory if as_it_is else _written(source.config)


def _written(config: Mapping[str, Any]) -> Path:
    """A directory of the cache with this `config.json`, named after its content."""
    text = json.dumps(dict(config), indent=2, sort_keys=True)
    directory = paths.cache_dir("vllm", hashlib.sha256(text.encode()).hexdigest()[:24])
    with tempfile.NamedTemporaryFile("w", dir=directory, delete=False) as stream:
        stream.write(text)
    os.replace(stream.name, directory / CONFIG)
    return directory


def eos_token_ids(files: ModelFiles, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Every token that ends a text, as the native engine has them: generation config, config, then tokenizer."""
    generation = files.directory / GENERATION_CONFIG
    found = (
        _eos(generation) if generation.is_file() else (),
        _eos((files.config_directory or files.directory) / CONFIG),
        tokenizer.eos_token_ids if tokenizer else (),
    )
    return tuple(dict.fromkeys(token for ids in found for token in ids))


def _eos(path: Path) -> tuple[int, ...]:
    config = read_config(path)
    text = config.get("text_config")
    nested = text.get("eos_token_id") if isinstance(text, Mapping) else None
    return as_ids(config.get("eos_token_id", nested))
