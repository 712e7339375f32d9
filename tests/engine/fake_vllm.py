"""A stand-in for the part of vLLM 0.26 that the plugin uses; a test installs it as the package `vllm`.

Names, keywords, defaults, refusals and their wording, the two batches in flight of asynchronous scheduling, the three
output kinds, and internal request ids are vLLM's; the model is a table. Unknown keywords are refused, as vLLM does.
"""

from __future__ import annotations

import json
import uuid
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

__version__ = "0.26.0"
SUPPORTED = ("LlamaForCausalLM",)
LAYERS = 2


def next_logits(tokens: list[int], vocab_size: int) -> torch.Tensor:
    """The model: depends on the last token and on the length."""
    generator = torch.Generator().manual_seed(1000 * tokens[-1] + len(tokens))
    return torch.rand(vocab_size, generator=generator) * 8


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class UsageContext(StrEnum):
    ENGINE_CONTEXT = "ENGINE_CONTEXT"
    LLM_CLASS = "LLM_CLASS"


class Executor:
    @staticmethod
    def get_class(vllm_config: Any) -> type[Executor]:
        return Executor


class VLLMValidationError(ValueError):
    pass


@dataclass(kw_only=True)
class SamplingParams:
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    prompt_logprobs: int | None = None
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 2.0:
            raise VLLMValidationError(f"temperature must be in [0, 2], got {self.temperature}.")
        if not 0.0 < self.top_p <= 1.0:
            raise VLLMValidationError(f"top_p must be in (0, 1], got {self.top_p}.")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise VLLMValidationError(f"max_tokens must be at least 1, got {self.max_tokens}.")
        if self.min_tokens > (self.max_tokens or 0):
            raise ValueError(f"min_tokens must be less than or equal to max_tokens={self.max_tokens}.")
        assert isinstance(self.stop_token_ids or [], list)
        if self.stop and not self.detokenize:
            raise ValueError("stop strings are only supported when detokenize is True.")


@dataclass(kw_only=True)
class EngineArgs:
    model: str = "Qwen/Qwen3-0.6B"
    hf_config_path: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    load_format: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    disable_log_stats: bool = False
    quantization: str | None = None
    enforce_eager: bool = False
    attention_backend: str | None = None
    use_tqdm_on_load: bool = True
    async_scheduling: bool | None = None
    generation_config: str = "auto"

    def create_engine_config(self, usage_context: UsageContext | None = None, headless: bool = False) -> Any:
        config = json.loads((Path(self.hf_config_path or self.model) / "config.json").read_text())
        if config["architectures"][0] not in SUPPORTED:
            raise ValueError(f"Model architectures {config['architectures']} are not supported for now.")
        positions = config["max_position_embeddings"]
        if self.max_model_len and self.max_model_len > positions:
            raise ValueError(f"User-specified max_model_len ({self.max_model_len}) is greater than the derived one.")
        graphs = SimpleNamespace(name="NONE" if self.enforce_eager else "FULL_AND_PIECEWISE")
        longest = self.max_model_len or positions
        return SimpleNamespace(
            args=self,
            hf=config,
            use_v2_model_runner=True,
            model_config=SimpleNamespace(quantization=self.quantization, max_model_len=longest),
            cache_config=SimpleNamespace(
                cache_dtype=self.kv_cache_dtype,
                block_size=self.block_size or 16,
                enable_prefix_caching=self.enable_prefix_caching is not False,
                num_gpu_blocks=None,
                kv_cache_size_tokens=None,
            ),
            scheduler_config=SimpleNamespace(
                max_num_seqs=self.max_num_seqs or 1024,
                max_num_batched_tokens=self.max_num_batched_tokens or 16384,
                enable_chunked_prefill=True,
                async_scheduling=self.async_scheduling is not False,
            ),
            compilation_config=SimpleNamespace(
                mode=SimpleNamespace(name="VLLM_COMPILE"),
                cudagraph_mode=graphs,
                cudagraph_capture_sizes=[1, 2, 4, 8],
                compilation_time=1.5,
                static_forward_context={},
            ),
        )


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(eq=False)
class Running:
    name: str
    external: str
    prompt: list[int]
    params: SamplingParams
    computed: int = 0
    launched: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    num_cached: int = 0


