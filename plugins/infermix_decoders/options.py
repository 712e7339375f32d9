"""What can be set of each decoder: no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from infermix.roles.batch import MAX_TREE_TOKENS
from infermix.roles.component import Options
from infermix.roles.decoder import DecoderOptions, InnerDecoder, SecondModelUse
from infermix.toolkit.calibration import CalibrationOptions
from msgspec import Meta

if TYPE_CHECKING:
    from infermix.roles.facts import ModelFacts


class PromptLookupOptions(Options, frozen=True):
    num_draft_tokens: Annotated[
        int, Meta(ge=1, le=63, description="most tokens proposed per step", extra={"unit": "tokens"})
    ] = 8
    min_match_tokens: Annotated[
        int,
        Meta(ge=1, description="shortest repeated text whose continuation is proposed", extra={"unit": "tokens"}),
    ] = 2


class JacobiOptions(Options, frozen=True):
    num_draft_tokens: Annotated[
        int,
        Meta(ge=1, le=63, description="positions guessed and computed together per step", extra={"unit": "tokens"}),
    ] = 8


class LookaheadOptions(Options, frozen=True):
    """Window and guesses together hold at most 63 tokens: (window + guesses) * (ngram - 1)."""

    window: Annotated[
        int, Meta(ge=1, le=31, description="columns of the Jacobi window", extra={"unit": "tokens"})
    ] = 8
    ngram: Annotated[
        int, Meta(ge=2, le=16, description="length of the n-grams that it finds", extra={"unit": "tokens"})
    ] = 4
    guesses: Annotated[int, Meta(ge=1, le=31, description="n-grams verified per step, and kept per first token")] = 8
    pool_from_prompt: Annotated[bool, Meta(description="begin with the n-grams of the prompt")] = True

    def __post_init__(self) -> None:
        num_nodes = (self.window + self.guesses) * (self.ngram - 1)
        if num_nodes >= MAX_TREE_TOKENS:
            raise ValueError(
                f"(window {self.window} + guesses {self.guesses}) * (ngram {self.ngram} - 1) is {num_nodes}: "
                f"a tree has at most {MAX_TREE_TOKENS - 1} tokens"
            )


class SyntheticOptions(Options, frozen=True):
    num_draft_tokens: Annotated[
        int, Meta(ge=1, le=63, description="drafts verified per step", extra={"unit": "tokens"})
    ] = 7
    tokens_per_forward: Annotated[
        float,
        Meta(ge=1, description="mean tokens of a sequence per forward, at most num_draft_tokens + 1"),
    ] = 3.0

    def __post_init__(self) -> None:
        if self.tokens_per_forward > self.num_draft_tokens + 1:
            raise ValueError(
                f"{self.num_draft_tokens} drafts give at most {self.num_draft_tokens + 1} tokens per forward, not "
                f"{self.tokens_per_forward:g}"
            )


class DiffusionOptions(Options, frozen=True, kw_only=True):
    """How a model that fills in masks writes its text. Without a threshold, a step of a block keeps as many
    predictions as any other one, up to rounding.
    """

    block_length: Annotated[
        int,
        Meta(
            ge=1,
            description="tokens that are filled in together, in any order; blocks follow one another",
            extra={"unit": "tokens"},
        ),
    ] = 32
    steps_per_block: (
        Annotated[
            int, Meta(ge=1, description="forwards per block, at most one per token of it; default: one per token")
        ]
        | None
    ) = None
    remasking: Annotated[
        Literal["low_confidence", "random"],
        Meta(description="which predictions are masked again: those of the lowest probability, or any"),
    ] = "low_confidence"
    threshold: (
        Annotated[
            float,
            Meta(
                gt=0,
                le=1,
                description="instead of steps_per_block: keep every prediction of at least this probability, and the "
                "most probable one",
            ),
        ]
        | None
    ) = None
    mask_token_id: (
        Annotated[int, Meta(ge=0, description="id of the mask token; default: as the model's config says")] | None
    ) = None

    def __post_init__(self) -> None:
        if self.threshold is not None and self.steps_per_block is not None:
            raise ValueError("threshold and steps_per_block both say how many predictions a step keeps: set one")
        if self.threshold is not None and self.remasking == "random":
            raise ValueError("threshold is a probability, which remasking: random does not look at: set one of both")


class TokenHealingOptions(DecoderOptions, frozen=True, kw_only=True):
    num_tokens: Annotated[
        int, Meta(ge=1, le=8, description="tokens taken off the end of every prompt", extra={"unit": "tokens"})
    ] = 1
    decoder: Annotated[str, Meta(min_length=1, description="decoder that writes them again and goes on")] = (
        "autoregressive"
    )
    decoder_options: Annotated[dict[str, Any], Meta(description="options of that decoder")] = {}

    def __post_init__(self) -> None:
        if self.decoder == "token_healing":
            raise ValueError("token_healing inside token_healing: raise num_tokens instead")

    @property
    def drafts(self) -> bool:
        return self.decoder != "autoregressive"

    def inner_decoder(self) -> InnerDecoder:
        return InnerDecoder(self.decoder, self.decoder_options)


class BeamOptions(DecoderOptions, frozen=True, kw_only=True):
    num_beams: Annotated[int, Meta(ge=2, le=64, description="unfinished outputs kept per request")] = 4
    length_penalty: Annotated[
        float, Meta(description="scores are divided by length to this power; above 0 favours long outputs")
    ] = 1.0
    early_stopping: Annotated[
        bool | Literal["never"],
        Meta(
            description="true: stop with num_beams finished outputs; false: when none is likely to be improved; "
            "never: when none can be"
        ),
    ] = False

    def rows_per_sequence(self) -> int:
        return self.num_beams

    def most_outputs(self) -> int:
        return self.num_beams


class DraftModelOptions(DecoderOptions, frozen=True, kw_only=True):
    """How drafts of a model are made and judged."""

    num_draft_tokens: Annotated[
        int, Meta(ge=1, le=15, description="tokens drafted per step", extra={"unit": "tokens"})
    ] = 4
    adaptive: Annotated[
        bool,
        Meta(description="draft between 1 and num_draft_tokens, as many as the measured acceptance makes worthwhile"),
    ] = False
    acceptance: Annotated[
        Literal["rejection", "coupled"],
        Meta(
            description="for sampled requests. rejection: most drafts stay, the target's distribution; each round "
            "makes one draft more, so that draws depend on no preemption or company while the draft's KV has room; "
            "coupled: draft and target share their noise, the very tokens of plain decoding"
        ),
    ] = "rejection"


class SelfSpeculativeOptions(DraftModelOptions, frozen=True, kw_only=True):
    skip_layers: Annotated[
        tuple[Annotated[int, Meta(ge=0)], ...],
        Meta(description="layers that drafts do without, counted from 0; none: searched on the calibration text"),
    ] = ()
    calibration: Annotated[
        CalibrationOptions, Meta(description="text on which drafts should agree with the whole model")
    ] = CalibrationOptions(num_samples=4, sample_tokens=64)

    def misfits(self, facts: ModelFacts) -> Iterator[str]:
        given, number = self.skip_layers, facts.num_layers
        if any(index >= number for index in given) or len(set(given)) != len(given) or len(given) == number:
            yield (
                f"skip_layers {list(given)} do not fit a model with layers 0 to {number - 1}: name each layer once, "
                "and leave at least one"
            )

    def second_model(self) -> SecondModelUse:
        return SecondModelUse(shares_weights=True)


class SpeculativeOptions(DraftModelOptions, frozen=True, kw_only=True):
    draft: Annotated[
        str,
        Meta(
            min_length=1,
            description="draft model (package:NAME, directory, GGUF file or Hugging Face id), or `target`: "
            "another copy of the target's own checkpoint, which draft_quantizer makes smaller",
        ),
    ]
    draft_quantizer: Annotated[
        str | None, Meta(description="quantizer of the draft model: a smaller copy of the target as its draft")
    ] = None
    draft_quantizer_options: Annotated[dict[str, Any], Meta(description="options of that quantizer")] = {}

    def __post_init__(self) -> None:
        if self.draft_quantizer_options and self.draft_quantizer is None:
            raise ValueError("draft_quantizer_options need a draft_quantizer, whose options they are")

    def second_model(self) -> SecondModelUse:
        source = None if self.draft == "target" else self.draft
        return SecondModelUse(source, self.draft_quantizer, self.draft_quantizer_options)
