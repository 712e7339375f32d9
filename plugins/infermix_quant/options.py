"""Options of the native quantizers. No torch."""

from __future__ import annotations

from typing import Annotated, Literal

from infermix.roles.quantizer import QuantizerOptions
from infermix.toolkit.calibration import CalibratedOptions
from infermix.toolkit.skip import UNTOUCHED
from msgspec import Meta

Bits = Literal[2, 3, 4, 8]
Skip = Annotated[tuple[str, ...], Meta(description="patterns (as in a shell) of module names that stay as they are")]
GroupSize = Annotated[
    int,
    Meta(ge=0, description="weights of a row that share a scale; 0: the whole row", extra={"unit": "weights"}),
]
BitsWidth = Annotated[Bits, Meta(description="bits of a stored weight", extra={"unit": "bits"})]
BitsFor = Annotated[
    dict[str, Bits],
    Meta(description="mixed precision: pattern of module names -> bits, the first that matches counts"),
]
Symmetric = Annotated[
    bool, Meta(description="scale only; false adds a zero point per scale and uses the range fully")
]


class HqqOptions(QuantizerOptions, frozen=True, kw_only=True):
    bits: BitsWidth = 4
    group_size: GroupSize = 64
    bits_for: BitsFor = {}
    skip: Skip = UNTOUCHED
    iterations: Annotated[int, Meta(ge=0, description="alternating steps; it stops when the error grows")] = 20
    norm: Annotated[float, Meta(gt=0, le=1, description="p of the error norm |W - Wq|_p that is made small")] = 0.7
    beta: Annotated[float, Meta(gt=0, description="weight of the quadratic term at the start")] = 10.0
    kappa: Annotated[float, Meta(ge=1, description="factor by which beta grows at every step")] = 1.01


class Nf4Options(QuantizerOptions, frozen=True, kw_only=True):
    block_size: Annotated[
        int, Meta(ge=8, description="weights that share a scale, across rows", extra={"unit": "weights"})
    ] = 64
    double_quant: Annotated[bool, Meta(description="scales in 8 bits instead of fp32")] = False
    scale_block: Annotated[
        int, Meta(ge=8, description="scales that share a scale (double_quant)", extra={"unit": "scales"})
    ] = 256
    skip: Skip = UNTOUCHED


class LlmInt8Options(QuantizerOptions, frozen=True, kw_only=True):
    """Values, not the columns of the paper, are the default.

    What a prefill measures (hundreds of rows in a call share their columns) is not what a decode step of few rows
    computes; with values both are one function of the row, whatever runs beside it.
    """

    threshold: Annotated[
        float, Meta(ge=0, description="activations of a larger magnitude are multiplied in the model's dtype")
    ] = 6.0
    outliers: Annotated[
        Literal["values", "columns"],
        Meta(
            description="what is multiplied in the model's dtype; values: those above the threshold, so that a row "
            "does not depend on its company; columns, as in the paper: all of a column that exceeds it in any row of "
            "the call, padded ones too"
        ),
    ] = "values"
    skip: Skip = UNTOUCHED


Observer = Annotated[
    Literal["minmax", "percentile", "mse"],
    Meta(
        description="activations: tensor; where the static scale ends: at the largest calibration value, where a "
        "share of them lies inside, or where rounding and clipping err least"
    ),
]
Percentile = Annotated[
    float, Meta(gt=50, le=100, description="observer: percentile; share of values inside", extra={"unit": "%"})
]


class Int8Options(CalibratedOptions, frozen=True, kw_only=True):
    activations: Annotated[
        Literal["token", "tensor"],
        Meta(description="token: a scale each, found on the way; tensor: one static scale per input"),
    ] = "token"
    observer: Observer = "minmax"
    percentile: Percentile = 99.99
    skip: Skip = UNTOUCHED

    @property
    def calibrates(self) -> bool:
        return self.activations == "tensor"


class Fp8Options(CalibratedOptions, frozen=True, kw_only=True):
    weights: Annotated[
        Literal["channel", "tensor"], Meta(description="what shares a scale: an output, or the matrix")
    ] = "channel"
    activations: Annotated[
        Literal["token", "tensor", "none"],
        Meta(description="token: rounded with a scale each; tensor: with one static scale per input; none: left"),
    ] = "token"
    observer: Observer = "minmax"
    percentile: Percentile = 99.99
    skip: Skip = UNTOUCHED

    @property
    def calibrates(self) -> bool:
        return self.activations == "tensor"


class GptqOptions(CalibratedOptions, frozen=True, kw_only=True):
    bits: BitsWidth = 4
    group_size: GroupSize = 64
    symmetric: Symmetric = True
    bits_for: BitsFor = {}
    skip: Skip = UNTOUCHED
    act_order: Annotated[
        bool, Meta(description="round columns of large activations first; groups follow that order")
    ] = False
    static_groups: Annotated[
        bool, Meta(description="fit all scales beforehand, so that act_order leaves columns where they are")
    ] = False
    damping: Annotated[
        float, Meta(gt=0, description="added to the diagonal of the Hessian, as a share of its mean")
    ] = 0.01
    block_size: Annotated[
        int, Meta(ge=1, description="columns that are updated together", extra={"unit": "columns"})
    ] = 128
    sequential: Annotated[
        Literal["layer", "operator"],
        Meta(description="what sees quantized inputs: the next decoder layer, or also the next linears of a layer"),
    ] = "layer"


class AwqOptions(CalibratedOptions, frozen=True, kw_only=True):
    bits: BitsWidth = 4
    group_size: GroupSize = 64
    symmetric: Symmetric = False
    bits_for: BitsFor = {}
    skip: Skip = UNTOUCHED
    grid: Annotated[int, Meta(ge=2, description="exponents of the activation magnitude that are tried")] = 20
    clip: Annotated[bool, Meta(description="shrink the range of a group where that lowers its error")] = True


class SmoothQuantOptions(CalibratedOptions, frozen=True, kw_only=True):
    alpha: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | Literal["search", "fit"],
        Meta(
            description="share of the difficulty that moves from activations to weights; search: for every input the "
            "one of 0, 0.05 ... 1 (or no scaling) whose rounded outputs err least on calibration samples; fit: no "
            "exponent, but a scale for every channel, by a descent from there on the error expected of rounding"
        ),
    ] = 0.5
    fold: Annotated[
        Literal["norms", "all"],
        Meta(
            description="what takes the inverse scales: norms only, as in the paper, or also linears whose outputs "
            "another one reads (up_proj before down_proj, v_proj before o_proj)"
        ),
    ] = "norms"
    activations: Annotated[
        Literal["token", "tensor"],
        Meta(description="token: a scale each, found on the way; tensor: one static scale per input"),
    ] = "token"
    observer: Observer = "minmax"
    percentile: Percentile = 99.99
    skip: Skip = UNTOUCHED


def weight_only_bits(options: GptqOptions | AwqOptions | HqqOptions, zero_bits: int) -> float:
    """Bits per weight with 16-bit scales and zero points of `zero_bits`.

    `bits_for` is not counted, nor are the scales of whole rows: both depend on the model.
    """
    return options.bits + ((16 + zero_bits) / options.group_size if options.group_size else 0)


def nf4_bits(options: Nf4Options) -> float:
    """4 bits, and per block an fp32 scale or one of 8 bits with an fp32 scale per `scale_block`."""
    scale = 8 + 32 / options.scale_block if options.double_quant else 32
    return 4 + scale / options.block_size
