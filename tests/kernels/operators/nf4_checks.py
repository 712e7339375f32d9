"""NF4 products on random codes, scales and tables against their meaning in fp64, in memory full of NaN.

Bounds are those of `operator_checks`. Values in fp32 leave one rounding, of the output. Where weights are rounded too
(the table, or the scaled weight, to x's dtype), each has a relative error of at most u, which adds to the output's
in squares: 1.2 u in all, less than twice TOLERANCE.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from infermix_kernels import nf4, nf4_dequantize
from infermix_kernels.matmul_launch import GemvLaunch, MatmulWorkspace
from infermix_kernels.nf4_pack import PackedNf4, pack_nf4
from infermix_kernels.reference import matmul as meant
from operator_checks import TOLERANCE, Source, error
from torch import Tensor

#: Elements before and behind a buffer; keeps alignment.
_MARGIN = 64
_SCALE_BLOCK = 256


def amid_poison(tensor: Tensor) -> Tensor:
    """The same numbers between NaN (the largest integer)."""
    floats = tensor.is_floating_point()
    poison = float("nan") if floats else torch.iinfo(tensor.dtype).max
    room = torch.full((tensor.numel() + 2 * _MARGIN,), poison, dtype=tensor.dtype, device=tensor.device)
    inside = room[_MARGIN : _MARGIN + tensor.numel()].view(tensor.shape)
    return inside.copy_(tensor)


def amid_poisoned_columns(tensor: Tensor) -> Tensor:
    """`[M, N]` within wider rows of NaN."""
    rows, columns = tensor.shape
    room = torch.full((rows, columns + _MARGIN), float("nan"), dtype=tensor.dtype, device=tensor.device)
    return room[:, :columns].copy_(tensor)


def random_nf4(source: Source, n: int, k: int, block: int, double: bool = False) -> PackedNf4:
    """`double`: scales in 8 bits."""
    codes, table = source.integers(0, 16, n, k, dtype=torch.uint8), source.normal(16)
    count = n * k // block
    if double:
        groups = -(-count // _SCALE_BLOCK)
        scales: dict[str, Any] = {
            "absmax_scale": source.positive(groups) / 300,
            "absmax_mean": source.positive(1)[0],
            "scale_block": _SCALE_BLOCK,
        }
        absmax = source.integers(-127, 128, groups * _SCALE_BLOCK, dtype=torch.int8)
    else:
        scales, absmax = {}, source.positive(count) / 16
    return _poisoned(pack_nf4(codes, absmax, table, block_size=block, **scales))


def _poisoned(weight: PackedNf4) -> PackedNf4:
    names = ("words", "absmax", "absmax_scale", "absmax_mean")
    kept = {name: tensor for name in names if (tensor := getattr(weight, name)) is not None}
    moved: dict[str, Any] = {name: amid_poison(tensor) for name, tensor in kept.items()}
    first, second, third = (amid_poison(table) for table in weight.tables)
    return replace(weight, tables=(first, second, third), **moved)


def meaning(weight: PackedNf4) -> Tensor:
    """fp64 `[N, K]` of the fp32 scales and the exact table."""
    from infermix_kernels.pack import unpack_words

    codes = unpack_words(weight.words, weight.in_features).long()
    return weight.tables[0].double()[codes] * weight.scales().double().repeat_interleave(weight.block_size, dim=1)


def check_nf4(
    device: str, dtype: torch.dtype, m: int, n: int, k: int, block: int, double: bool = False, launch: Any = None
) -> None:
    source = Source(device)
    weight = random_nf4(source, n, k, block, double)
    x, bias = amid_poisoned_columns(source.normal(m, k, dtype=dtype)), amid_poison(source.normal(n, dtype=dtype))
    workspace = MatmulWorkspace.allocate(device, 1 << 22)
    used = nf4.default_launch(m, weight, dtype) if launch is None else launch
    exact = isinstance(used, GemvLaunch)
    allowed = TOLERANCE[dtype] * (4 if dtype == torch.float32 else 1 if exact else 2)
    for given in (bias, None):
        room = torch.full((m, n + _MARGIN), float("nan"), dtype=dtype, device=device)
        nf4.nf4_linear(x, weight, given, out=room[:, :n], workspace=workspace, launch=launch)
        wide = None if given is None else given.double()
        assert error(room[:, :n], meant.linear(x.double(), meaning(weight), wide)) < allowed
        assert bool(room[:, n:].isnan().all()), "written beyond its rows"
    assert not workspace.counters.any()


def check_expanded_nf4(
    device: str, dtype: torch.dtype, m: int, n: int, k: int, block: int, double: bool = False
) -> None:
    """Expanded weights are the plain ones to the bit, but for the last bit of scales that are restored on the way."""
    source = Source(device)
    weight = random_nf4(source, n, k, block, double)
    room = torch.full((n - 3, k + _MARGIN), float("nan"), dtype=dtype, device=device)
    nf4_dequantize.dequantize(weight, room[:, :k], first_row=2)
    plain = weight.dequantize(dtype)[2 : n - 1]
    if double:
        assert error(room[:, :k], plain) < TOLERANCE[dtype] / 4 + 2e-7
    else:
        assert torch.equal(room[:, :k], plain)
    assert bool(room[:, k:].isnan().all())
    x, bias = source.normal(m, k, dtype=dtype), source.normal(n, dtype=dtype)
    for given in (bias, None):
        out = torch.full((m, n), float("nan"), dtype=dtype, device=device)
        pieces = torch.full(((n // 2 + 1) * k,), float("nan"), dtype=dtype, device=device)
        nf4.nf4_linear(x, weight, given, out=out, room=pieces, launch=nf4.ExpandLaunch())
        wide = None if given is None else given.double()
        assert error(out, meant.linear(x.double(), meaning(weight), wide)) < TOLERANCE[dtype] * 2
