"""Each operator on random inputs against its plain-PyTorch meaning in fp64, outputs poisoned with NaN first.

Errors are |out - reference| / |reference| (2-norms). One rounding to the output's dtype has a relative error of at
most u = 2^-24, 2^-11, 2^-8 (fp32, fp16, bf16), and u / sqrt(3) in the mean square when all significands are close to
1, less otherwise. TOLERANCE is 1.07 times that for 16 bits; in fp32 it leaves room for a dozen roundings.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from infermix_kernels import (
    activation,
    fp8,
    gemv,
    kv_write,
    norm,
    quantize,
    softmax,
    w4a16,
    w4a16_dequantize,
    w8a8,
    w8a16,
)
from infermix_kernels.gemv_gated import gated_row
from infermix_kernels.matmul_launch import MatmulWorkspace
from infermix_kernels.pack import PackedW4, pack_w4
from infermix_kernels.reference import matmul as meant
from infermix_kernels.reference import ops
from infermix_kernels.rotary import HeadNorms, RotaryTable, rotary
from torch import Tensor

FP8 = torch.float8_e4m3fn
TOLERANCE = {torch.float32: 1e-6, torch.float16: 3e-4, torch.bfloat16: 2.4e-3}
#: The new residual is rounded, then normed, and the rounding of the norm is a second one: sqrt(2) of one.
ROUNDED_TWICE = 1.5


class Source:
    """Random tensors of one device, the same for every call order."""

    def __init__(self, device: str, seed: int = 0) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype).to(self.device)

    def positive(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return (torch.rand(shape, generator=self._generator) + 0.5).to(dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator, dtype=dtype).to(self.device)

    def order(self, length: int) -> Tensor:
        return torch.randperm(length, generator=self._generator).to(self.device)


def poisoned(*shape: int, like: Tensor) -> Tensor:
    return torch.full(shape, float("nan"), dtype=like.dtype, device=like.device)


def error(out: Tensor, reference: Tensor) -> float:
    """NaN never passes a bound."""
    assert out.shape == reference.shape
    difference = torch.linalg.vector_norm(out.double() - reference.double())
    return float(difference / torch.linalg.vector_norm(reference.double()))


def check_norms(device: str, dtype: torch.dtype, shape: tuple[int, ...], packed: bool = False) -> None:
    """`packed`: x is a view of wider rows, and outputs go into such views."""
    source = Source(device)
    extra = 16 if packed else 0
    x, residual = (source.normal(*shape[:-1], shape[-1] + extra, dtype=dtype)[..., : shape[-1]] for _ in range(2))
    weight, bias = source.normal(shape[-1], dtype=dtype), source.normal(shape[-1], dtype=dtype)
    wide = (x.double(), residual.double(), weight.double(), bias.double())
    bound = TOLERANCE[dtype]
    out = poisoned(*shape[:-1], shape[-1] + extra, like=x)[..., : shape[-1]]
    norm.rms_norm(x, weight, 1e-5, weight_offset=1.0, out=out)
    assert error(out, ops.rms_norm(wide[0], wide[2], 1e-5, weight_offset=1.0)) < bound
    assert error(norm.layer_norm(x, weight, bias, 1e-5), ops.layer_norm(wide[0], wide[2], wide[3], 1e-5)) < bound
    assert error(norm.layer_norm(x, weight, None, 1e-5), ops.layer_norm(wide[0], wide[2], None, 1e-5)) < bound
    fused, new = norm.add_rms_norm(x, residual, weight, 1e-5, residual_out=poisoned(*shape, like=x))
    assert torch.equal(new, x + residual)
    assert error(fused, ops.add_rms_norm(wide[0], wide[1], wide[2], 1e-5)[0]) < bound * ROUNDED_TWICE
    fused, new = norm.add_layer_norm(x, residual, weight, bias, 1e-5, out=poisoned(*shape, like=x))
    assert torch.equal(new, x + residual)
    assert error(fused, ops.add_layer_norm(*wide, 1e-5)[0]) < bound * ROUNDED_TWICE
    expected = ops.add_rms_norm(x, residual, weight, 1e-5)
    norm.add_rms_norm(x, residual, weight, 1e-5, out=x, residual_out=residual)
    assert torch.equal(residual, expected[1])
    assert error(x, expected[0]) < bound * ROUNDED_TWICE


def check_activations(device: str, dtype: torch.dtype, num_rows: int, width: int) -> None:
    source = Source(device)
    packed = source.normal(num_rows, 2 * width, dtype=dtype) * 2
    gate, up = packed.double().chunk(2, dim=1)
    out = poisoned(num_rows, width, like=packed)
    assert error(activation.silu_and_mul(packed, out=out), ops.silu_mul(gate, up)) < TOLERANCE[dtype]
    for approximate in ("tanh", "none"):
        out = activation.gelu_and_mul(packed, approximate=approximate)
        assert error(out, ops.gelu_mul(gate, up, approximate=approximate)) < TOLERANCE[dtype]
    separate = packed[:, :width].contiguous()
    activation.silu_mul(separate, packed[:, width:], out=separate)
    assert error(separate, ops.silu_mul(gate, up)) < TOLERANCE[dtype]


def check_softmax(device: str, dtype: torch.dtype, num_rows: int, width: int) -> None:
    source = Source(device)
    x = source.normal(num_rows, width, dtype=dtype) * 3
    x[:, ::3] = float("-inf")
    x[:, 0] = 1.0
    out = softmax.softmax(x, scale=0.7, out=poisoned(num_rows, width, like=x))
    assert error(out, ops.softmax(x.double(), scale=0.7)) < TOLERANCE[dtype] * 2


def rotation(source: Source, rotary_dim: int, num_tokens: int, interleaved: bool, dtype: torch.dtype) -> Any:
    angles = source.normal(97, rotary_dim // 2) * 3
    table = RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype), interleaved)
    return table, source.integers(0, 97, num_tokens)


def check_rotary(
    device: str, dtype: torch.dtype, num_tokens: int, heads: tuple[int, int], dim: int, rotary_dim: int, inter: bool
) -> None:
    source = Source(device)
    packed = source.normal(num_tokens, sum(heads), dim, dtype=dtype)
    q, k = packed[:, : heads[0]], packed[:, heads[0] :]
    table, positions = rotation(source, rotary_dim, num_tokens, inter, dtype)
    wide = [ops.rotate(x.double(), table.cos, table.sin, positions, interleaved=inter) for x in (q, k)]
    outs = rotary(q, k, table, positions.to(torch.int32), q_out=poisoned(*q.shape, like=q))
    for out, reference in zip(outs, wide, strict=True):
        assert error(out, reference) < TOLERANCE[dtype]
    rotary(q, k, table, positions, q_out=q, k_out=k)
    assert torch.equal(q, outs[0])
    assert torch.equal(k, outs[1])


def check_kv_write(
    device: str,
    dtype: torch.dtype,
    num_tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    rotary_dim: int,
    pool_dtype: torch.dtype | None = None,
    block_size: int = 16,
    normed: bool = False,
) -> None:
    """`normed`: heads are normed first, and rounded between norm and rotation, as in a model."""
    source = Source(device)
    num_blocks = num_tokens // block_size + 2
    q, k = (
        source.normal(num_tokens, heads[0], dims[0], dtype=dtype),
        source.normal(num_tokens, heads[1], dims[0], dtype=dtype),
    )
    v = source.normal(num_tokens, heads[1], dims[1], dtype=dtype)
    v[1:2] = 0
    slots = source.order(num_blocks * block_size)[:num_tokens]
    shape = (num_blocks, block_size, heads[1])
    pools = [torch.full((*shape, dim), float("nan"), device=device).to(pool_dtype or dtype) for dim in dims]
    before = [pool.clone() for pool in pools]
    arguments: dict[str, Any] = {}
    if pool_dtype is not None:
        by_head = (num_blocks, heads[1], block_size)
        scales = [torch.full(by_head, float("nan"), device=device) for _ in range(2)]
        arguments = {"key_scales": scales[0], "value_scales": scales[1]}
    table, positions = rotation(source, max(rotary_dim, 2), num_tokens, False, dtype)
    rotated, allowed = k, TOLERANCE[dtype] * (2 if normed else 1)
    weights = [source.normal(dims[0], dtype=dtype) for _ in range(2)]
    plain = [ops.rms_norm(x.double(), w, 1e-5, weight_offset=1.0) if normed else x.double()
             for x, w in zip((q, k), weights, strict=True)]  # fmt: skip
    if rotary_dim:
        arguments |= {"table": table, "positions": positions, "q": q, "q_out": poisoned(*q.shape, like=q)}
        arguments["norms"] = HeadNorms(*weights, 1e-5, 1.0) if normed else None
        rotated = ops.rotate(plain[1], table.cos, table.sin, positions)
    q_out = kv_write.write_kv(k, v, pools[0], pools[1], slots, **arguments)
    if rotary_dim:
        assert q_out is not None
        assert error(q_out, ops.rotate(plain[0], table.cos, table.sin, positions)) < allowed
    untouched = torch.ones(num_blocks * block_size, dtype=torch.bool, device=device)
    untouched[slots] = False
    for index, (pool, reference) in enumerate(zip(pools, (rotated, v), strict=True)):
        stored = pool.flatten(0, 1)
        left, kept = (each.view(torch.uint8)[untouched] for each in (stored, before[index].flatten(0, 1)))
        assert torch.equal(left, kept)
        if pool_dtype is None:
            assert error(stored[slots], reference) < allowed
        else:
            factors = scales[index].transpose(1, 2).flatten(0, 1)
            if normed:
                assert error(stored[slots].float() * factors[slots][..., None], reference) < 0.05
            else:
                check_quantized(stored[slots], factors[slots], reference)
            assert bool(factors[untouched].isnan().all())


def check_gated_row(device: str, dtype: torch.dtype, features: int, width: int, activation: Any) -> None:
    source = Source(device)
    x, weight = source.normal(1, width, dtype=dtype), source.normal(2 * features, width, dtype=dtype)
    gate, up = (x.double() @ weight.double().T).to(dtype).double().chunk(2, dim=1)
    kinds = {"silu": ops.silu_mul, "gelu_tanh": ops.gelu_mul}
    expected = kinds[activation](gate, up) if activation in kinds else ops.gelu_mul(gate, up, approximate="none")
    # gate and up are rounded before, each once
    assert error(gated_row(x, weight, activation), expected) < 3 * TOLERANCE[dtype]


def check_quantized(numbers: Tensor, scales: Tensor, reference: Tensor) -> None:
    """The same scales. int8: the nearest integer, either of two that are equally near. FP8: the same numbers, but one
    step aside where a value lies at the border of two, rarely."""
    expected, factors = ops.quantize_rows(reference.float(), numbers.dtype)
    torch.testing.assert_close(scales, factors, rtol=1e-6, atol=0)
    if numbers.dtype == torch.int8:
        exact = reference.double() / factors.double().clamp(min=1e-30)[..., None]
        assert float((numbers.double() - exact).abs().max()) < 0.5 + 1e-4
        return
    steps = (places(numbers) - places(expected)).abs()
    assert int(steps.max()) <= 1
    assert float((steps > 0).float().mean()) < 5e-3


def places(numbers: Tensor) -> Tensor:
    """FP8 numbers counted upwards from zero: they are sign and magnitude."""
    bits = numbers.view(torch.uint8).int()
    return torch.where(bits > 127, 128 - bits, bits)


def check_quantize_rows(device: str, dtype: torch.dtype, kind: torch.dtype, num_rows: int, width: int) -> None:
    source = Source(device)
    x = source.normal(num_rows, width, dtype=dtype) * 5
    x[0] = 0
    check_quantized(*quantize.quantize_rows(x, kind), x)


def check_skinny(device: str, dtype: torch.dtype, m: int, n: int, k: int, launch: Any = None) -> None:
    source = Source(device)
    x, weight, bias = (source.normal(*shape, dtype=dtype) for shape in ((m, k), (n, k), (n,)))
    workspace = MatmulWorkspace.allocate(device, 1 << 20)
    for given in (bias, None):
        out = poisoned(m, n, like=x)
        gemv.skinny_linear(x, weight, given, out=out, workspace=workspace, launch=launch)
        wide = None if given is None else given.double()
        assert error(out, meant.linear(x.double(), weight.double(), wide)) < TOLERANCE[dtype]
    assert not workspace.counters.any()


#: Of weights: none, integers, or numbers between them (some far outside of 0 ... 15).
Zeros = bool | Literal["fractional"]


def random_w4(source: Source, n: int, k: int, group: int, zeros: Zeros, act_order: bool) -> PackedW4:
    groups = k // group
    given = source.integers(0, 17, n, groups, dtype=torch.uint8) if zeros else None
    if zeros == "fractional":
        given = (8 + 6 * source.normal(n, groups)).half()
    return pack_w4(
        source.integers(0, 16, n, k, dtype=torch.uint8),
        source.positive(n, groups, dtype=torch.float16) / 16,
        given,
        group_index=source.order(k) // group if act_order else None,
    )


def check_w4a16(
    device: str,
    dtype: torch.dtype,
    m: int,
    n: int,
    k: int,
    group: int = 128,
    zeros: Zeros = False,
    act_order: bool = False,
    launch: Any = None,
) -> None:
    """Tiles of more than 64 rows round scaled weights to x's dtype: a second rounding, of every term."""
    source = Source(device)
    weight = random_w4(source, n, k, group, zeros, act_order)
    x, bias = source.normal(m, k, dtype=dtype), source.normal(n, dtype=dtype)
    workspace = MatmulWorkspace.allocate(device, 1 << 22)
    out = poisoned(m, n, like=x)
    w4a16.w4a16_linear(x, weight, bias, out=out, workspace=workspace, launch=launch)
    reference = meant.linear(x.double(), weight.dequantize(torch.float64), bias.double())
    assert error(out, reference) < TOLERANCE[dtype] * (4 if dtype == torch.float32 else 2)
    assert not workspace.counters.any()


