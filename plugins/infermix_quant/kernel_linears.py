"""The same weights in linears whose products run in Triton kernels. Imported where kernels run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from infermix.errors import WrongResult
from infermix.paths import cache_dir
from infermix.roles.quantizer import QuantizerContext
from infermix.toolkit.linears import replace_module
from infermix_kernels.fp8 import fp8_linear
from infermix_kernels.launch import overlaps_launches
from infermix_kernels.matmul_launch import MatmulWorkspace
from infermix_kernels.matmul_table import Family, LinearShape, MatmulTable
from infermix_kernels.nf4 import MAX_TILED_ROWS, described, nf4_linear
from infermix_kernels.nf4_pack import PackedNf4, pack_nf4
from infermix_kernels.nf4_pack import fits as fits_nf4
from infermix_kernels.pack import PLANE, RUN, PackedW4, pack_w4
from infermix_kernels.tune import TuneShapes, tune_all
from infermix_kernels.w4a16 import w4a16_linear
from infermix_kernels.w8a8 import w8a8_linear
from infermix_kernels.w8a16 import w8a16_linear
from torch import Tensor, nn

from infermix_quant.linear_fp8 import Fp8Linear
from infermix_quant.linear_grouped import GroupedLinear, QuantLinear
from infermix_quant.linear_int8 import Int8Linear, LlmInt8Linear, outlier_mask
from infermix_quant.nf4 import Nf4Linear

#: Kernel against plain product of the same numbers; a value that is rounded to 8 bits may fall to either side.
_TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}
_CHECKED_ROWS = (1, 5, 40)
_LARGEST_PROBE = 64.0
_TUNED_ROWS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Launching:
    """Shared by all linears of a model: scratch memory, overlap of launches, and measured launch parameters."""

    workspace: MatmulWorkspace
    overlap: bool
    launches: MatmulTable | None

    @classmethod
    def on(cls, device: torch.device) -> Launching:
        table = MatmulTable(cache_dir("kernels"), device) if device.type == "cuda" else None
        return cls(MatmulWorkspace.allocate(device), overlaps_launches(device), table)


class KernelLinear(QuantLinear):
    """Flattens rows around `product [M, K] -> [M, N]`. `checked_rows` are compared with the plain product."""

    checked_rows: tuple[int, ...] = _CHECKED_ROWS

    def __init__(self, plain: QuantLinear, launching: Launching) -> None:
        super().__init__(plain.out_features, plain.in_features, plain.bias)
        self._launching = launching

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x.reshape(-1, self.in_features))
        return out.view(*x.shape[:-1], self.out_features)

    def product(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def probe(self, x: Tensor) -> Tensor:
        """Normal numbers `[M, K]` made into what reaches every part of the product."""
        return x

    @property
    def shared(self) -> dict[str, Any]:
        launching = self._launching
        return {"workspace": launching.workspace, "launches": launching.launches, "pdl": launching.overlap}


class W4KernelLinear(KernelLinear):
    kernel = "triton w4a16"

    def __init__(self, plain: GroupedLinear, launching: Launching) -> None:
        super().__init__(plain, launching)
        weight = plain.unpacked()
        self._packed: PackedW4 = pack_w4(weight.q, weight.scale, weight.zero, group_index=weight.group)
        for name in ("words", "scales", "zeros", "order"):
            self.register_buffer(name, getattr(self._packed, name))

    def product(self, x: Tensor) -> Tensor:
        return w4a16_linear(x, self._packed, self.bias, **self.shared)


class Nf4KernelLinear(KernelLinear):
    """Scales stay as they are stored: those of 8 bits are restored by every product, and count as 8 bits."""

    checked_rows = (*_CHECKED_ROWS, MAX_TILED_ROWS + 1)

    def __init__(self, plain: Nf4Linear, launching: Launching) -> None:
        super().__init__(plain, launching)
        self.kernel = described(plain.block_size)
        self._packed: PackedNf4 = pack_nf4(
            plain.codes(), plain.absmax, plain.table, block_size=plain.block_size,
            absmax_scale=plain.absmax_scale, absmax_mean=plain.absmax_mean, scale_block=plain.scale_block or 0,
        )  # fmt: skip
        for name in ("words", "absmax", "absmax_scale", "absmax_mean"):
            self.register_buffer(name, getattr(self._packed, name))

    def product(self, x: Tensor) -> Tensor:
        launching = self._launching
        return nf4_linear(x, self._packed, self.bias, workspace=launching.workspace, pdl=launching.overlap)


class W8A8KernelLinear(KernelLinear):
    """int8 or FP8, a scale per output and per token."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, plain: Int8Linear | Fp8Linear, launching: Launching) -> None:
        super().__init__(plain, launching)
        self.register_buffer("weight", plain.weight.contiguous())
        self.register_buffer("weight_scale", plain.weight_scale.expand(plain.out_features).contiguous())
        int8 = plain.weight.dtype == torch.int8
        self.kernel = "triton w8a8 int8" if int8 else "triton w8a8 fp8 e4m3"
        self._linear = w8a8_linear if int8 else fp8_linear

    def product(self, x: Tensor) -> Tensor:
        return self._linear(x, self.weight, self.weight_scale, self.bias, **self.shared)


