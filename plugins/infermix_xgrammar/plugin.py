"""Outputs that follow a JSON schema or a regular expression (Dong et al., 2024, "XGrammar")."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Features, Role
from infermix.roles.decoder import DecoderOptions, InnerDecoder
from msgspec import Meta

if TYPE_CHECKING:
    from infermix.roles.decoder import DecoderContext
    from infermix.roles.facts import MachineFacts, ModelFacts


class JsonConstraint(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="use", tag="json"
):
    """A JSON value that a schema accepts."""

    schema: Annotated[dict[str, Any], Meta(description="JSON Schema; empty: any JSON value")] = {}
    any_whitespace: Annotated[
        bool, Meta(description="spaces and line breaks wherever JSON allows them (with a schema; models may ramble)")
    ] = False


class RegexConstraint(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="use", tag="regex"
):
    """A text that a regular expression matches as a whole."""

    pattern: Annotated[str, Meta(min_length=1, description="regular expression")]


class ConstrainedOptions(DecoderOptions, frozen=True, kw_only=True):
    constraint: Annotated[JsonConstraint | RegexConstraint, Meta(description="what every output has to be")]
    decoder: Annotated[str, Meta(min_length=1, description="decoder that works under the constraint")] = (
        "autoregressive"
    )
    decoder_options: Annotated[dict[str, Any], Meta(description="options of that decoder")] = {}

    @property
    def drafts(self) -> bool:
        return self.decoder != "autoregressive"

    def inner_decoder(self) -> InnerDecoder:
        return InnerDecoder(self.decoder, self.decoder_options)


def _build(options: ConstrainedOptions, context: DecoderContext) -> Any:
    from infermix_xgrammar.constrained import build_constrained

    return build_constrained(options, context)


def _needs(options: ConstrainedOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"kv:truncate"}) if options.drafts else frozenset()


def _provides(options: ConstrainedOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    return frozenset({"decoder:drafts"}) if options.drafts else frozenset()


@hookimpl
def infermix_decoder() -> list[Component]:
    return [
        Component(
            name="constrained",
            role=Role.DECODER,
            summary="another decoder whose outputs follow a JSON schema or a regular expression",
            build=_build,
            options=ConstrainedOptions,
            requires=("xgrammar",),
            extra="constrained",
            needs=_needs,
            provides=_provides,
            lossless=lambda options: False,
            source="https://github.com/mlc-ai/xgrammar",
        )
    ]
