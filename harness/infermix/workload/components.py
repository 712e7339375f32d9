"""The workloads that come with the core: options and components only, nothing heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from infermix.roles.component import Component, Features, Role
from infermix.roles.facts import MachineFacts, ModelFacts
from infermix.roles.workload import Workload, WorkloadContext, WorkloadOptions
from infermix.toolkit.corpus import PYDOC_TOPICS, check_corpus

Tokens = Annotated[int, Meta(ge=1, description="number of tokens", extra={"unit": "tokens"})]
TokenId = Annotated[int, Meta(ge=0)]
Rate = Annotated[float, Meta(gt=0, le=1e9, description="mean arrivals per second", extra={"unit": "requests/s"})]


class Tagged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="use"):
    """One of several shapes, told apart by `use`."""


class Constant(Tagged, frozen=True, kw_only=True, tag="constant"):
    """Arrivals at equal distances, the first at 0."""

    request_rate: Rate


class Poisson(Tagged, frozen=True, kw_only=True, tag="poisson"):
    """Exponential gaps; the first request arrives at 0."""

    request_rate: Rate


class Gamma(Tagged, frozen=True, kw_only=True, tag="gamma"):
    """Gamma gaps: `cv` above 1 makes bursts, 1 is Poisson, below 1 is smoother. The first request arrives at 0."""

    request_rate: Rate
    cv: Annotated[float, Meta(ge=0.01, le=100, description="coefficient of variation of the gaps")] = 2.0


#: With fewer requests a cycle, drawing arrivals would be nearly all skipping of phases.
_LEAST_PER_CYCLE = 0.01


class OnOff(Tagged, frozen=True, kw_only=True, tag="on_off"):
    """Bursts: Poisson arrivals whose rate alternates. It begins with a burst, the first request at 0."""

    on_rate: Annotated[
        float, Meta(gt=0, le=1e9, description="arrivals per second in a burst", extra={"unit": "requests/s"})
    ]
    off_rate: Annotated[
        float, Meta(ge=0, le=1e9, description="arrivals per second between bursts", extra={"unit": "requests/s"})
    ] = 0.0
    on_s: Annotated[float, Meta(gt=0, description="length of a burst, its mean if drawn", extra={"unit": "s"})]
    off_s: Annotated[float, Meta(gt=0, description="time between bursts, its mean if drawn", extra={"unit": "s"})]
    exponential: Annotated[
        bool, Meta(description="draw both lengths from exponential distributions (a Markov modulated process)")
    ] = False

    def __post_init__(self) -> None:
        per_cycle = self.on_rate * self.on_s + self.off_rate * self.off_s
        if per_cycle < _LEAST_PER_CYCLE:
            raise ValueError(
                f"a burst and the time behind it bring {per_cycle:g} requests on average, at least "
                f"{_LEAST_PER_CYCLE:g} are needed: longer bursts, or a higher on_rate"
            )


class Ramp(Tagged, frozen=True, kw_only=True, tag="ramp"):
    """Poisson arrivals whose rate changes linearly for `ramp_s` seconds and then stays. The first arrives at 0."""

    start_rate: Annotated[
        float, Meta(ge=0, le=1e9, description="arrivals per second at 0", extra={"unit": "requests/s"})
    ]
    end_rate: Annotated[
        float, Meta(gt=0, le=1e9, description="arrivals per second at the end", extra={"unit": "requests/s"})
    ]
    ramp_s: Annotated[float, Meta(gt=0, description="length of the ramp", extra={"unit": "s"})]


Arrivals = Constant | Poisson | Gamma | OnOff | Ramp


class RequestClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A class of requests that a scheduler may treat differently."""

    share: Annotated[float, Meta(gt=0, description="share of the requests, relative to the other classes")] = 1.0
    priority: Annotated[int, Meta(description="smaller is more urgent")] = 0
    tenant: Annotated[str, Meta(description="who pays")] = ""
    category: Annotated[str, Meta(description="name of the class; empty: what the source says")] = ""


class Uniform(Tagged, frozen=True, kw_only=True, tag="uniform"):
    """A length between `min` and `max`, both included."""

    min: Tokens
    max: Tokens

    def __post_init__(self) -> None:
        _check_order(self.min, self.max)