class LlmInt8KernelLinear(W8A8KernelLinear):
    """Two products over all columns, each with zeros where the other one has the values.

    Taking the outliers out would read their number on the host, which a CUDA graph forbids. So weights are read
    twice, as many bytes as 16-bit weights have, and rows are multiplied twice: it saves memory, not time.
    """

    def __init__(self, plain: LlmInt8Linear, launching: Launching) -> None:
        super().__init__(plain, launching)
        self.kernel = "triton w8a8 int8 + w8a16 over outliers"
        self._threshold, self._outliers = plain.threshold, plain.outliers

    def product(self, x: Tensor) -> Tensor:
        apart = outlier_mask(x, self._threshold, self._outliers)
        rounded = super().product(x.masked_fill(apart, 0))
        return rounded + w8a16_linear(x.masked_fill(~apart, 0), self.weight, self.weight_scale, **self.shared)

    def probe(self, x: Tensor) -> Tensor:
        """Every seventh column has outliers only, where the threshold leaves room for their products in fp16."""
        shift = torch.zeros_like(x)
        shift[:, ::7] = min(self._threshold, _LARGEST_PROBE)
        return x + shift * x.sign()


def use_kernels(
    model: nn.Module, linears: dict[str, QuantLinear], context: QuantizerContext
) -> dict[str, QuantLinear]:
    """Replace the linears that a kernel multiplies; name -> what is in the model now.

    The first of each kind and shape is compared with its plain meaning. Raises `WrongResult` when they differ.
    """
    dtype, device = getattr(torch, context.dtype), torch.device(context.device)
    kinds = {name: kind for name, each in linears.items() if (kind := _kind(each, dtype)) is not None}
    if context.tune and device.type == "cuda" and kinds:
        _tune([shape for name in kinds for shape in _shapes(linears[name], dtype)], device, context)
    launching = Launching.on(device) if kinds else None
    checked: set[tuple[Any, ...]] = set()
    for name, kind in kinds.items():
        plain = linears[name]
        assert launching is not None
        made = kind(plain, launching)
        shape = (kind, made.kernel, made.out_features, made.in_features)
        if shape not in checked:
            checked.add(shape)
            _verify(made, plain, name, dtype, device)
        replace_module(model, name, made)
        linears[name] = made
    return linears


def _kind(linear: QuantLinear, dtype: torch.dtype) -> Any:
    """The class that takes the linear, `None` when it stays as it is."""
    if isinstance(linear, GroupedLinear):
        return W4KernelLinear if _fits_w4(linear) else None
    if isinstance(linear, Nf4Linear):
        return Nf4KernelLinear if fits_nf4(linear.in_features, linear.block_size) else None
    if dtype == torch.float32:  # activations in 8 bits where fp32 is wanted are simulated
        return None
    if isinstance(linear, LlmInt8Linear):
        return LlmInt8KernelLinear
    if isinstance(linear, Int8Linear | Fp8Linear) and linear.activations == "token":
        return W8A8KernelLinear
    return None


def _fits_w4(linear: GroupedLinear) -> bool:
    size, groups = linear.in_features // linear.scale.shape[1], linear.scale.shape[1]
    return linear.bits == 4 and size % PLANE == 0 and (RUN % size == 0 or size % RUN == 0 or groups == 1)


def _shapes(linear: QuantLinear, dtype: torch.dtype) -> list[LinearShape]:
    """Of every product that the linear takes."""
    if isinstance(linear, GroupedLinear):
        size, zeros = linear.in_features // linear.scale.shape[1], linear.zero is not None
        return [LinearShape("w4a16", linear.out_features, linear.in_features, size, zeros, dtype.itemsize)]
    if isinstance(linear, Nf4Linear):  # nothing about its launches is measured
        return []
    families: list[Family] = ["fp8" if isinstance(linear, Fp8Linear) else "int8"]
    families += ["w8a16"] if isinstance(linear, LlmInt8Linear) else []
    return [
        LinearShape(family, linear.out_features, linear.in_features, element_bytes=dtype.itemsize)
        for family in families
    ]


def _tune(shapes: Sequence[LinearShape], device: torch.device, context: QuantizerContext) -> None:
    wanted = TuneShapes(linears=tuple(dict.fromkeys(shapes)), rows=_TUNED_ROWS)
    tune_all(wanted, cache_dir("kernels"), device, context.progress)


def _verify(made: KernelLinear, plain: QuantLinear, name: str, dtype: torch.dtype, device: torch.device) -> None:
    for rows in made.checked_rows:
        draw = torch.Generator().manual_seed(rows)
        x = made.probe(torch.randn(rows, made.in_features, generator=draw)).to(device, dtype)
        expected = plain(x).double()
        error = float((made(x).double() - expected).norm() / expected.norm().clamp_min(1e-30))
        if not error <= _TOLERANCES[dtype]:
            raise WrongResult(
                f"{made.kernel} of {name} with {rows} rows differs by {error:.1e} from its meaning "
                f"({_TOLERANCES[dtype]:.0e} is allowed)"
            )
