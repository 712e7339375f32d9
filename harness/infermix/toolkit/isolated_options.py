"""Options that quantizers in an environment of their own share. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta

from infermix.roles.component import Features
from infermix.toolkit.calibration import CalibratedOptions
from infermix.toolkit.isolated import MOST_PERPLEXITY_RATIO

if TYPE_CHECKING:
    from infermix.roles.facts import ModelFacts

GroupSize = Annotated[
    int,
    Meta(ge=0, description="weights of a row that share a scale; 0: the whole row", extra={"unit": "weights"}),
]
Symmetric = Annotated[bool, Meta(description="zero point in the middle of the range; false fits it to the weights")]
ActOrder = Annotated[
    bool,
    Meta(description="round columns of large activations first; groups follow that order unless they are static"),
]
Damping = Annotated[
    float, Meta(gt=0, lt=1, description="added to the diagonal of the Hessian, as a share of its mean")
]


class IsolatedOptions(CalibratedOptions, frozen=True, kw_only=True):
    most_perplexity_ratio: Annotated[
        float,
        Meta(
            gt=1,
            description="a checkpoint whose perplexity is more times that of the unquantized model counts as wrong; "
            "small models need more room, and so do few bits",
        ),
    ] = MOST_PERPLEXITY_RATIO


class GroupedOptions(IsolatedOptions, frozen=True, kw_only=True):
    """Integers with a scale and a zero point per group."""

    bits: Annotated[Literal[2, 3, 4, 8], Meta(description="bits of a stored weight", extra={"unit": "bits"})] = 4
    group_size: GroupSize = 64
    symmetric: Symmetric = True


def stored_bits(bits: int, group_size: int, *, symmetric: bool) -> float:
    """Bits per weight with 16-bit scales and, where they are fitted, zero points of 8 bits; whole rows count none."""
    return bits + ((16 if symmetric else 24) / group_size if group_size else 0)


def described(bits: int, group_size: int, *, symmetric: bool) -> str:
    """Such as `w4 group 64 symmetric`."""
    size = f"group {group_size}" if group_size else "per channel"
    return f"w{bits} {size} {'symmetric' if symmetric else 'asymmetric'}"


def needs_model(library: str, model_types: frozenset[str], model: ModelFacts) -> Features:
    """Refuses random weights, which have no files, and families that the library does not know or runs as causal."""
    files = {"weights:files"} if model.dummy_weights else set()
    known = model.model_type in model_types and "model:bidirectional" not in model.features
    return frozenset(files if known else files | {f"model:{library}"})
