"""Linears whose numbers and products belong to another library: what wrappers of such libraries share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infermix.errors import Unsupported, WrongResult
from infermix.roles.quantizer import QuantizationReport, QuantizerContext
from infermix.toolkit.linears import FoundLinear, convert_linears, finite_linears

#: Rows of the check of every kind and shape: one, a few, more than a tile.
_CHECKED_ROWS = (1, 5, 40)
#: Relative error of a matrix at which a method has destroyed it rather than rounded it.
_DESTROYED = 0.5


@dataclass(frozen=True)
class LibraryProduct:
    """One linear as a library holds it.

    `product [..., K] -> [..., N]` includes the bias. `weight [N, K]` is what it multiplies by, dequantized before
    the first product; it is compared and let go. `stored()` lists the tensors that are read (numbers, scales, zero
    points; not the bias) as they are by then: libraries repack them at the first product. `tolerance` bounds the
    relative error of a product with random normal rows: the rounding of its arithmetic, activations included.
    """

    kernel: str
    product: Callable[[Tensor], Tensor]
    weight: Tensor
    stored: Callable[[], Sequence[Tensor]]
    tolerance: float


class LibraryLinear(nn.Module):
    """Calls the library. Its tensors are buffers only to be counted; they belong to the library and are not saved."""

    def __init__(self, made: LibraryProduct, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = made.weight.shape
        self.kernel = made.kernel
        self._product = made.product
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def count(self, stored: Sequence[Tensor]) -> None:
        for index, tensor in enumerate(stored):
            self.register_buffer(f"stored_{index}", tensor, persistent=False)

    @property
    def num_bytes(self) -> int:
        """Numbers, scales and zero points; a storage that several tensors share counts once."""
        sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in self.buffers()}
        return sum(sizes.values())

    def forward(self, x: Tensor) -> Tensor:
        return self._product(x)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Raises `Unsupported`: after a product, packed weights no longer are what the library would write."""
        raise Unsupported(
            f"{prefix.rstrip('.')} ({self.kernel}) cannot be saved: once it has multiplied, its numbers may be "
            "repacked, and some libraries corrupt them when they are read back; save the unquantized model"
        )

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, kernel={self.kernel}"


class LibraryQuantizer:
    """Finds the linears, lets `make` convert one after another, and checks each against its own weights.

    `precision_bits` as in `QuantizationReport`.
    """

    method: str = ""
    precision_bits: float | None = None

    def __init__(self, skip: Sequence[str]) -> None:
        self._skip = skip

    def load_arguments(self) -> Mapping[str, Any]:
        return {}

    def apply(self, model: nn.Module, context: QuantizerContext) -> QuantizationReport:
        """Raises `UserError` for an option that fits not every linear or for weights that are not finite (the model
        is unchanged), `WrongResult` when the library's numbers are not the model's.
        """
        found, skipped = finite_linears(model, self._skip)
        self.check(found)
        errors: list[float] = []
        checked: set[tuple[Any, ...]] = set()

        def convert(linear: FoundLinear) -> LibraryLinear:
            made = self.make(linear, context)
            errors.append(weight_error(made, linear))
            key = (made.kernel, *made.weight.shape, linear.bias is None)
            module = settled(made, linear, verify=key not in checked)
            checked.add(key)
            return module

        modules = convert_linears(model, found, convert, context.progress)
        return library_report(self.method, modules, skipped, errors, self.precision_bits)

    def check(self, found: Sequence[FoundLinear]) -> None:
        """Raises `UserError` before anything is converted."""

    def make(self, linear: FoundLinear, context: QuantizerContext) -> LibraryProduct:
        raise NotImplementedError


def weight_error(made: LibraryProduct, linear: FoundLinear) -> float:
    """Relative error of the matrix. Raises `WrongResult` when little of it is left, or nothing finite."""
    weight = linear.weight.float()
    error = float((made.weight.to(weight) - weight).norm() / weight.norm().clamp_min(1e-30))
    if not error < _DESTROYED:
        raise WrongResult(f"{made.kernel}: the weights of {linear.name} are off by {error:.1e} after quantization")
    return error


def settled(made: LibraryProduct, linear: FoundLinear, *, verify: bool) -> LibraryLinear:
    """The linear after its first product, when its tensors are what they will stay.

    Raises `WrongResult` when (with `verify`) products are not those of the dequantized weights.
    """
    module = LibraryLinear(made, linear.bias)
    for rows in _CHECKED_ROWS if verify else (1,):
        draw = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, module.in_features, generator=draw).to(linear.weight)
        out = module(x)
        if verify:
            _compare(made, linear, x, out)
    module.count(made.stored())
    return module


def _compare(made: LibraryProduct, linear: FoundLinear, x: Tensor, out: Tensor) -> None:
    bias = None if linear.bias is None else linear.bias.double()
    expected = F.linear(x.double(), made.weight.to(x).double(), bias)
    error = float((out.double() - expected).norm() / expected.norm().clamp_min(1e-30))
    if not error <= made.tolerance:
        raise WrongResult(
            f"{made.kernel}: a product of {x.shape[0]} rows with {linear.name} differs by {error:.1e} from its own "
            f"weights ({made.tolerance:.0e} is allowed)"
        )


def library_report(
    method: str,
    modules: Mapping[str, nn.Module],
    skipped: tuple[str, ...],
    errors: Sequence[float],
    precision_bits: float | None = None,
    details: Mapping[str, Any] | None = None,
) -> QuantizationReport:
    """Bytes, bits and kernels of what was made; `errors` are relative errors of the matrices."""
    made = {name: module for name, module in modules.items() if isinstance(module, LibraryLinear)}
    num_bytes = sum(module.num_bytes for module in made.values())
    num_weights = sum(module.in_features * module.out_features for module in made.values())
    return QuantizationReport(
        method=method,
        bits_per_weight=8 * num_bytes / num_weights,
        quantized_bytes=num_bytes,
        kernels={name: module.kernel for name, module in made.items()},
        skipped=skipped,
        details={"mean_weight_error": fmean(errors), **(details or {})},
        precision_bits=precision_bits,
    )