class LogNormal(Tagged, frozen=True, kw_only=True, tag="lognormal"):
    """A log-normal length, drawn again until it lies between `min` and `max`."""

    median: Annotated[float, Meta(gt=0, description="median before the bounds", extra={"unit": "tokens"})]
    sigma: Annotated[float, Meta(ge=0, le=5, description="standard deviation of the logarithm")] = 0.5
    min: Tokens = 1
    max: Tokens

    def __post_init__(self) -> None:
        _check_order(self.min, self.max)
        if not self.min <= self.median <= self.max:
            raise ValueError(f"median {self.median:g} must lie between min {self.min} and max {self.max}")


Length = Tokens | Uniform | LogNormal


def _check_order(low: int, high: int) -> None:
    if low > high:
        raise ValueError(f"min {low} is above max {high}")


def bounds(length: Length) -> tuple[int, int]:
    """Smallest and largest length, in tokens."""
    return (length, length) if isinstance(length, int) else (length.min, length.max)


class RequestOptions(WorkloadOptions, frozen=True, kw_only=True):
    """What every workload has: how requests arrive, and how their tokens are chosen.

    With neither `concurrency` nor `arrivals` everything arrives at once, at time 0.
    """

    concurrency: Annotated[int, Meta(ge=1, description="closed loop: requests kept in flight")] | None = None
    arrivals: Annotated[Arrivals, Meta(description="open loop: when requests arrive")] | None = None
    vary: Annotated[
        bool, Meta(description="other prompts, arrivals and seeds in each repeat; false repeats the same")
    ] = False
    seed: Annotated[int, Meta(ge=0, description="of every draw; null: the experiment's seed")] | None = None
    num_outputs: Annotated[
        int,
        Meta(ge=1, le=256, description="outputs per prompt, drawn independently or the best that a decoder finds"),
    ] = 1
    temperature: Annotated[float, Meta(ge=0, description="0 is greedy")] = 0.0
    top_k: Annotated[int, Meta(ge=0, description="most likely tokens kept; 0: all")] = 0
    top_p: Annotated[float, Meta(gt=0, le=1, description="probability mass kept")] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1, description="least probability over the largest one")] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, description="1: none")] = 1.0
    classes: Annotated[
        tuple[RequestClass, ...], Meta(description="classes that the requests (or sessions) are drawn from")
    ] = ()
    stop: Annotated[tuple[str, ...], Meta(description="texts that end an output")] = ()
    stop_token_ids: Annotated[tuple[TokenId, ...], Meta(description="tokens that end an output")] = ()
    ignore_eos: Annotated[bool, Meta(description="go on after the end of sequence")] = False

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.arrivals is not None:
            raise ValueError(
                "concurrency (closed loop) and arrivals (open loop) exclude each other: give one of them"
            )
        if "" in self.stop:
            raise ValueError("stop holds an empty text, which would end every output at once")

    def most_requests(self) -> int | None:
        """Upper bound of requests in one repeat; `None` when only the data tells."""
        return None

    def max_in_flight(self) -> int | None:
        bounds = [bound for bound in (self.concurrency, self.most_requests()) if bound is not None]
        return min(bounds, default=None)


class SyntheticOptions(RequestOptions, frozen=True, kw_only=True):
    """Random token ids of exactly the asked lengths; special tokens are avoided where the tokenizer tells them."""

    num_requests: Annotated[int, Meta(ge=1, description="requests of one repeat")] = 32
    input_tokens: Annotated[Length, Meta(description="prompt length, a number or a distribution")] = 128
    output_tokens: Annotated[Length, Meta(description="output length, a number or a distribution")] = 128
    shared_prefix_tokens: Annotated[
        int,
        Meta(ge=0, description="first tokens that prompts with one prefix have in common", extra={"unit": "tokens"}),
    ] = 0
    num_prefixes: Annotated[
        int, Meta(ge=1, description="different prefixes of shared_prefix_tokens; requests take them in turn")
    ] = 1
    ignore_eos: Annotated[bool, Meta(description="go on after the end of sequence")] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        shortest = bounds(self.input_tokens)[0]
        if self.shared_prefix_tokens > shortest:
            raise ValueError(
                f"shared_prefix_tokens {self.shared_prefix_tokens} is longer than the shortest prompt ({shortest})"
            )
        if self.num_prefixes > 1 and not self.shared_prefix_tokens:
            raise ValueError(f"num_prefixes {self.num_prefixes} needs shared_prefix_tokens above 0")

    def max_request_tokens(self) -> int:
        return bounds(self.input_tokens)[1] + bounds(self.output_tokens)[1]

    def most_requests(self) -> int:
        return self.num_requests


