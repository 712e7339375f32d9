"""Quantizer `none`: the weights stay as the model has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from infermix.roles.quantizer import QuantizationReport, QuantizerContext

if TYPE_CHECKING:
    from torch import nn


class NoQuantizer:
    def load_arguments(self) -> Mapping[str, Any]:
        return {}

    def apply(self, model: nn.Module, context: QuantizerContext) -> QuantizationReport:
        bits = 8 * max((parameter.element_size() for parameter in model.parameters()), default=0)
        return QuantizationReport(method="none", bits_per_weight=float(bits), quantized_bytes=0)
