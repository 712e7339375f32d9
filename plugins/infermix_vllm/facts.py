"""What vLLM chose and what it takes, read from its resolved configuration and its layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import nn


def executed_facts(engine: Any, version: str) -> dict[str, Any]:
    """For `EngineReport.executed["engine"]`: plain data."""
    config = engine.vllm_config
    cache, scheduler, compilation = config.cache_config, config.scheduler_config, config.compilation_config
    (model_class, _) = _of_model(engine)
    return {
        "vllm": version,
        "class": model_class,
        "model_runner": "v2" if config.use_v2_model_runner else "v1",
        "attention": attention_backends(_layers(engine)),
        "compilation": _name(compilation.mode),
        "cudagraph_mode": _name(compilation.cudagraph_mode),
        "kv_cache_dtype": str(cache.cache_dtype),
        "block_size": cache.block_size,
        "num_blocks": cache.num_gpu_blocks,
        "capacity_tokens": cache.kv_cache_size_tokens,
        "prefix_caching": bool(cache.enable_prefix_caching),
        "quantization": config.model_config.quantization,
        "max_num_seqs": scheduler.max_num_seqs,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "chunked_prefill": bool(scheduler.enable_chunked_prefill),
        "async_scheduling": bool(scheduler.async_scheduling),
    }


def graph_facts(engine: Any) -> dict[str, Any]:
    """For `EngineReport.graphs`: the kind of graphs and the batch sizes (tokens) that they exist for."""
    compilation = engine.vllm_config.compilation_config
    mode = _name(compilation.cudagraph_mode)
    sizes = [] if mode in (None, "NONE") else list(compilation.cudagraph_capture_sizes or ())
    return {"mode": mode, "sizes": sizes}


def attention_backends(layers: Iterable[Any]) -> list[str]:
    """Names of the backends that the layers hold, with the version of FlashAttention: `FLASH_ATTN 3`."""
    found = set()
    for layer in layers:
        backend = getattr(layer, "attn_backend", None)
        if backend is not None:
            version = getattr(getattr(layer, "impl", None), "vllm_flash_attn_version", None)
            found.add(f"{backend.get_name()} {version}" if version else str(backend.get_name()))
    return sorted(found)


def weight_bytes(engine: Any) -> int:
    return _of_model(engine)[1]


def kv_bytes(engine: Any) -> int:
    """Bytes of the KV pool: layers may share one storage, which counts once."""
    storages = {}
    for layer in _layers(engine):
        held = getattr(layer, "kv_cache", ())
        for tensor in (held,) if isinstance(held, torch.Tensor) else tuple(held or ()):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def kv_bytes_per_token(engine: Any) -> float | None:
    """`None` where vLLM does not say how many tokens its pool holds."""
    tokens = engine.vllm_config.cache_config.kv_cache_size_tokens
    return kv_bytes(engine) / tokens if tokens else None


def compile_seconds(engine: Any) -> float:
    return float(engine.vllm_config.compilation_config.compilation_time)


def num_preemptions(engine: Any) -> float:
    """Since the start of the process; needs vLLM's statistics."""
    metrics = [metric for metric in engine.get_metrics() if metric.name == "vllm:num_preemptions"]
    return float(sum(metric.value for metric in metrics))


def _layers(engine: Any) -> list[Any]:
    return list(engine.vllm_config.compilation_config.static_forward_context.values())


def _of_model(engine: Any) -> tuple[str, int]:
    (found,) = engine.apply_model(_class_and_bytes)
    return found  # type: ignore[no-any-return]


def _class_and_bytes(model: nn.Module) -> tuple[str, int]:
    return type(model).__name__, sum(parameter.nbytes for parameter in model.parameters())


def _name(value: Any) -> str | None:
    """An enum's name, also where vLLM keeps a plain number."""
    return None if value is None else str(getattr(value, "name", value))
