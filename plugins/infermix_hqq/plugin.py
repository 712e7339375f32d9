"""hqq: half-quadratic quantization by its authors' library (Badri and Shaji, 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Features, Role
from infermix.roles.quantizer import QuantizerOptions
from infermix.toolkit.group_sizes import group_needs
from infermix.toolkit.skip import UNTOUCHED
from msgspec import Meta

if TYPE_CHECKING:
    from infermix.roles.facts import MachineFacts, ModelFacts


class HqqLibraryOptions(QuantizerOptions, frozen=True, kw_only=True):
    bits: Annotated[Literal[8, 4, 3, 2, 1], Meta(description="bits of a stored weight", extra={"unit": "bits"})] = 4
    group_size: Annotated[int, Meta(ge=8, description="weights that share a scale", extra={"unit": "weights"})] = 64
    axis: Annotated[
        Literal[0, 1],
        Meta(description="1: groups lie inside a row, as kernels want them; 0: across rows, more exact"),
    ] = 1
    skip: Annotated[
        tuple[str, ...], Meta(description="patterns (as in a shell) of module names that stay as they are")
    ] = UNTOUCHED


def _build(options: HqqLibraryOptions, context: None) -> Any:
    from infermix_hqq.quantizer import HqqLibraryQuantizer

    return HqqLibraryQuantizer(options)


def _needs(options: HqqLibraryOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    inside_rows = options.axis == 1 and options.skip == HqqLibraryOptions().skip
    return frozenset({"device:cpu|device:cuda"}) | (group_needs(model, options.group_size) if inside_rows else set())


def _weight_bits(options: HqqLibraryOptions) -> float:
    """Scale and zero point of 16 bits per group; 3 bits are stored ten to a word of 32."""
    return (3.2 if options.bits == 3 else options.bits) + 32 / options.group_size


@hookimpl
def infermix_quantizer() -> list[Component]:
    return [
        Component(
            name="hqq_library",
            role=Role.QUANTIZER,
            summary="half-quadratic quantization as the library hqq does it; hqq is the native one",
            build=_build,
            options=HqqLibraryOptions,
            requires=("hqq",),
            extra="hqq",
            needs=_needs,
            lossless=lambda options: False,
            weight_bits=_weight_bits,
            source="https://github.com/mobiusml/hqq",
        )
    ]