def check_expanded_w4(
    device: str, dtype: torch.dtype, m: int, n: int, k: int, group: int, act_order: bool, zeros: Zeros = True
) -> None:
    """Expanded weights are the exact ones, rounded once; the product takes them in pieces of a given room."""
    source = Source(device)
    weight = random_w4(source, n, k, group, zeros, act_order)
    reference = weight.dequantize(torch.float64)
    packed_order = reference if weight.order is None else reference[:, weight.order.long()]
    out = poisoned(n - 3, k, like=source.normal(1, dtype=dtype))
    w4a16_dequantize.dequantize(weight, out, first_row=2)
    assert torch.equal(out, packed_order[2 : n - 1].to(dtype))
    x, bias = source.normal(m, k, dtype=dtype), source.normal(n, dtype=dtype)
    in_order = x if weight.order is None else w4a16.gather_columns(x, weight.order)
    for given in (bias, None):
        out = poisoned(m, n, like=x)
        room = poisoned((n // 2 + 1) * k, like=x)
        w4a16_dequantize.dequantized_product(in_order, weight, given, out, room)
        wide = None if given is None else given.double()
        assert error(out, meant.linear(x.double(), reference, wide)) < TOLERANCE[dtype] * 2


def check_w8a16(device: str, dtype: torch.dtype, m: int, n: int, k: int, kind: torch.dtype, groups: int = 0) -> None:
    source = Source(device)
    weight = random_w8(source, n, k, kind)
    scale = source.positive(groups, n) if groups else source.positive(n)
    x, bias = source.normal(m, k, dtype=dtype), source.normal(n, dtype=dtype)
    workspace = MatmulWorkspace.allocate(device, 1 << 22)
    out = poisoned(m, n, like=x)
    w8a16.w8a16_linear(x, weight, scale, bias, out=out, workspace=workspace)
    reference = meant.w8a16_linear(x.double(), weight, scale.double(), bias.double())
    assert error(out, reference) < TOLERANCE[dtype]
    assert not workspace.counters.any()


def random_w8(source: Source, n: int, k: int, kind: torch.dtype) -> Tensor:
    if kind == torch.int8:
        return source.integers(-127, 128, n, k, dtype=torch.int8)
    return source.normal(n, k).to(kind)


def check_w8a8(
    device: str, dtype: torch.dtype, m: int, n: int, k: int, kind: torch.dtype, launch: Any = None
) -> None:
    """int8 sums are exact. FP8 sums keep about 14 bits on Hopper: 2^-13 of the largest partial sum a step."""
    source = Source(device)
    weight, scale = random_w8(source, n, k, kind), source.positive(n)
    x, bias = source.normal(m, k, dtype=dtype), source.normal(n, dtype=dtype)
    workspace = MatmulWorkspace.allocate(device, 1 << 22)
    out = poisoned(m, n, like=x)
    product = w8a8.int8_product if kind == torch.int8 else fp8.fp8_product
    numbers, x_scale = ops.quantize_rows(x, kind)
    product(numbers, x_scale, weight, scale, bias, out=out, workspace=workspace, launch=launch)
    bound = TOLERANCE[dtype] + (1e-3 if kind == FP8 else 0)
    reference = meant.quantized_linear(x, weight, scale, bias).double()
    assert error(out, reference) < bound * ROUNDED_TWICE
    assert not workspace.counters.any()


def check_row_of_fp8_numbers(device: str, dtype: torch.dtype, n: int, k: int, launch: Any) -> None:
    """x holds FP8 numbers, 448 among them: quantizing it changes nothing (the interpreter would round it wrongly)."""
    source = Source(device)
    weight, scale = random_w8(source, n, k, FP8), source.positive(n)
    x = source.normal(1, k).to(FP8).to(dtype)
    x[0, k // 2] = -448
    out = fp8.fp8_linear(x, weight, scale, out=poisoned(1, n, like=x), launch=launch)
    assert error(out, meant.w8a16_linear(x.double(), weight, scale.double())) < TOLERANCE[dtype]


def check_fused_w8a8(
    device: str, dtype: torch.dtype, m: int, n: int, k: int, kind: torch.dtype, launch: Any = None
) -> None:
    """With the quantization of x: a number that falls one step aside now and then changes little."""
    source = Source(device)
    weight, scale, x = random_w8(source, n, k, kind), source.positive(n), source.normal(m, k, dtype=dtype)
    linear = w8a8.w8a8_linear if kind == torch.int8 else fp8.fp8_linear
    for bias in (source.normal(n, dtype=dtype), None):
        out = linear(x, weight, scale, bias, out=poisoned(m, n, like=x), launch=launch)
        assert error(out, meant.quantized_linear(x, weight, scale, bias)) < TOLERANCE[dtype] * ROUNDED_TWICE + 2e-3
    x.zero_()
    assert not linear(x, weight, scale, out=poisoned(m, n, like=x), launch=launch).any()
