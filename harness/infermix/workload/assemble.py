"""Prompts become requests: identifiers, arrivals, sampling, seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from infermix.errors import UserError
from infermix.roles.request import Request, SamplingParams
from infermix.workload.arrivals import arrival_times
from infermix.workload.components import RequestClass, RequestOptions


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a source contributes to one request."""

    token_ids: tuple[int, ...]
    max_new_tokens: int
    category: str = ""
    #: When the source knows it; `None` leaves it to `arrivals`.
    arrival_s: float | None = None
    #: Index of the prompt that has to end first, and the seconds from then on: the next turn of a session.
    after: int | None = None
    think_s: float = 0.0
    #: Prompts of different salts share no cached prefix.
    salt: str = ""


class Source(Protocol):
    @property
    def input_tokens(self) -> tuple[int, int] | None:
        """The range of prompt lengths that the options promise; `None` when the data decides."""
        ...

    def prompts(self, round_: int, seed: int) -> Sequence[Prompt]:
        """The prompts of one round, a pure function of its arguments. Rounds differ; repeats may share one."""
        ...


#: Nobody waits longer (30 years), not even in a simulation.
MOST_ARRIVAL_S = 1e9


class PreparedWorkload:
    """Requests of one repeat. Every repeat has the same ones, unless `vary` asks for others.

    Prompts, arrivals, classes and sampling seeds come from separate random streams: changing one leaves the others
    alone. `counts` is what the source has to tell about its data.
    """

    def __init__(self, options: RequestOptions, default_seed: int, source: Source) -> None:
        self.concurrency = options.concurrency
        self.input_tokens = source.input_tokens
        self.counts: Mapping[str, float] = getattr(source, "counts", {})
        self._options, self._source = options, source
        self._seed = default_seed if options.seed is None else options.seed

    def requests(self, repeat: int) -> Sequence[Request]:
        """Raises `UserError` for arrivals beyond `MOST_ARRIVAL_S`."""
        round_ = repeat if self._options.vary else 0
        prompts = self._source.prompts(round_, self._seed)
        times = self._times(prompts, round_)
        _check_times(times)
        classes = self._classes(prompts, round_)
        seeds = stream(self._seed, round_, "sampling")
        return [
            Request(
                request_id=str(index),
                prompt_ids=prompt.token_ids,
                sampling=self._sampling(prompt.max_new_tokens, seeds.getrandbits(31)),
                arrival_s=time,
                category=kind.category or prompt.category,
                priority=kind.priority,
                tenant=kind.tenant,
                after="" if prompt.after is None else str(prompt.after),
                think_s=prompt.think_s,
                cache_salt=prompt.salt,
            )
            for index, (prompt, time, kind) in enumerate(zip(prompts, times, classes, strict=True))
        ]

    def _times(self, prompts: Sequence[Prompt], round_: int) -> list[float]:
        """Arrivals; those of later turns are not used. `arrivals` goes before what the source says."""
        arrivals = self._options.arrivals
        firsts = sum(prompt.after is None for prompt in prompts)
        drawn = iter(arrival_times(arrivals, firsts, stream(self._seed, round_, "arrivals")))
        times = [0.0 if prompt.after is not None else next(drawn) for prompt in prompts]
        if arrivals is not None or self.concurrency is not None:
            return times
        return [
            time if prompt.arrival_s is None else prompt.arrival_s
            for prompt, time in zip(prompts, times, strict=True)
        ]

    def _classes(self, prompts: Sequence[Prompt], round_: int) -> list[RequestClass]:
        """One per prompt; all turns of a session belong to the same class."""
        choices = self._options.classes or (RequestClass(),)
        random, weights = stream(self._seed, round_, "classes"), [choice.share for choice in choices]
        drawn: list[RequestClass] = []
        for prompt in prompts:
            fresh = random.choices(choices, weights)[0] if prompt.after is None else drawn[prompt.after]
            drawn.append(fresh)
        return drawn

    def _sampling(self, max_new_tokens: int, seed: int) -> SamplingParams:
        options = self._options
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            num_outputs=options.num_outputs,
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


def _check_times(times: Sequence[float]) -> None:
    late = next((time for time in times if not time <= MOST_ARRIVAL_S), None)
    if late is not None:
        raise UserError(
            f"a request would arrive after {late:g} s, {MOST_ARRIVAL_S:g} s are the most",
            key="workload",
            hint="a higher rate of arrivals, or a higher speed of the trace",
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
