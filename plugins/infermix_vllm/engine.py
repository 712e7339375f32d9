"""The engine: vLLM's `LLMEngine`, driven step by step."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from infermix.errors import InfermixError, UserError
from infermix.roles.engine import EngineReport, Score, ScoreRequest, Tokenizer
from infermix.roles.request import FinishReason, Request, TokenEvent

from infermix_vllm import facts
from infermix_vllm.sampling import check_request, scoring_params, to_vllm
from infermix_vllm.scoring import check_score, read_score
from infermix_vllm.stream import Stream, finish_reason

if TYPE_CHECKING:
    from infermix_vllm.api import Api
    from infermix_vllm.plugin import VllmOptions

#: Calls of `step` that empty vLLM's queue of launched batches (two with asynchronous scheduling).
_DRAIN_STEPS = 3
#: Calls of `step` without any output after which scoring gives up.
_STALL_STEPS = 100_000


class VllmEngine:
    """`Engine` over an `LLMEngine` whose core runs in this process.

    Every event carries the clock at which `LLMEngine.step` came back with its tokens. The counter `steps` counts the
    steps that brought tokens: one that computed nothing but a part of long prompts is missing in it.
    """

    def __init__(
        self,
        *,
        engine: Any,
        api: Api,
        tokenizer: Tokenizer | None,
        eos_token_ids: tuple[int, ...],
        options: VllmOptions,
        vocab_size: int,
        max_model_len: int,
        clock_ns: Callable[[], int],
        setup_s: dict[str, float],
    ) -> None:
        self.tokenizer = tokenizer
        self._engine, self._api, self._options = engine, api, options
        self._eos_token_ids, self._vocab_size = eos_token_ids, vocab_size
        self._max_model_len, self._clock_ns = max_model_len, clock_ns
        self._live: dict[str, Stream] = {}
        self._report = EngineReport(
            executed={"engine": facts.executed_facts(engine, api.version)},
            setup_s=setup_s,
            weight_bytes=facts.weight_bytes(engine),
            kv_bytes=facts.kv_bytes(engine) or None,
            kv_bytes_per_token=facts.kv_bytes_per_token(engine),
            graphs=facts.graph_facts(engine),
        )
        self._counters: dict[str, float] = {}
        self._preemptions_before = 0.0
        self._restart_counters()

    def submit(self, request: Request) -> None:
        if request.request_id in self._live:
            raise UserError("a request with this id is running", where=f"request {request.request_id}")
        check_request(
            request,
            max_model_len=self._max_model_len,
            vocab_size=self._vocab_size,
            has_tokenizer=self.tokenizer is not None,
        )
        with _refusals(request.request_id):
            params = to_vllm(self._api, request.sampling, self._eos_token_ids)
            self._add(request.request_id, request.prompt_ids, params)
        self._live[request.request_id] = Stream(request)

    @property
    def has_work(self) -> bool:
        return bool(self._live)

    def step(self) -> list[TokenEvent]:
        outputs = self._engine.step()
        now = self._clock_ns()
        events = [event for output in outputs if (event := self._event(output, now)) is not None]
        self._counters["steps"] += bool(events)
        return events

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        if self.has_work:
            raise InfermixError("score needs an idle engine: requests are still running")
        limit = self._engine.vllm_config.model_config.max_model_len
        for request in requests:
            check_score(request, limit)
        names = {f"score-{index}": request for index, request in enumerate(requests)}
        for name, request in names.items():
            with _refusals(name):
                self._add(name, request.token_ids, scoring_params(self._api))
        found = {output.request_id: output.prompt_logprobs for output in self._finished(len(names))}
        return [read_score(request, found.get(name)) for name, request in names.items()]

    def report(self) -> EngineReport:
        self._report.counters = dict(self._counters)
        if self._options.log_stats:
            self._report.counters["preemptions"] = facts.num_preemptions(self._engine) - self._preemptions_before
        return self._report

    def reset(self) -> None:
        if self._live:
            self._engine.abort_request(list(self._live))
            self._live.clear()
        self._drain()
        if self._options.prefix_caching and not self._engine.reset_prefix_cache():
            raise InfermixError("vLLM did not empty its prefix cache: blocks are still in use")
        self._restart_counters()

    def close(self) -> None:
        engine, self._engine = self._engine, None
        self._live.clear()
        if engine is None:
            return
        engine.engine_core.shutdown()
        del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _add(self, name: str, token_ids: Sequence[int], params: Any) -> None:
        """In the form that vLLM's own `LLM` hands to its engine: nothing looks at the tokens a second time."""
        self._engine.add_request(name, {"type": "token", "prompt_token_ids": list(token_ids)}, params)

    def _event(self, output: Any, now: int) -> TokenEvent | None:
        stream = self._live.get(output.request_id)
        if stream is None:
            return None
        (completion,) = output.outputs
        if not stream.num_output:
            self._counters["prefix_hit_tokens"] += output.num_cached_tokens or 0
        tokens, stopped = stream.take(completion.token_ids, self.tokenizer)
        reason = FinishReason.STOP if stopped else finish_reason(completion.finish_reason)
        if stopped and not output.finished:
            self._engine.abort_request([output.request_id])
        if reason is not None:
            del self._live[output.request_id]
        return TokenEvent(output.request_id, tokens, now, reason)

    def _finished(self, count: int) -> Iterator[Any]:
        """Outputs of `count` requests that were just added, in the order in which they end."""
        silent = 0
        while count:
            outputs = [output for output in self._engine.step() if output.finished]
            silent = 0 if outputs else silent + 1
            if silent > _STALL_STEPS:
                raise InfermixError(f"vLLM made no progress for {silent} steps, {count} sequences are not scored")
            count -= len(outputs)
            yield from outputs

    def _drain(self) -> None:
        """Let what was launched come back, so that the next repeat starts with empty queues."""
        for _ in range(_DRAIN_STEPS):
            self._engine.step()

    def _restart_counters(self) -> None:
        self._counters = {"steps": 0.0, "prefix_hit_tokens": 0.0}
        if self._options.log_stats:
            self._preemptions_before = facts.num_preemptions(self._engine)


@contextmanager
def _refusals(name: str) -> Iterator[None]:
    """What vLLM refuses (`ValueError`) is the request's fault."""
    try:
        yield
    except ValueError as error:
        raise UserError(f"vLLM refuses it: {error}", where=f"request {name}") from error
