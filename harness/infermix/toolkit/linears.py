"""Finding and replacing the linears of a transformers model, and a plain-PyTorch quantized linear."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from infermix.errors import UserError
from infermix.toolkit.packed_columns import pack_columns, unpack_columns
from infermix.toolkit.skip import check_skip


@dataclass(frozen=True)
class FoundLinear:
    """One linear of a model. `weight [out, in]` is a view, also for GPT-2's transposed `Conv1D`."""

    name: str
    module: nn.Module
    weight: Tensor
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        return int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        return int(self.weight.shape[0])


def find_linears(model: nn.Module, skip: Sequence[str] = ()) -> tuple[list[FoundLinear], tuple[str, ...]]:
    """The linears that may be replaced, and the names of all other weight matrices.

    Left out: names that match a shell pattern of `skip`; linears that share their weight with an embedding (a tied
    `lm_head`) or with each other; subclasses of `nn.Linear`; weights that belong to no linear (embeddings, fused
    experts).
    """
    owners = _weight_owners(model)
    found: list[FoundLinear] = []
    skipped: list[str] = []
    for name, module in model.named_modules():
        linear = _as_linear(name, module)
        shared = linear is not None and len(owners[linear.weight.data_ptr()]) > 1
        if linear is not None and not shared and not any(fnmatch.fnmatch(name, each) for each in skip):
            found.append(linear)
        else:
            skipped += _matrices(name, module)
    return found, tuple(skipped)


def finite_linears(model: nn.Module, skip: Sequence[str]) -> tuple[list[FoundLinear], tuple[str, ...]]:
    """As `find_linears`. Raises `UserError` when there is none, a pattern matches nothing, or weights are not finite,
    also those that stay as they are.
    """
    check_skip(skip, [name for name, _ in model.named_modules() if name])
    found, skipped = find_linears(model, skip)
    if not found:
        raise UserError("the model has no linear to quantize", key="parts.quantizer.skip")
    check_finite(model)
    return found, skipped


def check_finite(model: nn.Module) -> None:
    """Raises `UserError` naming the first parameter with NaN or infinite numbers."""
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise UserError(f"the weights of {name.removesuffix('.weight')} are not finite", key="model.source")


def check_scales(linear: FoundLinear, scale: Tensor) -> None:
    """Raises `UserError` for weights so large that the dtype of their scales does not hold them."""
    if not bool(torch.isfinite(scale).all()):
        raise UserError(
            f"the weights of {linear.name} reach {float(linear.weight.abs().max()):.3g}: "
            f"scales in {str(scale.dtype).removeprefix('torch.')} end at {torch.finfo(scale.dtype).max:.3g}",
            key="parts.quantizer.skip",
            hint=f"leave it out: skip: ['{linear.name}']",
        )


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` where `model` has the submodule `name` (dotted)."""
    parent, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(parent), attribute, new)


def convert_linears(
    model: nn.Module,
    found: list[FoundLinear],
    make: Callable[[FoundLinear], nn.Module],
    progress: Callable[[str, float], None] | None = None,
) -> dict[str, nn.Module]:
    """Replace each linear by `make(linear)`, one at a time; returns name -> new module.

    Empties `found`, so that the old weights are freed one by one and both models never lie in memory together.
    """
    made: dict[str, nn.Module] = {}
    count = len(found)
    while found:
        linear = found.pop(0)
        with torch.no_grad():
            made[linear.name] = make(linear)
        replace_module(model, linear.name, made[linear.name])
        if progress is not None:
            progress("quantize", len(made) / count)
    return made


def check_group_size(found: Sequence[FoundLinear], group_size: int) -> None:
    """Raises `UserError` naming the first layer whose width `group_size` does not divide, and sizes that would do."""
    for linear in found:
        if linear.in_features % group_size:
            fitting = ", ".join(str(size) for size in _fitting_sizes(linear.in_features))
            raise UserError(
                f"group size {group_size} does not divide the {linear.in_features} inputs of {linear.name}",
                key="group_size",
                hint=f"sizes that fit: {fitting}",
            )


def _fitting_sizes(width: int) -> list[int]:
    divisors = [size for size in range(2, width + 1) if width % size == 0]
    return [size for size in divisors if size % 8 == 0] or divisors


def _weight_owners(model: nn.Module) -> dict[int, list[str]]:
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor):
            owners.setdefault(weight.data_ptr(), []).append(name)
    return owners


def _as_linear(name: str, module: nn.Module) -> FoundLinear | None:
    if type(module) is nn.Linear:
        return FoundLinear(name, module, module.weight, module.bias)
    if type(module).__name__ == "Conv1D" and hasattr(module, "nf"):
        weight, bias = module.weight, module.bias
        assert isinstance(weight, Tensor)
        assert isinstance(bias, Tensor)
        return FoundLinear(name, module, weight.t(), bias)
    return None


def _matrices(name: str, module: nn.Module) -> Iterator[str]:
    for parameter_name, parameter in module.named_parameters(recurse=False):
        if parameter.dim() >= 2:
            yield name if parameter_name == "weight" else f"{name}.{parameter_name}"


class QuantizedLinear(nn.Module):
    """Integers of 8, 4, 3 or 2 bits with scales, dequantized in every forward: `w = (q - zero) * scale`.

    `packed [out, in]` uint8 (8 bits), or what `pack_columns` makes of it; `scale [1 or out, groups]` in a 16-bit
    dtype; `zero` of the same shape uint8, or `None` for the middle of the range. `groups` equal parts of a row share
    a scale.
    """

    kernel = "dequantize+matmul"
    packed: Tensor
    scale: Tensor
    zero: Tensor | None

    def __init__(self, q: Tensor, scale: Tensor, zero: Tensor | None, *, bits: int, bias: Tensor | None) -> None:
        """`q [out, in]` uint8, below `2 ** bits`."""
        super().__init__()
        assert bits in (2, 3, 4, 8)
        self.out_features, self.in_features = q.shape
        self.bits = bits
        self.register_buffer("packed", pack_columns(q, bits))
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def num_bytes(self) -> int:
        """Packed integers, scales and zero points."""
        parts = (self.packed, self.scale, self.zero)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """`[out, in]`."""
        q = unpack_columns(self.packed, self.bits, self.in_features)
        weight = q.to(dtype).view(self.out_features, self.scale.shape[1], -1)
        weight -= 2 ** (self.bits - 1) if self.zero is None else self.zero.to(dtype)[:, :, None]
        weight *= self.scale.to(dtype)[:, :, None]
        return weight.view(self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.dequantize(x.dtype), self.bias)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"
