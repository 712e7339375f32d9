"""Decoders that gain more than one token per forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Features, Options, Role
from infermix.toolkit.calibration import CalibrationOptions
from msgspec import Meta

if TYPE_CHECKING:
    from infermix.roles.decoder import DecoderContext
    from infermix.roles.facts import MachineFacts, ModelFacts


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


class DraftModelOptions(Options, frozen=True, kw_only=True):
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
            description="for sampled requests. rejection: most drafts stay, the target's distribution; coupled: "
            "draft and target share their noise, the very tokens of plain decoding"
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


def _needs_truncate(options: Any, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"kv:truncate"})


def _drafts(options: Any, model: ModelFacts, machine: MachineFacts) -> Features:
    """What is measured depends on the text: random tokens would say nothing."""
    return frozenset({"decoder:drafts"})


def _build_prompt_lookup(options: PromptLookupOptions, context: DecoderContext) -> Any:
    from infermix.toolkit.verification import VerifyingDecoder

    from infermix_decoders.prompt_lookup import PromptLookup

    return VerifyingDecoder(
        PromptLookup(options.min_match_tokens),
        options.num_draft_tokens,
        context.max_model_len,
        uniform=context.device.startswith("cuda"),
        clock_ns=context.clock_ns,
    )


def _build_jacobi(options: JacobiOptions, context: DecoderContext) -> Any:
    from infermix.toolkit.verification import VerifyingDecoder

    from infermix_decoders.jacobi import JacobiGuesses

    return VerifyingDecoder(
        JacobiGuesses(),
        options.num_draft_tokens,
        context.max_model_len,
        uniform=context.device.startswith("cuda"),
        clock_ns=context.clock_ns,
    )


def _build_speculative(options: SpeculativeOptions, context: DecoderContext) -> Any:
    from infermix_decoders.build_speculative import build_speculative

    return build_speculative(options, context)


def _build_self_speculative(options: SelfSpeculativeOptions, context: DecoderContext) -> Any:
    from infermix_decoders.build_self_speculative import build_self_speculative

    return build_self_speculative(options, context)


@hookimpl
def infermix_decoder() -> list[Component]:
    return [
        Component(
            name="prompt_lookup",
            role=Role.DECODER,
            summary="drafts what followed the same text before, verified in one forward",
            build=_build_prompt_lookup,
            options=PromptLookupOptions,
            requires=("torch",),
            needs=_needs_truncate,
            provides=_drafts,
        ),
        Component(
            name="jacobi",
            role=Role.DECODER,
            summary="guesses a window of tokens and refines it by the target's own answers until they agree",
            build=_build_jacobi,
            options=JacobiOptions,
            requires=("torch",),
            needs=_needs_truncate,
            provides=_drafts,
        ),
        Component(
            name="self_speculative",
            role=Role.DECODER,
            summary="the target drafts for itself with some of its layers skipped, and verifies in one forward",
            build=_build_self_speculative,
            options=SelfSpeculativeOptions,
            requires=("torch", "transformers"),
            needs=_needs_truncate,
            provides=_drafts,
        ),
        Component(
            name="speculative",
            role=Role.DECODER,
            summary="a draft model proposes, the target verifies in one forward",
            build=_build_speculative,
            options=SpeculativeOptions,
            requires=("torch",),
            needs=_needs_truncate,
            provides=_drafts,
        ),
    ]
