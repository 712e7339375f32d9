"""The evaluators that come with the core: options and components only, no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from infermix.roles.component import Component, Features, Role
from infermix.roles.evaluator import EvaluatorOptions
from infermix.roles.facts import MachineFacts, ModelFacts
from infermix.toolkit.corpus import PYDOC_TOPICS, check_corpus

CorpusName = Annotated[
    str, Meta(description=f"text file relative to the experiment, or {PYDOC_TOPICS}, which ships with Python")
]
Protocol = Annotated[
    Literal["prefill", "decode"],
    Meta(description="prefill: one pass; decode: one token at a time, reading the KV cache"),
]
MinContext = Annotated[
    int,
    Meta(
        ge=1,
        description="tokens before the first one that is scored; they are computed at once, as a prompt is",
        extra={"unit": "tokens"},
    ),
]


class PerplexityOptions(EvaluatorOptions, frozen=True, kw_only=True):
    """Perplexity of a text in windows; only the tokens that a window adds to the one before it are scored."""

    corpus: CorpusName = PYDOC_TOPICS
    window: Annotated[int, Meta(ge=2, description="corpus tokens per window", extra={"unit": "tokens"})] = 512
    stride: (
        Annotated[
            int,
            Meta(
                ge=1,
                description="tokens between window starts; null: the window",
                extra={"unit": "tokens"},
            ),
        ]
        | None
    ) = None
    num_tokens: (
        Annotated[
            int,
            Meta(
                ge=2,
                description="corpus tokens used, from its start; null: all",
                extra={"unit": "tokens"},
            ),
        ]
        | None
    ) = 4096
    bos: Annotated[
        Literal["none", "bos"],
        Meta(description="bos: put BOS before every window, on top of its tokens"),
    ] = "none"
    protocol: Protocol = "prefill"
    min_context: MinContext = 1

    def __post_init__(self) -> None:
        if self.effective_stride > self.window:
            raise ValueError(f"stride {self.stride} leaves gaps: it must not exceed window {self.window}")
        if self.min_context >= self.window:
            raise ValueError(f"min_context {self.min_context} leaves nothing to score of window {self.window}")

    @property
    def effective_stride(self) -> int:
        return self.window if self.stride is None else self.stride

    def max_tokens(self) -> int:
        window = self.window if self.num_tokens is None else min(self.window, self.num_tokens)
        return window + (self.bos == "bos")

    def check(self, base: Path) -> None:
        check_corpus(self.corpus, base)


class AgreementOptions(EvaluatorOptions, frozen=True, kw_only=True):
    """Agreement with the reference parts and the unquantized weights, on logits and on greedy tokens."""

    corpus: CorpusName = PYDOC_TOPICS
    num_sequences: Annotated[int, Meta(ge=1, description="pieces of the corpus that are compared")] = 8
    num_tokens: Annotated[int, Meta(ge=2, description="length of a piece", extra={"unit": "tokens"})] = 128
    protocol: Protocol = "prefill"
    min_context: MinContext = 1
    prompt_tokens: Annotated[
        int,
        Meta(
            ge=1,
            description="start of a piece that serves as prompt of the greedy comparison; at most num_tokens",
            extra={"unit": "tokens"},
        ),
    ] = 32
    new_tokens: Annotated[
        int, Meta(ge=0, description="greedy tokens per prompt; 0 skips them", extra={"unit": "tokens"})
    ] = 32
    near_tie: Annotated[
        float,
        Meta(
            ge=0,
            description="a difference is excused where the reference's top-2 margin is below this",
            extra={"unit": "logits"},
        ),
    ] = 1e-3

    def __post_init__(self) -> None:
        if self.prompt_tokens > self.num_tokens:
            raise ValueError(f"prompt_tokens {self.prompt_tokens} exceeds num_tokens {self.num_tokens}")
        if self.min_context >= self.num_tokens:
            raise ValueError(
                f"min_context {self.min_context} leaves nothing to compare of num_tokens {self.num_tokens}"
            )

    def max_tokens(self) -> int:
        return max(self.num_tokens, self.prompt_tokens + self.new_tokens)

    def check(self, base: Path) -> None:
        check_corpus(self.corpus, base)


class PasskeyOptions(EvaluatorOptions, frozen=True, kw_only=True):
    """Retrieval of a number hidden in a long synthetic text, at several lengths and depths."""

    lengths: Annotated[
        tuple[Annotated[int, Meta(ge=1)], ...],
        Meta(
            min_length=1,
            description="tokens of a prompt and its answer together; the filler is as long as that allows",
            extra={"unit": "tokens"},
        ),
    ] = (512, 1024)
    depths: Annotated[
        tuple[Annotated[float, Meta(ge=0, le=1)], ...],
        Meta(min_length=1, description="where the key stands: 0 before all filler, 1 behind it"),
    ] = (0.0, 0.25, 0.5, 0.75, 1.0)
    trials: Annotated[int, Meta(ge=1, description="keys per length and depth")] = 2
    digits: Annotated[int, Meta(ge=1, le=18, description="digits of a key")] = 5
    new_tokens: Annotated[int, Meta(ge=1, description="most tokens of an answer", extra={"unit": "tokens"})] = 16
    chat: Annotated[
        bool, Meta(description="ask through the chat template; false: plain text that the answer continues")
    ] = False
    seed: Annotated[int, Meta(description="draws the keys")] = 0

    def __post_init__(self) -> None:
        for name in ("lengths", "depths"):
            given = getattr(self, name)
            if len(set(given)) != len(given):
                raise ValueError(f"{name} {list(given)} repeats a value")

    def max_tokens(self) -> int:
        return max(self.lengths)


class AssociativeRecallOptions(EvaluatorOptions, frozen=True, kw_only=True):
    """Recall of one of many pairs that a prompt states: what a state of constant size still holds of them."""

    pairs: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=400)], ...],
        Meta(min_length=1, description="pairs that a prompt states, one of which is asked for"),
    ] = (4, 16, 64)
    trials: Annotated[int, Meta(ge=1, description="prompts per number of pairs")] = 16
    digits: Annotated[int, Meta(ge=3, le=18, description="digits of a value")] = 3
    new_tokens: Annotated[int, Meta(ge=1, description="most tokens of an answer", extra={"unit": "tokens"})] = 8
    chat: Annotated[
        bool, Meta(description="ask through the chat template; false: plain text that the answer continues")
    ] = False
    seed: Annotated[int, Meta(description="draws names, values and questions")] = 0

    def __post_init__(self) -> None:
        if len(set(self.pairs)) != len(self.pairs):
            raise ValueError(f"pairs {list(self.pairs)} repeats a value")

    def max_tokens(self) -> int:
        """At most one token per character of `Box AB holds 123. `, and 200 for all else, a chat template included."""
        return max(self.pairs) * (16 + self.digits) + 200 + self.new_tokens


def context_suffix(min_context: int) -> str:
    """What the name of a metric says of a context that is not the smallest."""
    return f",min_context={min_context}" if min_context > 1 else ""


def _build_perplexity(options: PerplexityOptions, context: Any) -> Any:
    from infermix.quality.perplexity import PerplexityEvaluator

    return PerplexityEvaluator(options, context)


def _build_agreement(options: AgreementOptions, context: Any) -> Any:
    from infermix.quality.agreement import AgreementEvaluator

    return AgreementEvaluator(options, context)


def _build_passkey(options: PasskeyOptions, context: Any) -> Any:
    from infermix.quality.passkey import PasskeyEvaluator

    return PasskeyEvaluator(options, context)


def _build_associative_recall(options: AssociativeRecallOptions, context: Any) -> Any:
    from infermix.quality.associative_recall import AssociativeRecallEvaluator

    return AssociativeRecallEvaluator(options, context)


def _protocol_needs(protocol: Protocol) -> Features:
    return frozenset({"engine:score_decode" if protocol == "decode" else "engine:score"})


def _perplexity_needs(options: PerplexityOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return _protocol_needs(options.protocol)


def _agreement_needs(options: AgreementOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return _protocol_needs(options.protocol) | {"engine:logits"}


COMPONENTS = (
    Component(
        name="perplexity",
        role=Role.EVALUATOR,
        summary="perplexity of a text under a named protocol",
        options=PerplexityOptions,
        build=_build_perplexity,
        needs=_perplexity_needs,
    ),
    Component(
        name="agreement",
        role=Role.EVALUATOR,
        summary="KL divergence, top-1 agreement and first greedy divergence against the reference parts",
        options=AgreementOptions,
        build=_build_agreement,
        needs=_agreement_needs,
    ),
    Component(
        name="passkey",
        role=Role.EVALUATOR,
        summary="retrieval of a number hidden in a long text, by length and depth",
        options=PasskeyOptions,
        build=_build_passkey,
    ),
    Component(
        name="associative_recall",
        role=Role.EVALUATOR,
        summary="recall of one of many pairs that a prompt states, by their number",
        options=AssociativeRecallOptions,
        build=_build_associative_recall,
    ),
)
