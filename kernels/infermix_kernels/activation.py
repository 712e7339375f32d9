"""Gated activations: SiLU or GELU of one half, times the other."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from infermix_kernels.checks import (
    output_like,
    require,
    require_device,
    require_floats,
    require_rows,
    require_shape,
)
from infermix_kernels.dependent import wait_for_inputs

SILU = tl.constexpr(0)
GELU_TANH = tl.constexpr(1)
GELU_ERF = tl.constexpr(2)


@triton.jit
def activate(x, KIND: tl.constexpr):
    if KIND == SILU:
        return x / (1.0 + tl.exp(-x))
    elif KIND == GELU_TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x * (1.0 - 1.0 / (tl.exp(2.0 * inner) + 1.0))
    else:
        return 0.5 * x * (1.0 + tl.math.erf(x * 0.7071067811865476))


@triton.jit
def gate_kernel(
    gate,
    up,
    out,
    width,
    stride_gate,
    stride_up,
    stride_out,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Grid: (rows, column tiles)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    wait_for_inputs(PDL)
    g = tl.load(gate + row * stride_gate + cols, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride_up + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * stride_out + cols, (activate(g, KIND) * u).to(out.dtype.element_ty), mask=mask)


def silu_and_mul(packed: Tensor, *, out: Tensor | None = None, pdl: bool = False) -> Tensor:
    """`silu(packed[:, :F]) * packed[:, F:]` of `packed [T, 2F]` -> `[T, F]`, computed in fp32."""
    return silu_mul(*_halves(packed), out=out, pdl=pdl)


def gelu_and_mul(
    packed: Tensor, *, approximate: str = "tanh", out: Tensor | None = None, pdl: bool = False
) -> Tensor:
    """`gelu(packed[:, :F]) * packed[:, F:]`; `approximate` is "tanh" or "none" (erf), as in PyTorch."""
    return gelu_mul(*_halves(packed), approximate=approximate, out=out, pdl=pdl)


def silu_mul(gate: Tensor, up: Tensor, *, out: Tensor | None = None, pdl: bool = False) -> Tensor:
    """`silu(gate) * up`, `[T, F]` each. `out` may be `gate` or `up`."""
    return _launch(gate, up, SILU.value, out, pdl)


def gelu_mul(
    gate: Tensor, up: Tensor, *, approximate: str = "tanh", out: Tensor | None = None, pdl: bool = False
) -> Tensor:
    """`gelu(gate) * up`, `[T, F]` each. `out` may be `gate` or `up`."""
    require(approximate in ("tanh", "none"), f'approximate is {approximate!r}, must be "tanh" or "none"')
    kind = GELU_TANH if approximate == "tanh" else GELU_ERF
    return _launch(gate, up, kind.value, out, pdl)


def _halves(packed: Tensor) -> tuple[Tensor, Tensor]:
    require_rows("packed", packed)
    require(packed.shape[1] % 2 == 0, f"packed has {packed.shape[1]} columns, must have an even number")
    half = packed.shape[1] // 2
    return packed[:, :half], packed[:, half:]


def _launch(gate: Tensor, up: Tensor, kind: int, out: Tensor | None, pdl: bool) -> Tensor:
    require_floats(gate=gate, up=up)
    require_rows("gate", gate)
    require_rows("up", up)
    require_shape("up", up, tuple(gate.shape))
    require_device(gate, up)
    out = output_like("out", out, tuple(gate.shape), gate)
    num_rows, width = gate.shape
    if gate.numel() == 0:
        return out
    block = min(triton.next_power_of_2(width), 1024 if num_rows < 64 else 2048)
    gate_kernel[(num_rows, triton.cdiv(width, block))](
        gate,
        up,
        out,
        width,
        gate.stride(0),
        up.stride(0),
        out.stride(0),
        KIND=kind,
        BLOCK=block,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )
    return out
