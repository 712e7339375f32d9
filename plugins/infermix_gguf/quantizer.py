"""Quantizer `gguf`: puts the blocks of the model's file where their expanded weights are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from infermix.errors import UserError
from infermix.roles.quantizer import QuantizationReport, QuantizerContext
from infermix.toolkit.linears import FoundLinear, convert_linears, find_linears
from torch import nn

from infermix_gguf.blocks import BLOCKS, expand
from infermix_gguf.linear import GgufLinear
from infermix_gguf.tensors import GgufTensors, row_order, rows_of


class GgufQuantizer:
    """Lossless against the weights that the loader expands: each linear is compared with them bit by bit.

    A linear whose weights are not those of one tensor in blocks that `blocks.py` knows (perhaps in another order of
    rows) stays expanded, and the report says why.
    """

    def __init__(self, skip: Sequence[str]) -> None:
        self._skip = skip

    def load_arguments(self) -> Mapping[str, Any]:
        return {}

    def apply(self, model: nn.Module, context: QuantizerContext) -> QuantizationReport:
        """Raises `UserError` for a model that comes from no GGUF file, and when no linear can stay packed."""
        if context.file is None:
            raise UserError(
                "the model comes from no GGUF file", key="parts.quantizer", hint="model: FILE.gguf, or quantizer none"
            )
        found, skipped = find_linears(model, self._skip)
        config: Any = model.config
        tensors = GgufTensors(context.file, config.get_text_config().num_hidden_layers)
        packed: dict[str, GgufLinear] = {}
        left: dict[str, str] = {}
        for linear in found:
            made = _packed(linear, tensors)
            if isinstance(made, GgufLinear):
                packed[linear.name] = made
            else:
                left[linear.name] = made
        if not packed:
            why = next(iter(left.values()), "every linear is left out")
            raise UserError(f"no linear can stay packed: {why}", where=str(context.file), key="parts.quantizer")
        kept = [linear for linear in found if linear.name in packed]
        convert_linears(model, kept, lambda linear: packed[linear.name], context.progress)
        return _report(packed, left, skipped)


def _packed(linear: FoundLinear, tensors: GgufTensors) -> GgufLinear | str:
    """The linear over its blocks, or why it stays expanded."""
    tensor = tensors.of(linear.name)
    if tensor is None:
        return "no tensor by its name"
    kind = tensor.tensor_type.name
    if kind not in BLOCKS:
        return f"{kind} is not read in blocks"
    rows = rows_of(tensor).to(linear.weight.device)
    order = row_order(expand(rows, kind).to(linear.weight.dtype), linear.weight.detach())
    if order is None:
        return f"its {kind} tensor holds other rows than the model"
    return GgufLinear(rows[order.to(rows.device)].contiguous(), kind, linear.in_features, linear.bias)


def _report(
    packed: Mapping[str, GgufLinear], left: Mapping[str, str], skipped: tuple[str, ...]
) -> QuantizationReport:
    num_bytes = sum(linear.num_bytes for linear in packed.values())
    num_weights = sum(linear.in_features * linear.out_features for linear in packed.values())
    kinds = Counter(linear.kind for linear in packed.values())
    return QuantizationReport(
        method="gguf " + ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())),
        bits_per_weight=8 * num_bytes / num_weights,
        quantized_bytes=num_bytes,
        kernels={name: linear.kernel for name, linear in packed.items()},
        skipped=(*skipped, *left),
        details={"expanded": dict(Counter(left.values()))} if left else {},
    )
