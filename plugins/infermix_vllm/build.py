"""From options and context to a running vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from infermix.cost.memory import OVERHEAD_BYTES
from infermix.engine.loader import load_tokenizer
from infermix.errors import OutOfMemory, Unsupported

from infermix_vllm.api import Api, load_api
from infermix_vllm.engine import VllmEngine
from infermix_vllm.facts import compile_seconds
from infermix_vllm.plugin import VllmOptions
from infermix_vllm.sources import ModelFiles, eos_token_ids, model_files

if TYPE_CHECKING:
    from infermix.roles.engine import EngineContext

#: How vLLM words that the device is too small; it raises `ValueError` for these.
MEMORY_WORDS = (
    "No available memory for the cache blocks",
    "larger than the available KV cache memory",
    "less than desired GPU memory utilization",
    "not enough GPU memory available",
)
#: Held free for activations and CUDA graphs where only the KV's bytes are given.
_RESERVE_BYTES = 4 << 30


def build_engine(options: VllmOptions, context: EngineContext) -> VllmEngine:
    """Start vLLM in this process.

    Raises `Unsupported` for a model or a setting that vLLM refuses, `OutOfMemory` when the device is too small for
    the weights or for the KV of one sequence.
    """
    setup_s: dict[str, float] = {}
    with _timed("prepare", setup_s, context):
        files = model_files(context.source, context.progress)
        tokenizer = None if context.source.kind == "dummy" else load_tokenizer(context.source)
    with _timed("import", setup_s, context):
        api = load_api()
    with _timed("configure", setup_s, context):
        config = _configure(api, engine_arguments(options, context, files))
    with _timed("start", setup_s, context):
        engine = _start(api, config, log_stats=options.log_stats)
    setup_s["compile"] = compile_seconds(engine)
    return VllmEngine(
        engine=engine,
        api=api,
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids(files, tokenizer),
        options=options,
        vocab_size=context.facts.vocab_size,
        max_model_len=context.max_model_len,
        clock_ns=context.clock_ns,
        setup_s=setup_s,
    )


def engine_arguments(options: VllmOptions, context: EngineContext, files: ModelFiles) -> dict[str, Any]:
    """Keywords of `vllm.EngineArgs`. One position more than the cell needs, because scoring samples one token."""
    arguments: dict[str, Any] = {
        "model": str(files.directory),
        "hf_config_path": str(files.config_directory) if files.config_directory else None,
        "load_format": files.load_format,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "trust_remote_code": context.source.trust_remote_code,
        "dtype": context.dtype,
        "seed": context.seed,
        "max_model_len": min(context.max_model_len + 1, context.facts.max_position_embeddings),
        "max_num_seqs": options.max_num_seqs or context.max_num_seqs,
        "kv_cache_dtype": options.kv_cache_dtype,
        "enable_prefix_caching": options.prefix_caching,
        "enforce_eager": options.enforce_eager,
        "disable_log_stats": not options.log_stats,
        "use_tqdm_on_load": False,
        **_memory(context),
    }
    chosen = {
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "attention_backend": options.attention_backend,
        "block_size": options.block_size,
        "quantization": options.quantization,
        "async_scheduling": options.async_scheduling,
    }
    return {**arguments, **{name: value for name, value in chosen.items() if value is not None}}


def _memory(context: EngineContext) -> dict[str, Any]:
    """`gpu_memory_utilization` is the share of the device that vLLM takes in all, as `limits.kv_memory_fraction`.

    With `kv_cache_memory_bytes` vLLM only compares the share with what is free at the start, so it is what the cell
    is going to need: another cell may be alive.
    """
    if context.kv_memory_bytes is None:
        return {"gpu_memory_utilization": context.kv_memory_fraction}
    needed = context.facts.weight_bytes + context.kv_memory_bytes + OVERHEAD_BYTES["cuda"] + _RESERVE_BYTES
    share = min(context.kv_memory_fraction, needed / context.machine.memory_bytes)
    return {"kv_cache_memory_bytes": context.kv_memory_bytes, "gpu_memory_utilization": round(share, 4)}


def _configure(api: Api, arguments: dict[str, Any]) -> Any:
    try:
        return api.engine_args(**arguments).create_engine_config(api.usage_context.LLM_CLASS)
    except (ValueError, NotImplementedError) as error:
        raise Unsupported(f"vLLM {api.version} refuses this: {_one_line(error)}") from error


def _start(api: Api, config: Any, *, log_stats: bool) -> Any:
    """The engine core lives in this process, so that memory, faults and facts are this cell's."""
    try:
        return api.engine(
            vllm_config=config,
            executor_class=api.executor.get_class(config),
            log_stats=log_stats,
            usage_context=api.usage_context.LLM_CLASS,
            multiprocess_mode=False,
        )
    except ValueError as error:
        if any(words in str(error) for words in MEMORY_WORDS):
            raise OutOfMemory(f"vLLM {api.version}: {_one_line(error)}") from error
        raise


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


@contextmanager
def _timed(phase: str, seconds: dict[str, float], context: EngineContext) -> Iterator[None]:
    context.progress(f"vllm {phase}", 0.0)
    begin = context.clock_ns()
    yield
    seconds[phase] = (context.clock_ns() - begin) / 1e9
