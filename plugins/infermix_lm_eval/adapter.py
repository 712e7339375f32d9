"""An `lm_eval` model over `Engine`: what lm-eval asks, answered by the parts that were timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from infermix.errors import UserError
from infermix.quality.generate import generate
from infermix.roles.engine import Engine, ScoreRequest, Tokenizer
from infermix.roles.request import Request, SamplingParams
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

T = TypeVar("T")

#: Generation settings of a task that have a counterpart in `SamplingParams`.
SAMPLING_KEYS = ("top_p", "top_k", "min_p", "repetition_penalty")

#: Settings that only say what the engine does anyway.
NEUTRAL_SETTINGS: Mapping[str, Any] = {"num_beams": 1, "use_cache": True}


class EngineLM(TemplateLM):
    """Log-likelihoods through `Engine.score`, texts through `Engine.submit` and `step`.

    Inputs longer than `max_length` lose tokens on the left, as in lm-eval's own models; `num_truncated` counts them.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        batch_size: int,
        add_bos: bool = False,
        seed: int = 0,
        progress: Callable[[str, float], None] = lambda phase, fraction: None,
    ) -> None:
        super().__init__()
        self._engine, self._engine_tokenizer = engine, tokenizer
        self.max_length, self.batch_size = max_length, batch_size
        self._add_bos, self._seed, self._progress = add_bos, seed, progress
        self.num_truncated = 0

    @property
    def eot_token_id(self) -> int:
        return self._engine_tokenizer.eos_token_ids[0]

    @property
    def prefix_token_id(self) -> int:
        bos = self._engine_tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Ids of the text, after a BOS where one is wanted and the text does not start with it."""
        ids = list(self._engine_tokenizer.encode(string))
        bos = self._engine_tokenizer.bos_token_id
        if not self._add_bos or add_special_tokens is False or ids[:1] == [bos]:
            return ids
        if bos is None:
            raise UserError("this tokenizer has no BOS token", key="quality.lm_eval.bos", hint="use bos: none")
        return [bos, *ids]

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        wanted = [self._score_request(context, continuation) for _, context, continuation in requests]
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(wanted)
        # Longest first: memory runs out at once or never, and the sequences of a batch have similar lengths.
        order = sorted(range(len(wanted)), key=lambda index: -len(wanted[index].token_ids))
        for done, batch in self._batches(order):
            scores = self._engine.score([wanted[index] for index in batch])
            for index, score in zip(batch, scores, strict=True):
                targets = list(wanted[index].token_ids[wanted[index].first :])
                answers[index] = (math.fsum(score.logprobs), score.top1 == targets)
            self._progress("lm_eval: log-likelihoods", done)
        return answers

    def _score_request(self, context: list[int], continuation: list[int]) -> ScoreRequest:
        if not 0 < len(continuation) <= self.max_length:
            raise UserError(
                f"a continuation of {len(continuation)} tokens cannot be scored",
                key="quality.lm_eval.max_length",
                hint=f"it must have 1 to {self.max_length} tokens",
            )
        tokens = (*context, *continuation)
        kept = tokens[-(self.max_length + 1) :]
        self.num_truncated += len(kept) < len(tokens)
        return ScoreRequest(kept, len(kept) - len(continuation))

    def _batches(self, items: Sequence[T]) -> Iterator[tuple[float, Sequence[T]]]:
        """Slices of `batch_size`, each with the fraction that is done after it."""
        for begin in range(0, len(items), self.batch_size):
            batch = items[begin : begin + self.batch_size]
            yield (begin + len(batch)) / len(items), batch

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        """Sum of log-likelihoods of each whole text, in disjoint windows of `max_length` after one prefix token."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        counts = []
        for request in requests:
            rolling = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            before = len(windows)
            windows.extend((None, *make_disjoint_window(window)) for window in rolling)
            counts.append(len(windows) - before)
        answers = iter(self._loglikelihood_tokens(windows))
        return [math.fsum(next(answers)[0] for _ in range(count)) for count in counts]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        wanted = [self._request(number, *request.args) for number, request in enumerate(requests)]
        texts: list[str] = []
        for done, batch in self._batches(wanted):
            outputs = generate(self._engine, batch)
            texts.extend(self._text(request, output) for request, output in zip(batch, outputs, strict=True))
            self._progress("lm_eval: texts", done)
        return texts

    def _request(self, number: int, context: str, settings: Mapping[str, Any]) -> Request:
        sampling = sampling_params(settings, self._seed)
        room = self.max_length - sampling.max_new_tokens
        if room < 1:
            raise UserError(
                f"{sampling.max_new_tokens} new tokens leave no room for a prompt in {self.max_length}",
                key="quality.lm_eval.max_length",
            )
        ids = self.tok_encode(context)
        self.num_truncated += len(ids) > room
        return Request(request_id=f"lm-eval-{number}", prompt_ids=tuple(ids[-room:]), sampling=sampling)

    def _text(self, request: Request, output: list[int]) -> str:
        if output and output[-1] in self._engine_tokenizer.eos_token_ids:
            output = output[:-1]
        return postprocess_generated_text(self._engine_tokenizer.decode(output), list(request.sampling.stop), None)


def sampling_params(settings: Mapping[str, Any], seed: int) -> SamplingParams:
    """lm-eval's generation settings as ours. Raises `UserError` for one that has no counterpart."""
    rest: dict[str, Any] = dict(normalize_gen_kwargs(dict(settings)))
    stop = tuple(text for text in rest.pop("until") if text)
    max_new_tokens, do_sample = rest.pop("max_gen_toks"), rest.pop("do_sample", False)
    temperature = rest.pop("temperature", 1.0)
    known = {key: rest.pop(key) for key in SAMPLING_KEYS if key in rest}
    foreign = {key: value for key, value in rest.items() if NEUTRAL_SETTINGS.get(key) != value}
    if foreign:
        raise UserError(
            f"the task asks for generation settings that no engine here has: {foreign}",
            key="generation_kwargs",
            hint="known: until, max_gen_toks, do_sample, temperature, " + ", ".join(SAMPLING_KEYS),
        )
    return SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=temperature if do_sample else 0.0,
        stop=stop,
        seed=seed,
        **(known if do_sample else {key: value for key, value in known.items() if key == "repetition_penalty"}),
    )
