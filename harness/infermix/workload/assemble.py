"""Prompts become requests: identifiers, arrivals, sampling, seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from infermix.roles.request import Request, SamplingParams
from infermix.workload.arrivals import arrival_times
from infermix.workload.components import RequestOptions


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a source contributes to one request."""

    token_ids: tuple[int, ...]
    max_new_tokens: int
    category: str = ""


class Source(Protocol):
    @property
    def input_tokens(self) -> tuple[int, int] | None:
        """The range of prompt lengths that the options promise; `None` when the data decides."""
        ...

    def prompts(self, round_: int, seed: int) -> Sequence[Prompt]:
        """The prompts of one round, a pure function of its arguments. Rounds differ; repeats may share one."""
        ...


class PreparedWorkload:
    """Requests of one repeat. Every repeat has the same ones, unless `vary` asks for others.

    Prompts, arrivals and sampling seeds come from separate random streams: changing one leaves the others alone.
    """

    def __init__(self, options: RequestOptions, default_seed: int, source: Source) -> None:
        self.concurrency = options.concurrency
        self.input_tokens = source.input_tokens
        self._options, self._source = options, source
        self._seed = default_seed if options.seed is None else options.seed

    def requests(self, repeat: int) -> Sequence[Request]:
        round_ = repeat if self._options.vary else 0
        prompts = self._source.prompts(round_, self._seed)
        times = arrival_times(self._options.arrivals, len(prompts), stream(self._seed, round_, "arrivals"))
        seeds = stream(self._seed, round_, "sampling")
        return [
            Request(
                request_id=str(index),
                prompt_ids=prompt.token_ids,
                sampling=self._sampling(prompt.max_new_tokens, seeds.getrandbits(31)),
                arrival_s=time,
                category=prompt.category,
            )
            for index, (prompt, time) in enumerate(zip(prompts, times, strict=True))
        ]

    def _sampling(self, max_new_tokens: int, seed: int) -> SamplingParams:
        options = self._options
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            seed=seed,
            stop=options.stop,
            stop_token_ids=options.stop_token_ids,
            ignore_eos=options.ignore_eos,
        )


def stream(seed: int, round_: int, purpose: str) -> Random:
    """An independent random stream per seed, round and purpose, equal on every machine."""
    return Random(f"infermix/{seed}/{round_}/{purpose}")


@dataclass(frozen=True)
class ListSource:
    """A fixed list of prompts, `per_round` of them each round; a later round goes on where the last one stopped."""

    all_prompts: Sequence[Prompt]
    per_round: int
    input_tokens: tuple[int, int] | None = None

    def prompts(self, round_: int, seed: int) -> Sequence[Prompt]:
        start, total = round_ * self.per_round, len(self.all_prompts)
        return [self.all_prompts[(start + index) % total] for index in range(self.per_round)]
