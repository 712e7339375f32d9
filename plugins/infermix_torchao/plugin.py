"""torchao: int8 and int4 weights, FP8 weights, FP8 weights and activations."""

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

#: FP8 products need tensor cores of compute capability 8.9, tinygemm's int4 products those of 8.0.
_FP8_CAPABILITY, _INT4_CAPABILITY = 89, 80
#: Rows of tinygemm's weights come in multiples of this many.
_PADDED = 1024


class TorchaoOptions(QuantizerOptions, frozen=True, kw_only=True):
    method: Annotated[
        Literal["int8", "int4", "fp8", "fp8_dynamic"],
        Meta(description="weights only (int8 and fp8 per output, int4 in groups), or FP8 activations per token too"),
    ] = "int8"
    group_size: Annotated[
        Literal[32, 64, 128, 256], Meta(description="int4: weights that share a scale", extra={"unit": "weights"})
    ] = 64
    skip: Annotated[
        tuple[str, ...], Meta(description="patterns (as in a shell) of module names that stay as they are")
    ] = UNTOUCHED


def _build(options: TorchaoOptions, context: None) -> Any:
    from infermix_torchao.quantizer import TorchaoQuantizer

    return TorchaoQuantizer(options)


def _needs(options: TorchaoOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    if options.method == "fp8_dynamic":
        return frozenset({"device:cuda", "dtype:bfloat16"}) | _capable(machine, _FP8_CAPABILITY)
    if options.method == "int4":
        return _int4_needs(options, model, machine)
    return frozenset({"device:cpu|device:cuda"})


def _int4_needs(options: TorchaoOptions, model: ModelFacts, machine: MachineFacts) -> Features:
    """On a GPU the kernels compute in bf16 and rows are padded; on a CPU groups of 256 are not packed."""
    needs = {"device:cpu|device:cuda"} | _capable(machine, _INT4_CAPABILITY)
    if machine.device.startswith("cuda"):
        needs |= {"dtype:bfloat16", *_padded(options, model)}
    elif options.group_size == 256:
        needs.add("device:cuda")
    if options.skip == TorchaoOptions().skip:
        needs |= group_needs(model, options.group_size)
    return frozenset(needs)


def _padded(options: TorchaoOptions, model: ModelFacts) -> set[str]:
    """Rows whose padding takes more than the numbers themselves are refused: little would be saved."""
    widths = sorted(each.in_features for each in model.matrices if each.kind in ("attention", "mlp", "shared_expert"))
    short = [width for width in widths if -(-width // _PADDED) * _PADDED > 2 * width]
    known = options.skip == TorchaoOptions().skip
    return (
        {f"inputs:{_PADDED // 2} or more, since rows are padded to {_PADDED}, not {short[0]}"}
        if short and known
        else set()
    )


def _capable(machine: MachineFacts, minimum: int) -> Features:
    """A device that is too old is refused by asking for the first compute capability that will do."""
    old = machine.compute_capability is not None and machine.compute_capability < minimum
    return frozenset({f"sm:{minimum}"} if old else ())


def _weight_bits(options: TorchaoOptions) -> float:
    """int4: scale and zero point of 16 bits per group; scales of whole rows depend on the model."""
    return 4 + 32 / options.group_size if options.method == "int4" else 8.0


@hookimpl
def infermix_quantizer() -> list[Component]:
    return [
        Component(
            name="torchao",
            role=Role.QUANTIZER,
            summary="int8, int4 or FP8 weights as the library torchao stores and multiplies them",
            build=_build,
            options=TorchaoOptions,
            requires=("torchao",),
            extra="torchao",
            needs=_needs,
            lossless=lambda options: False,
            weight_bits=_weight_bits,
            source="https://github.com/pytorch/ao",
        )
    ]
