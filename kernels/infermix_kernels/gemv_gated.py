"""A gated MLP's first half for one row: both products and the activation of one by the other in one launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from infermix_kernels.activation import GELU_ERF, GELU_TANH, SILU, activate
from infermix_kernels.checks import require, require_device, require_floats, require_rows, require_vector
from infermix_kernels.dependent import wait_for_inputs

GatedActivation = Literal["silu", "gelu_tanh", "gelu_erf"]
_KINDS = {"silu": SILU, "gelu_tanh": GELU_TANH, "gelu_erf": GELU_ERF}


@dataclass(frozen=True)
class GatedLaunch:
    """A program computes `block_n` output features, `block_k` columns of two weight rows each a step."""

    block_n: int = 1
    block_k: int = 1024
    num_warps: int = 4


@triton.jit
def gated_gemv_kernel(
    x,
    w,
    out,
    F,
    K,
    stride_w,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row of x; feature i has its gate in weight row i and its up in row F + i. The first weights are read before
    the kernel waits for x."""
    features = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    ks = tl.arange(0, BLOCK_K)
    gate_at = w + features.to(tl.int64)[:, None] * stride_w + ks[None, :]
    up_at = gate_at + F.to(tl.int64) * stride_w
    inside = (features < F)[:, None] & (ks < K)[None, :]
    if EVEN:
        gates = tl.load(gate_at, eviction_policy="evict_first")
        ups = tl.load(up_at, eviction_policy="evict_first")
    else:
        gates = tl.load(gate_at, mask=inside, other=0.0, eviction_policy="evict_first")
        ups = tl.load(up_at, mask=inside, other=0.0, eviction_policy="evict_first")
    wait_for_inputs(PDL)
    xs = tl.load(x + ks, mask=ks < K, other=0.0).to(tl.float32)[None, :]
    gate_sum, up_sum = gates.to(tl.float32) * xs, ups.to(tl.float32) * xs
    for start in range(BLOCK_K, K, BLOCK_K):
        if EVEN:
            gates = tl.load(gate_at + start, eviction_policy="evict_first")
            ups = tl.load(up_at + start, eviction_policy="evict_first")
            xs = tl.load(x + start + ks).to(tl.float32)[None, :]
        else:
            mask = (features < F)[:, None] & (start + ks < K)[None, :]
            gates = tl.load(gate_at + start, mask=mask, other=0.0, eviction_policy="evict_first")
            ups = tl.load(up_at + start, mask=mask, other=0.0, eviction_policy="evict_first")
            xs = tl.load(x + start + ks, mask=start + ks < K, other=0.0).to(tl.float32)[None, :]
        gate_sum += gates.to(tl.float32) * xs
        up_sum += ups.to(tl.float32) * xs
    kind = out.dtype.element_ty
    # Rounded as the product would have been stored, so that one row and several differ by nothing else.
    gate, up = tl.sum(gate_sum, axis=1).to(kind).to(tl.float32), tl.sum(up_sum, axis=1).to(kind).to(tl.float32)
    tl.store(out + features, (activate(gate, KIND) * up).to(kind), mask=features < F)


def gated_row(
    x: Tensor,
    weight: Tensor,
    activation: GatedActivation,
    *,
    launch: GatedLaunch | None = None,
    pdl: bool = False,
) -> Tensor:
    """`activation(x weight[:F]^T) * (x weight[F:]^T)`: `x [1, K]`, `weight [2 F, K]` -> `[1, F]`, summed in fp32."""
    require(x.dim() == 2 and x.shape[0] == 1, f"x has shape {list(x.shape)}; one row is needed")
    require_floats(x=x, weight=weight)
    require(x.dtype == weight.dtype, f"x is {x.dtype}, weight {weight.dtype}")
    require_rows("x", x)
    require_rows("weight", weight)
    require(weight.shape[0] % 2 == 0, f"weight has {weight.shape[0]} rows, gates and ups need equally many")
    require_vector("x[0]", x[0], weight.shape[1])
    require(activation in _KINDS, f"activation is {activation!r}; known: {', '.join(_KINDS)}")
    require_device(x, weight)
    features, width = weight.shape[0] // 2, weight.shape[1]
    launch = launch or default_gated_launch(width)
    out = torch.empty(1, features, dtype=x.dtype, device=x.device)
    gated_gemv_kernel[(triton.cdiv(features, launch.block_n),)](
        x,
        weight,
        out,
        features,
        width,
        weight.stride(0),
        KIND=_KINDS[activation],
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        EVEN=features % launch.block_n == 0 and width % launch.block_k == 0,
        PDL=pdl,
        num_warps=launch.num_warps,
        launch_pdl=pdl,
    )
    return out


def default_gated_launch(width: int) -> GatedLaunch:
    """Two rows a program keep as many bytes in flight as one row of the plain kernel with twice the columns."""
    return GatedLaunch(block_k=min(1024, triton.next_power_of_2(width)))
