"""The engine: `model.generate()` on static, left-padded batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from infermix.engine.loader import load_model, load_tokenizer
from infermix.engine.quantize import quantize
from infermix.errors import UserError
from infermix.roles.component import Role
from infermix.roles.engine import EngineContext, EngineReport, Score, ScoreRequest, Tokenizer
from infermix.roles.quantizer import QuantizationReport
from infermix.roles.request import Request, SamplingParams, TokenEvent
from transformers import DynamicCache, GenerationConfig, StaticCache, StoppingCriteria, StoppingCriteriaList

from infermix_transformers.plugin import TransformersOptions
from infermix_transformers.rows import Row, left_pad, take_batch
from infermix_transformers.scoring import score_decode, score_prefill

if TYPE_CHECKING:
    from torch import Tensor, nn


def build_engine(options: TransformersOptions, context: EngineContext) -> TransformersEngine:
    """Load the model, let the quantizer convert it, and wrap it."""
    begin = context.clock_ns()
    choice = context.parts.get(Role.QUANTIZER)
    quantizer = choice.component.build(choice.options, None) if choice else None
    loaded = load_model(
        context.source,
        context.facts,
        dtype=context.dtype,
        device=context.machine.device,
        load_arguments=quantizer.load_arguments() if quantizer else {},
        seed=context.seed,
        progress=context.progress,
        packed=getattr(quantizer, "reads_packed", False),
    )
    setup_s = {"load": (context.clock_ns() - begin) / 1e9}
    tokenizer = load_tokenizer(context.source)
    quantization = None
    if quantizer:
        begin = context.clock_ns()
        assert choice is not None
        quantization = quantize(loaded, quantizer, choice.options, context, tokenizer)
        setup_s["quantize"] = (context.clock_ns() - begin) / 1e9
    return TransformersEngine(
        model=loaded.model,
        eos_token_ids=loaded.eos_token_ids,
        tokenizer=tokenizer,
        options=options,
        device=context.machine.device,
        max_positions=context.facts.max_position_embeddings,
        clock_ns=context.clock_ns,
        setup_s=setup_s,
        quantization=quantization,
    )


class _RowWatcher(StoppingCriteria):
    """Reads every step's tokens on the host, stamps them, and tells which rows are done."""

    def __init__(self, rows: list[Row], tokenizer: Tokenizer | None, clock_ns: Callable[[], int]) -> None:
        self.rows, self.tokenizer, self.clock_ns = rows, tokenizer, clock_ns
        self.events: list[TokenEvent] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        tokens = input_ids[:, -1].tolist()
        now = self.clock_ns()
        for row, token in zip(self.rows, tokens, strict=True):
            if row.finish_reason is None:
                row.accept(token, self.tokenizer)
                self.events.append(TokenEvent(row.request.request_id, (token,), now, row.finish_reason))
        done = [row.finish_reason is not None for row in self.rows]
        return torch.tensor(done, device=input_ids.device)


@dataclass(slots=True)
class _Seen:
    """What ran, read from the results of `generate()`."""

    cache_class: str = ""
    kv_bytes: int = 0
    generate_calls: int = 0
    prompt_tokens: int = 0
    padding_tokens: int = 0


