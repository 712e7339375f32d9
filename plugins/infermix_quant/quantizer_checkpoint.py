"""Quantizer `checkpoint`: takes the quantized weights that the model's own files hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from infermix.errors import UserError
from infermix.roles.component import Options
from infermix.roles.quantizer import QuantizationReport, QuantizerContext
from infermix.toolkit.linears import check_finite, find_linears, replace_module
from torch import nn

from infermix_quant import common
from infermix_quant.checkpoint_read import PackedCheckpoint
from infermix_quant.linear_grouped import QuantLinear


class CheckpointQuantizer:
    """Replaces every linear that the files hold in packed form."""

    reads_packed = True

    def __init__(self, options: Options) -> None:
        self._options = options

    def load_arguments(self) -> Mapping[str, Any]:
        return {}

    def apply(self, model: nn.Module, context: QuantizerContext) -> QuantizationReport:
        """Raises `UserError` when the files hold no packed weights, others than the model has, or infinite ones."""
        if context.directory is None:
            raise UserError("random weights are not packed", key="parts.quantizer", hint="name a real checkpoint")
        packed = PackedCheckpoint(context.directory, context.device)
        made = read_linears(model, packed, context)
        check_finite(model)
        _, skipped = find_linears(model)
        left = tuple(name for name, module in model.named_modules() if type(module) is nn.Linear and name not in made)
        done = common.report(packed.describe(), made, tuple(dict.fromkeys((*skipped, *left))))
        return common.on_device(model, context, done)


def read_linears(model: nn.Module, packed: PackedCheckpoint, context: QuantizerContext) -> dict[str, QuantLinear]:
    """Replace the packed linears of `model`; name -> new module."""
    found = {linear.name: linear for linear in find_linears(model)[0]}
    unknown = [name for name in packed.linears if name not in found]
    if unknown or not packed.linears:
        what = f"{unknown[0]} is packed and no linear of the model" if unknown else "no packed linear is in the files"
        raise UserError(what, where=str(packed.directory), key="model.source")
    made: dict[str, QuantLinear] = {}
    for index, name in enumerate(packed.linears):
        made[name] = packed.read(found[name])
        replace_module(model, name, made[name])
        if context.progress is not None:
            context.progress("quantize", (index + 1) / len(packed.linears))
    return made