class PromptsOptions(RequestOptions, frozen=True, kw_only=True):
    """Prompts from a JSONL file: one object a line, with a text, chat messages, or turns (the first is sent)."""

    path: Annotated[str, Meta(min_length=1, description="JSONL file, relative to the experiment")]
    num_requests: Annotated[int, Meta(ge=1, description="requests of one repeat; null: all")] | None = None
    max_new_tokens: Annotated[Tokens, Meta(description="most output tokens")] = 128
    field: Annotated[str, Meta(description="key of the prompt; null: prompt, text, messages or turns")] | None = None
    bos: Annotated[bool, Meta(description="begin plain text with the BOS token; templates have their own")] = False
    category_field: Annotated[str, Meta(description="key of the category, if a line has one")] = "category"
    chat: Annotated[
        bool | Literal["auto"],
        Meta(description="apply the chat template; auto: to messages and turns, not to plain text"),
    ] = "auto"
    order: Annotated[
        Literal["file", "round_robin"],
        Meta(description="round_robin: the first of each category in turn, then the second, ..."),
    ] = "file"
    repeat_prompts: Annotated[bool, Meta(description="start again when there are fewer than asked")] = False

    def check(self, base: Path) -> None:
        from infermix.workload.prompts import read_entries

        read_entries(self, base)

    def most_requests(self) -> int | None:
        return self.num_requests


class CorpusOptions(RequestOptions, frozen=True, kw_only=True):
    """A text cut into prompts of exactly `input_tokens` tokens, one after the other."""

    path: Annotated[
        str, Meta(description=f"text file relative to the experiment, or {PYDOC_TOPICS}, which ships with Python")
    ] = PYDOC_TOPICS
    num_requests: Annotated[int, Meta(ge=1, description="requests of one repeat")] = 32
    input_tokens: Annotated[Tokens, Meta(description="length of every prompt")] = 128
    max_new_tokens: Annotated[Tokens, Meta(description="most output tokens")] = 128
    repeat_prompts: Annotated[bool, Meta(description="start again when the text is too short")] = False

    def check(self, base: Path) -> None:
        check_corpus(self.path, base)

    def max_request_tokens(self) -> int:
        return self.input_tokens + self.max_new_tokens

    def most_requests(self) -> int:
        return self.num_requests


def outputs_needed(options: RequestOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    """Several outputs share their prompt's KV; greedy ones are equal, so only a search has several."""
    if options.num_outputs == 1:
        return frozenset()
    search = frozenset() if options.temperature else frozenset({"decoder:search"})
    return search | {"engine:outputs", "kv:fork"}


def _described(options: RequestOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    """Declared for parts to which it matters how requests are sampled."""
    said = {
        "ignore_eos": options.ignore_eos,
        "sampled": options.temperature > 0,
        "stop_texts": bool(options.stop),
        "repetition_penalty": options.repetition_penalty != 1,
    }
    return frozenset(f"workload:{name}" for name, holds in said.items() if holds)


def random_tokens(options: RequestOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    """Declared for parts whose work depends on what the text says."""
    return _described(options, model, machine) | {"workload:random_tokens"}


def _synthetic(options: Any, context: WorkloadContext) -> Workload:
    from infermix.workload.assemble import PreparedWorkload
    from infermix.workload.synthetic import SyntheticSource

    return PreparedWorkload(options, context.seed, SyntheticSource(options, context))


def _prompts(options: Any, context: WorkloadContext) -> Workload:
    from infermix.workload.assemble import PreparedWorkload
    from infermix.workload.prompts import read_prompts

    return PreparedWorkload(options, context.seed, read_prompts(options, context))


def _corpus(options: Any, context: WorkloadContext) -> Workload:
    from infermix.workload.assemble import PreparedWorkload
    from infermix.workload.corpus import cut_corpus

    return PreparedWorkload(options, context.seed, cut_corpus(options, context))


COMPONENTS = (
    Component(
        name="synthetic",
        role=Role.WORKLOAD,
        summary="random tokens of exactly the asked lengths; needs no tokenizer",
        build=_synthetic,
        options=SyntheticOptions,
        needs=outputs_needed,
        provides=random_tokens,
    ),
    Component(
        name="prompts",
        role=Role.WORKLOAD,
        summary="prompts, chat messages or first turns from a JSONL file",
        build=_prompts,
        options=PromptsOptions,
        needs=outputs_needed,
        provides=_described,
    ),
    Component(
        name="corpus",
        role=Role.WORKLOAD,
        summary="prompts of equal length cut from a text; the default text ships with Python",
        build=_corpus,
        options=CorpusOptions,
        needs=outputs_needed,
        provides=_described,
    ),
)
