"""Compiles the operators for sm_90, as a decode or prefill step of an 8B shape launches them; one JSON line each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from compile_launches import compile_launches
from infermix_kernels import (
    activation,
    fp8,
    gemv,
    gemv_gated,
    greedy,
    kv_write,
    nf4,
    nf4_dequantize,
    norm,
    rotary,
    sampling,
    softmax,
    w4a16,
    w4a16_dequantize,
    w8a8,
    w8a16,
)
from infermix_kernels.matmul_launch import MatmulLaunch, MatmulWorkspace, RowLaunch
from infermix_kernels.nf4_pack import PackedNf4
from infermix_kernels.pack import PackedW4
from infermix_kernels.w8a8_row import FP8_ROW
from torch import Tensor

BF16, FP32, INT8, FP8, INT64 = torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.int64
N, K = 6144, 4096


def tensor(*shape: int, of: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=of, device="meta")


def packed(zeros: torch.dtype | None = None) -> PackedW4:
    scales = tensor(K // 128, N)
    return PackedW4(tensor(N, K // 8, of=torch.int32), scales, None if zeros is None else scales.to(zeros), K, 128)


def table() -> rotary.RotaryTable:
    return rotary.RotaryTable(tensor(8192, 64), tensor(8192, 64))


def write(num_tokens: int, pool: torch.dtype = BF16, pdl: bool = False, normed: bool = False) -> None:
    pools = [tensor(101, 16, 8, 128, of=pool) for _ in range(2)]
    scales = [None if pool == BF16 else tensor(101, 8, 16, of=FP32) for _ in range(2)]
    new = [tensor(num_tokens, 8, 128) for _ in range(2)]
    index = tensor(num_tokens, of=INT64)
    kv_write.write_kv(
        new[0], new[1], pools[0], pools[1], index, key_scales=scales[0], value_scales=scales[1], table=table(),
        positions=index, q=tensor(num_tokens, 32, 128), pdl=pdl,
        norms=rotary.HeadNorms(tensor(128), tensor(128), 1e-6) if normed else None,
    )  # fmt: skip


def sample(rows: int, width: int) -> None:
    kinds = (FP32, INT64, torch.float64, torch.float64, torch.float64)
    sampling.sample(tensor(rows, width, of=FP32), *(tensor(rows, of=kind) for kind in kinds))


def eight_bits(rows: int, kind: torch.dtype, launch: Any = None, weight_only: bool = False) -> None:
    linear = w8a16.w8a16_linear if weight_only else w8a8.w8a8_linear if kind == INT8 else fp8.fp8_linear
    weight, scale, workspace = tensor(N, K, of=kind), tensor(N, of=FP32), MatmulWorkspace.allocate("meta")
    linear(tensor(rows, K), weight, scale, workspace=workspace, launch=launch)


def row(kind: torch.dtype) -> None:
    linear = w8a8.w8a8_linear if kind == INT8 else fp8.fp8_linear
    linear(
        tensor(1, K),
        tensor(N, K, of=kind),
        tensor(N, of=FP32),
        launch=RowLaunch() if kind == INT8 else FP8_ROW,
        pdl=True,
    )


def four_bits(rows: int, zeros: torch.dtype | None = None, launch: Any = None, pdl: bool = False) -> None:
    workspace = MatmulWorkspace.allocate("meta")
    w4a16.w4a16_linear(tensor(rows, K), packed(zeros), workspace=workspace, launch=launch, pdl=pdl)


def nf4_weight(block: int = 64, double: bool = False) -> PackedNf4:
    blocks, tables = N * K // block, (tensor(16, of=FP32), tensor(16, of=torch.float16), tensor(16))
    words = tensor(N, K // 8, of=torch.int32)
    if not double:
        return PackedNf4(words, tensor(blocks, of=FP32), None, None, tables, K, block)
    scales = tensor(blocks, of=INT8), tensor(blocks // 256, of=FP32), tensor(of=FP32)
    return PackedNf4(words, *scales, tables, K, block, 256)


def nf4_product(rows: int, block: int = 64, double: bool = False, launch: Any = None, pdl: bool = False) -> None:
    workspace, weight = MatmulWorkspace.allocate("meta"), nf4_weight(block, double)
    nf4.nf4_linear(tensor(rows, K), weight, workspace=workspace, launch=launch, pdl=pdl)


def skinny(rows: int, launch: Any = None, pdl: bool = False) -> None:
    workspace = MatmulWorkspace.allocate("meta")
    gemv.skinny_linear(tensor(rows, K), tensor(N, K), workspace=workspace, launch=launch, pdl=pdl)


def add_norm(rows: int, pdl: bool = False) -> None:
    norm.add_rms_norm(tensor(rows, 4096), tensor(rows, 4096), tensor(4096), 1e-5, pdl=pdl)


DESCRIPTORS = MatmulLaunch(128, 256, 128, 1, 8, 3, swap=False, descriptors=True)
FAST: dict[str, Callable[[], object]] = {
    "norm, one row, early start": lambda: add_norm(1, pdl=True),
    "silu": lambda: activation.silu_and_mul(tensor(64, 28672)),
    "write_kv, one row, early start": lambda: write(1, pdl=True),
    "write_kv, normed heads, early start": lambda: write(1, pdl=True, normed=True),
    "write_kv, fp8": lambda: write(64, FP8),
    "sample": lambda: sample(8, 49152),
    "gemv, early start": lambda: skinny(1, pdl=True),
    "gated gemv, early start": lambda: gemv_gated.gated_row(tensor(1, K), tensor(N, K), "silu", pdl=True),
    "skinny, split": lambda: skinny(8),
    "w4 tile, one row, early start": lambda: four_bits(1, torch.uint8, pdl=True),
    "w4 tile, zeros": lambda: four_bits(8, torch.uint8),
    "w4 tile, zeros between integers": lambda: four_bits(8, BF16),
    "w4 tile, large": lambda: four_bits(200),
    "nf4 gemv, early start": lambda: nf4_product(1, pdl=True),
    "nf4 tile": lambda: nf4_product(8),
    "int8 gemv": lambda: eight_bits(1, INT8),
    "int8 row, early start": lambda: row(INT8),
    "fp8 row, early start": lambda: row(FP8),
    "fp8 tile": lambda: eight_bits(8, FP8),
}
FULL: dict[str, Callable[[], object]] = {
    "norm, many rows": lambda: add_norm(16384),
    "layer norm": lambda: norm.layer_norm(tensor(64, 768), tensor(768), tensor(768), 1e-5),
    "gelu tanh": lambda: activation.gelu_and_mul(tensor(64, 28672)),
    "gelu erf": lambda: activation.gelu_and_mul(tensor(64, 28672), approximate="none"),
    "softmax": lambda: softmax.softmax(tensor(64, 49152)),
    "softmax, short rows": lambda: softmax.softmax(tensor(64, 4096)),
    "rotary": lambda: rotary.rotary(tensor(64, 32, 128), tensor(64, 8, 128), table(), tensor(64, of=INT64)),
    "write_kv, int8": lambda: write(64, INT8),
    "write_kv, many rows": lambda: write(16384),
    "greedy": lambda: greedy.greedy(tensor(64, 128256)),
    "sample, large vocabulary": lambda: sample(64, 128256),
    "skinny, unsplit": lambda: skinny(8, MatmulLaunch(8, 16, 128, 1, 1, 5)),
    "w4 expanded": lambda: w4a16_dequantize.dequantize(packed(torch.uint8), tensor(N, K)),
    "w4 expanded, zeros between integers": lambda: w4a16_dequantize.dequantize(packed(BF16), tensor(N, K)),
    "w4 tile, 64 rows": lambda: four_bits(64),
    "w4 tile, broad": lambda: four_bits(64, launch=w4a16.broad_launch(64, N, K)),
    "w4 tile, shared": lambda: four_bits(512, launch=w4a16.SHARED_TILE),
    "w4 tile, square": lambda: four_bits(512, launch=w4a16.SQUARE_TILE),
    "nf4 gemv, 8-bit scales": lambda: nf4_product(1, double=True),
    "nf4 gemv, small blocks": lambda: nf4_product(3, 16, True),
    "nf4 tile, 8-bit scales, early start": lambda: nf4_product(16, double=True, pdl=True),
    "nf4 tile, 64 rows": lambda: nf4_product(64),
    "nf4 tile, large blocks": lambda: nf4_product(33, 256),
    "nf4 expanded": lambda: nf4_dequantize.dequantize(nf4_weight(), tensor(N, K)),
    "nf4 expanded, small blocks": lambda: nf4_dequantize.dequantize(nf4_weight(16, True), tensor(N, K)),
    "w8a16": lambda: eight_bits(8, INT8, weight_only=True),
    "w8a16, fp8": lambda: eight_bits(8, FP8, weight_only=True),
    "w8a16, large": lambda: eight_bits(512, INT8, weight_only=True),
    "int8 tile": lambda: eight_bits(8, INT8),
    "int8, 64 rows": lambda: eight_bits(64, INT8),
    "int8, large": lambda: eight_bits(512, INT8),
    "int8, descriptors": lambda: eight_bits(512, INT8, DESCRIPTORS),
    "fp8, 64 rows": lambda: eight_bits(64, FP8),
    "fp8, large": lambda: eight_bits(512, FP8),
    "fp8, descriptors": lambda: eight_bits(512, FP8, DESCRIPTORS),
}


def main(which: str) -> None:
    for name, call in (FULL if which == "full" else FAST).items():
        for compiled in compile_launches(call):
            row = {"case": name, "kernel": compiled.kernel, "registers": compiled.registers}
            print(json.dumps(row | {"spills": compiled.spills, "shared": compiled.shared, **_kinds(compiled.ptx)}))


def _kinds(ptx: str) -> dict[str, int]:
    """How many matrix instructions and early-start waits the assembly has."""
    return {"wgmma": ptx.count("wgmma.mma_async"), "waits": ptx.count("griddepcontrol.wait")}


if __name__ == "__main__":
    main(sys.argv[1])