class FakeForCausalLM(torch.nn.Linear):
    pass


class LLMEngine:
    #: Raised by the next call of `step`.
    fault: ClassVar[BaseException | None] = None

    def __init__(
        self,
        vllm_config: Any,
        executor_class: type[Executor],
        log_stats: bool,
        usage_context: UsageContext = UsageContext.ENGINE_CONTEXT,
        multiprocess_mode: bool = False,
    ) -> None:
        assert executor_class is Executor
        self.vllm_config, self.log_stats = vllm_config, log_stats
        self.params: dict[str, SamplingParams] = {}
        self.closed = False
        self.engine_core = SimpleNamespace(shutdown=self._shutdown)
        self.model = FakeForCausalLM(4, 8, bias=False, dtype=torch.bfloat16)
        self._requests: dict[str, Running] = {}
        self._queue: deque[list[tuple[Running, int]]] = deque()
        self._depth = 2 if vllm_config.scheduler_config.async_scheduling else 1
        self._seen: list[list[int]] = []
        self._allocate()

    def _shutdown(self) -> None:
        self.closed = True

    def _allocate(self) -> None:
        args, hf, cache = self.vllm_config.args, self.vllm_config.hf, self.vllm_config.cache_config
        per_token = 2 * LAYERS * hf["num_key_value_heads"] * hf["head_dim"] * 2
        available = args.kv_cache_memory_bytes or int(args.gpu_memory_utilization * 2**21) - 2**16
        if available <= 0:
            raise ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.")
        longest = self.vllm_config.model_config.max_model_len
        if available < per_token * longest:
            raise ValueError(
                f"To serve at least one request with the model's max seq len ({longest}), (1 GiB KV cache is needed, "
                "which is larger than the available KV cache memory (0 GiB)."
            )
        cache.num_gpu_blocks = available // (per_token * cache.block_size)
        cache.kv_cache_size_tokens = cache.num_gpu_blocks * cache.block_size
        backend = SimpleNamespace(get_name=lambda: args.attention_backend or "FLASH_ATTN")
        for layer in range(LAYERS):
            pool = torch.zeros(cache.kv_cache_size_tokens * per_token // LAYERS, dtype=torch.uint8)
            self.vllm_config.compilation_config.static_forward_context[f"layers.{layer}.attn"] = SimpleNamespace(
                attn_backend=backend, impl=SimpleNamespace(vllm_flash_attn_version=3), kv_cache=pool
            )

    def add_request(self, request_id: str, prompt: Any, params: SamplingParams) -> str:
        if not isinstance(request_id, str):
            raise TypeError(f"request_id must be a string, got {type(request_id)}")
        tokens = prompt["prompt_token_ids"]
        longest = self.vllm_config.model_config.max_model_len
        if not tokens:
            raise ValueError("The decoder prompt cannot be empty")
        if len(tokens) >= longest:
            raise ValueError(f"The decoder prompt (length {len(tokens)}) is longer than the maximum of {longest}.")
        assert isinstance(tokens, list)
        assert prompt["type"] == "token"
        name = f"{request_id}-{uuid.uuid4().hex[:8]}"
        running = Running(name, request_id, tokens, params)
        if self.vllm_config.cache_config.enable_prefix_caching and params.prompt_logprobs is None:
            running.num_cached = running.computed = self._cached(tokens)
        self._requests[name] = running
        self.params[request_id] = params
        return name

    def _cached(self, tokens: list[int]) -> int:
        block = self.vllm_config.cache_config.block_size
        shared = max((self._common(tokens, other) for other in self._seen), default=0)
        self._seen.append(tokens)
        return min(shared, len(tokens) - 1) // block * block

    @staticmethod
    def _common(a: list[int], b: list[int]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    def abort_request(self, request_ids: list[str], internal: bool = False) -> None:
        for name, running in list(self._requests.items()):
            if (name if internal else running.external) in request_ids:
                del self._requests[name]

    def has_unfinished_requests(self) -> bool:
        return bool(self._requests)

    def reset_prefix_cache(self) -> bool:
        self._seen.clear()
        return not self._requests

    def apply_model(self, func: Any) -> list[Any]:
        return [func(self.model)]

    def get_metrics(self) -> list[Any]:
        assert self.log_stats, "Stat logging disabled"
        return [
            SimpleNamespace(name="vllm:num_preemptions", value=3),
            SimpleNamespace(name="vllm:generation_tokens", value=7),
        ]

    def step(self) -> list[Any]:
        if LLMEngine.fault is not None:
            raise LLMEngine.fault
        batch = self._schedule()
        if batch is not None:
            self._queue.append(batch)
            if len(self._queue) < self._depth:
                return []
        return self._collect(self._queue.popleft()) if self._queue else []

    def _schedule(self) -> list[tuple[Running, int]] | None:
        """One batch; `None` when nothing can run. A request whose prompt is not through emits nothing."""
        budget = self.vllm_config.scheduler_config.max_num_batched_tokens
        batch, ran = [], False
        for running in list(self._requests.values())[: self.vllm_config.scheduler_config.max_num_seqs]:
            if len(running.launched) >= (running.params.max_tokens or 0) or budget <= 0:
                continue
            known = running.prompt + running.launched
            new = min(budget, len(known) - running.computed)
            running.computed += new
            budget -= new
            ran = True
            if running.computed == len(known):
                token = self._sample(known, running)
                running.launched.append(token)
                batch.append((running, token))
        return batch if ran else None

    def _sample(self, known: list[int], running: Running) -> int:
        params = running.params
        logits = next_logits(known, self.vllm_config.hf["vocab_size"])
        if len(running.launched) < params.min_tokens:
            # vLLM takes the end-of-text tokens of the config too, ignored or not.
            logits[[*(params.stop_token_ids or ()), self.vllm_config.hf["eos_token_id"]]] = float("-inf")
        return int(logits.argmax())

    def _collect(self, batch: list[tuple[Running, int]]) -> list[Any]:
        outputs = []
        for running, token in batch:
            if running.name in self._requests:  # others were aborted or have ended meanwhile
                running.output.append(token)
                reason = self._reason(running, token)
                if reason:
                    del self._requests[running.name]
                outputs += self._outputs(running, token, reason)
        return outputs

    def _reason(self, running: Running, token: int) -> str | None:
        params = running.params
        if len(running.output) < params.min_tokens:
            return None
        ends = {*(params.stop_token_ids or ())}
        if not params.ignore_eos:
            ends.add(self.vllm_config.hf["eos_token_id"])
        if token in ends:
            return "stop"
        total = len(running.prompt) + len(running.output)
        full = total >= self.vllm_config.model_config.max_model_len
        return "length" if full or len(running.output) >= (params.max_tokens or 0) else None

    def _outputs(self, running: Running, token: int, reason: str | None) -> list[Any]:
        kind = running.params.output_kind
        if kind is RequestOutputKind.FINAL_ONLY and reason is None:
            return []
        tokens = [token] if kind is RequestOutputKind.DELTA else list(running.output)
        completion = SimpleNamespace(index=0, text="", token_ids=tokens, finish_reason=reason, stop_reason=None)
        return [
            SimpleNamespace(
                request_id=running.external,
                outputs=[completion],
                finished=reason is not None,
                num_cached_tokens=running.num_cached,
                prompt_logprobs=self._prompt_logprobs(running),
            )
        ]

    def _prompt_logprobs(self, running: Running) -> list[Any] | None:
        if running.params.prompt_logprobs is None:
            return None
        found: list[Any] = [None]
        for position in range(1, len(running.prompt)):
            row = next_logits(running.prompt[:position], self.vllm_config.hf["vocab_size"]).log_softmax(-1)
            token, best = running.prompt[position], int(row.argmax())
            rank = int((row > row[token]).sum()) + 1
            found.append({token: Logprob(float(row[token]), rank), best: Logprob(float(row[best]), 1)})
        return found
