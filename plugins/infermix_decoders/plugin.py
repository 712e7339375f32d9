"""Decoders that gain more than one token per forward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Features, Role

from infermix_decoders.head_components import HEAD_COMPONENTS
from infermix_decoders.options import (
    BeamOptions,
    DiffusionOptions,
    JacobiOptions,
    LookaheadOptions,
    PromptLookupOptions,
    SelfSpeculativeOptions,
    SpeculativeOptions,
    SyntheticOptions,
    TokenHealingOptions,
)

if TYPE_CHECKING:
    from infermix.roles.decoder import DecoderContext
    from infermix.roles.facts import MachineFacts, ModelFacts


def _needs_truncate(options: Any, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"kv:truncate"})


def _needs_trees(options: Any, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"kv:truncate", "kv:move", "attn:tree_mask"})


def _drafts(options: Any, model: ModelFacts, machine: MachineFacts) -> Features:
    """What is measured depends on the text: random tokens would say nothing."""
    return frozenset({"decoder:drafts"})


def _drafts_by_model(options: Any, model: ModelFacts, machine: MachineFacts) -> Features:
    """A draft model computes its drafts one after the other, and takes back those that are rejected."""
    return frozenset({"decoder:drafts", "decoder:draft_model"})


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


def _build_lookahead(options: LookaheadOptions, context: DecoderContext) -> Any:
    from infermix.toolkit.tree_verification import TreeDecoder

    from infermix_decoders.lookahead import LookaheadDrafter

    return TreeDecoder(
        LookaheadDrafter(options.window, options.ngram, options.guesses, pool_from_prompt=options.pool_from_prompt),
        options.window + options.ngram - 2,
        context.max_model_len,
        uniform=context.device.startswith("cuda"),
        clock_ns=context.clock_ns,
    )


def _build_synthetic(options: SyntheticOptions, context: DecoderContext) -> Any:
    from infermix_decoders.synthetic_acceptance import SyntheticDecoder

    return SyntheticDecoder(
        options.tokens_per_forward,
        options.num_draft_tokens,
        context.max_model_len,
        uniform=context.device.startswith("cuda"),
        clock_ns=context.clock_ns,
    )


def _build_token_healing(options: TokenHealingOptions, context: DecoderContext) -> Any:
    from infermix_decoders.token_healing import build_token_healing

    return build_token_healing(options, context)


def _healing_needs(options: TokenHealingOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return _needs_truncate(options, model, machine) if options.drafts else frozenset()


def _healing_provides(options: TokenHealingOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return _drafts(options, model, machine) if options.drafts else frozenset()


def _build_beam(options: BeamOptions, context: DecoderContext) -> Any:
    from infermix_decoders.build_beam import build_beam

    return build_beam(options, context)


def _build_diffusion(options: DiffusionOptions, context: DecoderContext) -> Any:
    from infermix_decoders.diffusion import build_diffusion

    return build_diffusion(options, context)


def _diffusion_needs(options: DiffusionOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"model:bidirectional", *(("model:mask_token",) if options.mask_token_id is None else ())})


def _diffusion_provides(options: DiffusionOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"decoder:unmasks", *(("decoder:confident",) if options.threshold is not None else ())})


def _build_speculative(options: SpeculativeOptions, context: DecoderContext) -> Any:
    from infermix_decoders.build_speculative import build_speculative

    return build_speculative(options, context)


def _build_self_speculative(options: SelfSpeculativeOptions, context: DecoderContext) -> Any:
    from infermix_decoders.build_self_speculative import build_self_speculative

    return build_self_speculative(options, context)


def _search(options: Any, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"decoder:search"})


def _needs_fork(options: Any, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"kv:fork"})


COMPONENTS = (
    Component(
        name="beam",
        role=Role.DECODER,
        summary="beam search: the best whole outputs, several rows per request that share their KV",
        build=_build_beam,
        options=BeamOptions,
        requires=("torch",),
        needs=_needs_fork,
        provides=_search,
        lossless=lambda options: False,
    ),
    Component(
        name="diffusion",
        role=Role.DECODER,
        summary="fills in masks block by block, the most confident predictions first; for masked-diffusion models",
        build=_build_diffusion,
        options=DiffusionOptions,
        requires=("torch",),
        needs=_diffusion_needs,
        provides=_diffusion_provides,
        lossless=lambda options: False,
        source="https://arxiv.org/abs/2502.09992",
    ),
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
        name="lookahead",
        role=Role.DECODER,
        summary="a Jacobi window that finds n-grams and a pool of them that is verified, both in the same forward",
        build=_build_lookahead,
        options=LookaheadOptions,
        requires=("torch",),
        needs=_needs_trees,
        provides=_drafts,
        source="https://arxiv.org/abs/2402.02057",
    ),
    Component(
        name="self_speculative",
        role=Role.DECODER,
        summary="the target drafts for itself with some of its layers skipped, and verifies in one forward",
        build=_build_self_speculative,
        options=SelfSpeculativeOptions,
        requires=("torch", "transformers"),
        needs=_needs_truncate,
        provides=_drafts_by_model,
    ),
    Component(
        name="speculative",
        role=Role.DECODER,
        summary="a draft model proposes, the target verifies in one forward",
        build=_build_speculative,
        options=SpeculativeOptions,
        requires=("torch",),
        needs=_needs_truncate,
        provides=_drafts_by_model,
    ),
    Component(
        name="synthetic_acceptance",
        role=Role.DECODER,
        summary="for cost only: verifies drafts and keeps a stated number, right or wrong; outputs mean nothing",
        build=_build_synthetic,
        options=SyntheticOptions,
        requires=("torch",),
        needs=_needs_truncate,
        lossless=lambda options: False,
    ),
    Component(
        name="token_healing",
        role=Role.DECODER,
        summary="another decoder that writes the last tokens of every prompt again",
        build=_build_token_healing,
        options=TokenHealingOptions,
        requires=("torch", "transformers"),
        needs=_healing_needs,
        provides=_healing_provides,
        lossless=lambda options: False,
    ),
)


@hookimpl
def infermix_decoder() -> list[Component]:
    return [*COMPONENTS, *HEAD_COMPONENTS]
