"""NF4 products: ours, and those of bitsandbytes, the peer of W4A16 that people use most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from infermix_kernels import nf4, w4a16
from infermix_kernels.matmul_launch import ExpandLaunch, GemvLaunch, MatmulLaunch
from infermix_kernels.nf4_pack import PackedNf4, pack_nf4
from infermix_kernels.pack import RUN
from kernel_timing import DEVICE, DTYPE
from torch import Tensor

_BLOCK = 64
_SCALE_BLOCK = 256

#: By output and input features.
Launch = Callable[[int, int], GemvLaunch | MatmulLaunch | ExpandLaunch]


@dataclass
class WeightNf4:
    """`packed` and `state` as the library makes them."""

    packed: Tensor
    state: Any

    @classmethod
    def random(cls, n: int, k: int) -> WeightNf4:
        from bitsandbytes.functional import quantize_4bit

        weight = torch.randn(n, k, device=DEVICE).to(DTYPE) / 64
        return cls(*quantize_4bit(weight, blocksize=_BLOCK, quant_type="nf4"))

    def meaning(self, x: Tensor) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        return x.float() @ dequantize_4bit(self.packed, self.state).float().t()

    def linear(self) -> Callable[[Tensor], Tensor]:
        from bitsandbytes import matmul_4bit

        return lambda x: matmul_4bit(x, self.packed, quant_state=self.state)


@dataclass
class OurNf4:
    weight: PackedNf4

    @classmethod
    def random(cls, n: int, k: int, double: bool = False) -> OurNf4:
        """`double`: scales in 8 bits. Values are as far apart as NF4's, and as good for timing."""
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=DEVICE)
        table, count = torch.linspace(-1, 1, 16, device=DEVICE), n * k // _BLOCK
        scales: dict[str, Any] = {}
        absmax = (torch.rand(count, device=DEVICE) + 0.5) / 64
        if double:
            groups = -(-count // _SCALE_BLOCK)
            absmax = torch.randint(-127, 128, (groups * _SCALE_BLOCK,), dtype=torch.int8, device=DEVICE)
            scales = {
                "absmax_scale": torch.full((groups,), 1e-4, device=DEVICE),
                "absmax_mean": torch.tensor(0.02, device=DEVICE),
                "scale_block": _SCALE_BLOCK,
            }
        return cls(pack_nf4(codes, absmax, table, block_size=_BLOCK, **scales))

    def meaning(self, x: Tensor) -> Tensor:
        return x.float() @ self.weight.dequantize().t()

    def linear(self, options: dict[str, Any], make: Launch | None = None) -> Callable[[Tensor], Tensor]:
        launch = None if make is None else make(self.weight.out_features, self.weight.in_features)
        return lambda x: nf4.nf4_linear(x, self.weight, launch=launch, **options)


def launches(rows: int) -> dict[str, Launch]:
    """Launches that are not the default ones, to see whether they should be."""
    if rows > nf4.MAX_TILED_ROWS:
        return {}
    found: dict[str, Launch] = {"dequantized": lambda n, k: ExpandLaunch()}
    if rows > 1:
        found["2 stages"] = lambda n, k: replace(nf4.tile_launch(rows, n, k), num_stages=2)
        found["3 stages"] = lambda n, k: replace(nf4.tile_launch(rows, n, k), num_stages=3)
        found["no split"] = lambda n, k: replace(nf4.tile_launch(rows, n, k), split_k=1)
        found["1 plane"] = lambda n, k: replace(nf4.tile_launch(rows, n, k), planes=1)
        found["2 planes"] = lambda n, k: replace(nf4.tile_launch(rows, n, k), planes=2)
        found["tiles of W4A16"] = lambda n, k: replace(w4a16.tile_launch(rows, n, k), planes=2)
    if rows <= 4:
        for block_n, runs, warps in ((1, 8, 2), (1, 16, 4), (2, 4, 1), (2, 8, 2), (4, 8, 2)):
            made = GemvLaunch(block_n, runs * RUN, warps)
            found[f"gemv {block_n} x {runs} runs {warps}w"] = lambda n, k, made=made: made  # type: ignore[misc]
    if rows == 1:
        found["tile"] = lambda n, k: nf4.tile_launch(rows, n, k)
    return found