class TransformersEngine:
    """`Engine` over one transformers model.

    `step` runs one whole `generate()` call and returns all its events; each carries the stamp of the moment at which
    its token was read on the host. A sampled batch draws from one generator, seeded by its first request.
    """

    def __init__(
        self,
        *,
        model: Any,
        eos_token_ids: tuple[int, ...],
        tokenizer: Tokenizer | None,
        options: TransformersOptions,
        device: str,
        max_positions: int,
        clock_ns: Callable[[], int],
        setup_s: dict[str, float] | None = None,
        quantization: QuantizationReport | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._model = model
        self._eos_token_ids, self._options, self._device = eos_token_ids, options, device
        self._max_positions, self._clock_ns = max_positions, clock_ns
        self._setup_s, self._quantization = setup_s or {}, quantization
        self._waiting: list[Request] = []
        self._seen = _Seen()
        self._model.set_attn_implementation(options.attn_implementation)
        # generate() fills whatever a call leaves open from here: a checkpoint's sampling defaults must not leak in.
        self._model.generation_config = GenerationConfig()

    def submit(self, request: Request) -> None:
        where = f"request {request.request_id}"
        if not request.prompt_ids:
            raise UserError("the prompt is empty", where=where, hint="at least one token is needed")
        if request.sampling.stop and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer", where=where, hint="use stop_token_ids instead")
        total = len(request.prompt_ids) + request.sampling.max_new_tokens
        if total > self._max_positions:
            raise UserError(
                f"{len(request.prompt_ids)} prompt tokens and {request.sampling.max_new_tokens} new ones "
                f"exceed the model's {self._max_positions} positions",
                where=where,
                hint="shorten the prompt or lower max_new_tokens",
            )
        self._waiting.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[TokenEvent]:
        if not self._waiting:
            return []
        rows = [Row(each, self._stop_ids(each.sampling)) for each in self._take_batch()]
        watcher = _RowWatcher(rows, self.tokenizer, self._clock_ns)
        with torch.inference_mode():
            self._generate(rows, watcher)
        return watcher.events

    def _take_batch(self) -> list[Request]:
        return take_batch(self._waiting, self._options.batch_size)

    def _stop_ids(self, sampling: SamplingParams) -> frozenset[int]:
        eos = () if sampling.ignore_eos else self._eos_token_ids
        return frozenset((*eos, *sampling.stop_token_ids))

    def _generate(self, rows: list[Row], watcher: _RowWatcher) -> None:
        prompts = [row.request.prompt_ids for row in rows]
        ids, mask = left_pad(prompts, pad_id=self._pad_id)
        config = self._generation_config(rows)
        if config.do_sample:
            torch.manual_seed(rows[0].request.sampling.seed)
        output = self._model.generate(
            input_ids=torch.tensor(ids, device=self._device),
            attention_mask=torch.tensor(mask, device=self._device),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([watcher]),
        )
        self._note(output, len(rows) * len(ids[0]), sum(map(len, prompts)))

    @property
    def _pad_id(self) -> int:
        return self._eos_token_ids[0] if self._eos_token_ids else 0

    def _generation_config(self, rows: list[Row]) -> GenerationConfig:
        sampling = rows[0].request.sampling
        chosen: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            chosen = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "min_p": sampling.min_p or None,
            }
        return GenerationConfig(
            max_new_tokens=max(row.request.sampling.max_new_tokens for row in rows),
            min_new_tokens=sampling.min_new_tokens or None,
            repetition_penalty=sampling.repetition_penalty,
            eos_token_id=sorted(rows[0].stop_ids) or None,
            pad_token_id=self._pad_id,
            use_cache=True,
            cache_implementation="static" if self._options.cache == "static" else None,
            disable_compile=not self._options.compile,
            return_dict_in_generate=True,
            **chosen,
        )

    def _note(self, output: Any, padded_tokens: int, prompt_tokens: int) -> None:
        cache = getattr(output, "cache", None)
        cache = cache if cache is not None else getattr(output, "past_key_values", None)
        seen = self._seen
        seen.cache_class = type(cache).__name__
        seen.kv_bytes = max(seen.kv_bytes, _cache_bytes(cache))
        seen.generate_calls += 1
        seen.prompt_tokens += prompt_tokens
        seen.padding_tokens += padded_tokens - prompt_tokens

    @torch.inference_mode()
    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        return [self._score(request) for request in requests]

    def _score(self, request: ScoreRequest) -> Score:
        num_tokens = len(request.token_ids)
        if not 1 <= request.first < num_tokens or num_tokens > self._max_positions:
            raise UserError(
                f"cannot score tokens {request.first} to {num_tokens} of a sequence of {num_tokens}",
                hint=f"at least one token must come first; the model has {self._max_positions} positions",
            )
        if request.protocol == "prefill":
            return score_prefill(self._model, request, self._device)
        return score_decode(self._model, request, self._device, self._new_cache(num_tokens))

    def _new_cache(self, num_tokens: int) -> Any:
        config = self._model.config
        if self._options.cache == "static":
            return StaticCache(config=config, max_cache_len=num_tokens)
        return DynamicCache(config=config)

    def report(self) -> EngineReport:
        seen = self._seen
        return EngineReport(
            executed={
                "engine": {"class": type(self._model).__name__, "transformers": transformers.__version__},
                "attention": {"implementation": self._model.config._attn_implementation},
                "kv": {"cache": seen.cache_class or None},
                "quantizer": _quantizer_facts(self._quantization),
                "decoder": {"call": "generate", "compiled": hasattr(self._model, "_compiled_call")},
                "scheduler": {"batches": "static", "batch_size": self._options.batch_size},
            },
            setup_s=dict(self._setup_s),
            weight_bytes=_weight_bytes(self._model),
            kv_bytes=seen.kv_bytes or None,
            counters={
                "generate_calls": seen.generate_calls,
                "prompt_tokens": seen.prompt_tokens,
                "padding_tokens": seen.padding_tokens,
            },
        )

    def reset(self) -> None:
        self._waiting.clear()
        self._seen = _Seen()

    def close(self) -> None:
        self._waiting.clear()
        self._model = None
        if self._device == "cuda":
            torch.cuda.empty_cache()


def _quantizer_facts(report: QuantizationReport | None) -> dict[str, Any]:
    if report is None:
        return {"method": "none"}
    return {
        "method": report.method,
        "bits_per_weight": report.bits_per_weight,
        "kernels": sorted(set(report.kernels.values())),
        "skipped": list(report.skipped),
        **report.details,
    }


def _cache_bytes(cache: Any) -> int:
    layers = getattr(cache, "layers", ())
    tensors = [getattr(layer, name, None) for layer in layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))


def _weight_bytes(model: nn.Module) -> int:
    """Parameters, and buffers that belong to the weights; tied tensors once."""
    total = sum(parameter.nbytes for parameter in model.parameters())
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                total += buffer.nbytes
    return total
