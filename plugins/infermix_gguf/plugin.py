"""GGUF files: their blocks stay packed in memory instead of being expanded at load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Features, Role
from infermix.roles.quantizer import QuantizerOptions
from msgspec import Meta

if TYPE_CHECKING:
    from infermix.roles.facts import MachineFacts, ModelFacts


class GgufOptions(QuantizerOptions, frozen=True, kw_only=True):
    skip: Annotated[
        tuple[str, ...], Meta(description="patterns (as in a shell) of module names that are expanded at load")
    ] = ()


def _build(options: GgufOptions, context: None) -> Any:
    from infermix_gguf.quantizer import GgufQuantizer

    return GgufQuantizer(options.skip)


def _needs(options: GgufOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    """Refuses a model that comes from no GGUF file."""
    return frozenset() if "model:gguf" in model.features else frozenset({"weights:gguf_blocks"})


@hookimpl
def infermix_quantizer() -> list[Component]:
    return [
        Component(
            name="gguf",
            role=Role.QUANTIZER,
            summary="blocks of the model's GGUF file (Q4_K_M, Q8_0, ...) as they are, expanded in every product: "
            "saves memory, not time",
            build=_build,
            options=GgufOptions,
            requires=("torch", "gguf"),
            needs=_needs,
            source="https://github.com/ggml-org/ggml/blob/master/docs/gguf.md",
        )
    ]
