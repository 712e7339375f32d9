"""The four linears of a layer in one CUDA graph: bf16, W4A16, W8A8 with the input quantized on the way; peers too.

Marlin, Machete and the CUTLASS products come with vLLM, tinygemm with torch, NF4 with bitsandbytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from infermix_kernels import fp8, gemv, w4a16, w8a8
from infermix_kernels.launch import overlaps_launches
from infermix_kernels.matmul_launch import MatmulLaunch, MatmulWorkspace, RowLaunch
from infermix_kernels.matmul_table import LinearShape, MatmulTable
from infermix_kernels.pack import pack_w4
from infermix_kernels.reference import matmul as meant
from infermix_kernels.tune import TuneShapes, tune_all
from infermix_kernels.w8a8_row import FP8_ROW
from kernel_nf4 import OurNf4, WeightNf4, launches
from kernel_timing import DEVICE, DTYPE, GPU, Ceilings, Goal, Sheet, graph_seconds, relative_error
from torch import Tensor

#: q/k/v, output, gate/up and down projection: output and input features.
LINEARS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)) if GPU else ((96, 256), (64, 512))
LAYERS = 4 if GPU else 1
GROUP = 128
#: Rows that are compared with the reference.
_CHECKED = 32
W4_GOALS = {1: (62.0, 45.0), 8: (66.0, 50.0), 64: (118.0, 95.0), 512: (320.0, 290.0)}
W8_GOALS = {1: (80.0, 60.0), 8: (None, None), 64: (88.0, 80.0), 512: (182.0, 165.0)}
#: Launches of many rows of 8 bits beside the default ones.
BYTE_TILES = (
    MatmulLaunch(128, 256, 128, 1, 8, 3, swap=False, descriptors=True),
    MatmulLaunch(128, 256, 128, 1, 8, 4, swap=False, descriptors=True),
    MatmulLaunch(128, 128, 128, 1, 8, 4, swap=False, descriptors=True),
    MatmulLaunch(128, 128, 128, 1, 4, 4, swap=False, descriptors=True),
    MatmulLaunch(256, 128, 128, 1, 8, 3, swap=False, descriptors=True),
    MatmulLaunch(128, 128, 256, 1, 8, 3, swap=False, descriptors=True),
    MatmulLaunch(128, 256, 128, 1, 8, 3, swap=False),
)
SIZES = (1, 8, 64, 512) if GPU else (1, 20)

Linear = Callable[[Tensor], Tensor]
#: Label, what makes a linear of a weight, whether it is ours.
Contender = tuple[str, Callable[[Any], Linear], bool]


@dataclass
class Weight4:
    """`q [N, K]` uint8 below 16, `scales [N, groups]`; a weight is (q - 8) * scale."""

    q: Tensor
    scales: Tensor

    @classmethod
    def random(cls, n: int, k: int) -> Weight4:
        q = torch.randint(0, 16, (n, k), dtype=torch.uint8, device=DEVICE)
        return cls(q, ((torch.rand(n, k // GROUP, device=DEVICE) + 0.5) / 64).to(DTYPE))

    def meaning(self, x: Tensor) -> Tensor:
        weight = (self.q.float() - 8) * self.scales.float().repeat_interleave(GROUP, dim=1)
        return x.float() @ weight.t()

    @cached_property
    def gptq(self) -> Tensor:
        """`[K / 8, N]` int32, low bits first."""
        k = self.q.shape[1]
        rows = self.q.t().reshape(k // 8, 8, -1)
        words = torch.zeros(k // 8, self.q.shape[0], dtype=torch.int32, device=DEVICE)
        for place in range(8):
            words |= rows[:, place].to(torch.int32) << (4 * place)
        return words


@dataclass
class Weight8:
    """`numbers [N, K]` int8 or FP8, `scale [N]`."""

    numbers: Tensor
    scale: Tensor

    @classmethod
    def random(cls, n: int, k: int, kind: torch.dtype) -> Weight8:
        data = torch.randn(n, k, device=DEVICE)
        numbers = (data * 40).round().clamp(-127, 127).to(kind) if kind == torch.int8 else data.to(kind)
        return cls(numbers, (torch.rand(n, device=DEVICE) + 0.5) / 64)

    def meaning(self, x: Tensor) -> Tensor:
        return meant.quantized_linear(x, self.numbers, self.scale)


def linear_rows(sheet: Sheet, limits: Ceilings, tables: Path | None) -> None:
    table = None if tables is None else MatmulTable(tables, DEVICE)
    for rows in SIZES:
        _bf16(sheet, limits, rows)
        _w4a16(sheet, rows, table)
        _our_nf4(sheet, rows)
        for name, kind in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn)):
            _w8a8(sheet, name, kind, rows, table)


def measure(weights: list[list[Any]], rows: int, make: Callable[[Any], Linear]) -> tuple[float, float]:
    """(Microseconds a layer, the worst error of the first layer's linears)."""
    inputs = [torch.randn(rows, k, device=DEVICE).to(DTYPE) for _, k in LINEARS]
    layers = [[make(weight) for weight in layer] for layer in weights]
    error = 0.0
    for weight, linear, x in zip(weights[0], layers[0], inputs, strict=True):
        error = max(error, relative_error(linear(x)[:_CHECKED], weight.meaning(x[:_CHECKED])))
    calls = [partial(linear, x) for layer in layers for linear, x in zip(layer, inputs, strict=True)]
    return graph_seconds(calls) * len(LINEARS) * 1e6, error


@dataclass
class Plain:
    weight: Tensor

    def meaning(self, x: Tensor) -> Tensor:
        return x.float() @ self.weight.float().t()


def _bf16(sheet: Sheet, limits: Ceilings, rows: int) -> None:
    row = f"linears bf16 M={rows}"
    if not sheet.wants(row):
        return
    weights = [[Plain(torch.randn(n, k, device=DEVICE).to(DTYPE)) for n, k in LINEARS] for _ in range(LAYERS)]
    goal = Goal("us/layer", False)
    sheet.add(row, "torch.mm", goal, partial(measure, weights, rows, _mm))
    if rows <= gemv.MAX_ROWS:
        options = {"workspace": MatmulWorkspace.allocate(DEVICE), "pdl": overlaps_launches(DEVICE)}
        sheet.add(row, "ours skinny", goal, partial(measure, weights, rows, partial(_skinny, options)))
    num_bytes = sum(2 * n * k for n, k in LINEARS)
    print(f"  bytes alone: {num_bytes / limits.copy * 1e6:.1f} us", flush=True)


def _mm(weight: Plain) -> Linear:
    transposed = weight.weight.t()
    return lambda x: torch.mm(x, transposed)


def _skinny(options: dict[str, Any], weight: Plain) -> Linear:
    return lambda x: gemv.skinny_linear(x, weight.weight, **options)


def _w4a16(sheet: Sheet, rows: int, table: MatmulTable | None) -> None:
    row = f"linears W4A16 g{GROUP} M={rows}"
    if not sheet.wants(row):
        return
    weights = [[Weight4.random(n, k) for n, k in LINEARS] for _ in range(LAYERS)]
    target, stretch = W4_GOALS.get(rows, (None, None))
    goal = Goal("us/layer", False, target, stretch)
    options = {"workspace": MatmulWorkspace.allocate(DEVICE), "pdl": overlaps_launches(DEVICE)}
    contenders: list[Contender] = [
        ("ours", partial(_our_w4, options), True),
        ("ours, no early starts", partial(_our_w4, {**options, "pdl": False}), True),
    ]
    contenders += [
        (f"ours, no early starts, {name} zero points", partial(_our_w4, {**options, "pdl": False}, zeros=zeros), True)
        for name, zeros in (("byte", torch.uint8), ("16-bit", DTYPE), ("32-bit", torch.int32))
    ]
    if table is not None:
        contenders.append(("ours tuned", partial(_our_w4, {**options, "launches": table}), True))
    contenders += [
        (f"ours, {name}", partial(_our_w4_tiles, options, make), True) for name, make in _tiles(rows).items()
    ]
    contenders += [("Marlin", _marlin, False), ("Machete", _machete, False)]
    if rows <= 64:
        contenders.append(("tinygemm", _tinygemm, False))
    for label, make, ours in contenders:
        sheet.add(row, label, goal, partial(measure, weights, rows, make), ours=ours)
    sheet.add(row, "bitsandbytes NF4", goal, partial(_nf4, rows))


def _our_nf4(sheet: Sheet, rows: int) -> None:
    """Ours, beside 4 bits without a table and the linears that both replace."""
    row = f"linears NF4 M={rows}"
    if not sheet.wants(row):
        return
    goal, options = Goal("us/layer", False), {"workspace": MatmulWorkspace.allocate(DEVICE)}
    early = {**options, "pdl": overlaps_launches(DEVICE)}
    weights = [[OurNf4.random(n, k) for n, k in LINEARS] for _ in range(LAYERS)]
    contenders: list[tuple[str, dict[str, Any], Any]] = [
        ("ours", early, None),
        ("ours, no early starts", options, None),
    ]
    contenders += [(f"ours, {name}", options, make) for name, make in launches(rows).items()]
    for label, given, make in contenders:
        sheet.add(row, label, goal, partial(measure, weights, rows, lambda w, g=given, m=make: w.linear(g, m)))
    sheet.add(row, "ours, 8-bit scales", goal, partial(_our_nf4_double, rows, early))
    fours = [[Weight4.random(n, k) for n, k in LINEARS] for _ in range(LAYERS)]
    sheet.add(row, "ours W4A16", goal, partial(measure, fours, rows, partial(_our_w4, early)))
    plain = [[Plain(torch.randn(n, k, device=DEVICE).to(DTYPE)) for n, k in LINEARS] for _ in range(LAYERS)]
    sheet.add(row, "torch.mm bf16", goal, partial(measure, plain, rows, _mm))
    sheet.add(row, "bitsandbytes NF4", goal, partial(_nf4, rows))


def _our_nf4_double(rows: int, options: dict[str, Any]) -> tuple[float, float]:
    weights = [[OurNf4.random(n, k, True) for n, k in LINEARS] for _ in range(LAYERS)]
    return measure(weights, rows, lambda weight: weight.linear(options))


def _nf4(rows: int) -> tuple[float, float]:
    """Other numbers than those of W4A16: they are its own, in blocks of 64."""
    weights = [[WeightNf4.random(n, k) for n, k in LINEARS] for _ in range(LAYERS)]
    return measure(weights, rows, WeightNf4.linear)


def _our_w4(options: dict[str, Any], weight: Weight4, zeros: torch.dtype | None = None) -> Linear:
    """With `zeros`, the zero points (8 everywhere, the meaning without any) are read from memory as such numbers."""
    packed = pack_w4(weight.q, weight.scales)
    if zeros is not None:
        packed = replace(packed, zeros=torch.full_like(packed.scales, 8).to(zeros))
    return lambda x: w4a16.w4a16_linear(x, packed, **options)


def _tiles(rows: int) -> dict[str, Callable[[int, int], MatmulLaunch]]:
    """Tiles that the defaults do not use, by output and input features."""
    if rows <= 16:
        return {}
    found = {
        "4 planes": lambda n, k: replace(w4a16.tile_launch(rows, n, k), planes=4),
        "broad": lambda n, k: w4a16.broad_launch(rows, n, k),
    }
    if rows > w4a16.MAX_TILED_ROWS:
        found |= {
            "tiles": lambda n, k: w4a16.tile_launch(rows, n, k),
            "shared": lambda n, k: w4a16.SHARED_TILE,
            "square": lambda n, k: w4a16.SQUARE_TILE,
        }
    return found


def _our_w4_tiles(options: dict[str, Any], make: Callable[[int, int], MatmulLaunch], weight: Weight4) -> Linear:
    return _our_w4({**options, "launch": make(*weight.q.shape)}, weight)


def _marlin(weight: Weight4) -> Linear:
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils import marlin_utils as marlin
    from vllm.scalar_type import scalar_types

    n, k = weight.q.shape
    empty = torch.empty(0, dtype=torch.int, device=DEVICE)
    packed = ops.gptq_marlin_repack(weight.gptq, empty, k, n, 4)
    scales = marlin.marlin_permute_scales(weight.scales.t().contiguous(), k, n, GROUP)
    shared: dict[str, Any] = {
        "weight": packed, "weight_scale": scales, "weight_zp": empty, "g_idx": empty, "g_idx_sort_indices": empty,
        "workspace": marlin.marlin_make_workspace_new(torch.device("cuda", 0)), "wtype": scalar_types.uint4b8,
        "output_size_per_partition": n, "input_size_per_partition": k, "is_k_full": True,
    }  # fmt: skip
    return lambda x: marlin.apply_gptq_marlin_linear(x, **shared)


def _machete(weight: Weight4) -> Linear:
    from vllm import _custom_ops as ops
    from vllm.scalar_type import scalar_types

    kind = scalar_types.uint4b8
    packed = ops.machete_prepack_B(weight.gptq.t().contiguous().t(), DTYPE, kind, DTYPE)
    scales = weight.scales.t().contiguous()
    return lambda x: ops.machete_mm(
        a=x, b_q=packed, b_type=kind, b_group_scales=scales, b_group_size=GROUP
    )  # fmt: skip


def _tinygemm(weight: Weight4) -> Linear:
    pairs = (weight.q[:, ::2] << 4) | weight.q[:, 1::2]
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), 8)
    scales = weight.scales.t()
    both = torch.stack((scales, torch.zeros_like(scales)), dim=-1).contiguous()
    return lambda x: torch.ops.aten._weight_int4pack_mm(x, packed, GROUP, both)


def _w8a8(sheet: Sheet, name: str, kind: torch.dtype, rows: int, table: MatmulTable | None) -> None:
    row = f"linears W8A8 {name} M={rows}"
    if not sheet.wants(row):
        return
    weights = [[Weight8.random(n, k, kind) for n, k in LINEARS] for _ in range(LAYERS)]
    target, stretch = W8_GOALS.get(rows, (None, None))
    goal = Goal("us/layer", False, target, stretch)
    options = {"workspace": MatmulWorkspace.allocate(DEVICE), "pdl": overlaps_launches(DEVICE)}
    contenders: list[Contender] = [("ours", partial(_our_w8, options), True)]
    if rows == 1:
        inside = {**options, "launch": RowLaunch() if name == "int8" else FP8_ROW}
        contenders.append(("ours, quantized inside", partial(_our_w8, inside), True))
    if table is not None:
        contenders.append(("ours tuned", partial(_our_w8, {**options, "launches": table}), True))
    for each in BYTE_TILES if rows > 64 else ():
        label = f"ours {each.block_m}x{each.block_n}x{each.block_k} {each.num_warps}w {each.num_stages}s"
        made = partial(_our_w8, {**options, "launch": each})
        contenders.append((label + (" tma" if each.descriptors else ""), made, True))
    contenders.append(("vLLM CUTLASS", _cutlass, False))
    for label, make, ours in contenders:
        sheet.add(row, label, goal, partial(measure, weights, rows, make), ours=ours)


def _our_w8(options: dict[str, Any], weight: Weight8) -> Linear:
    linear = w8a8.w8a8_linear if weight.numbers.dtype == torch.int8 else fp8.fp8_linear
    return lambda x: linear(x, weight.numbers, weight.scale, **options)


def _cutlass(weight: Weight8) -> Linear:
    from vllm import _custom_ops as ops

    transposed, scale = weight.numbers.t(), weight.scale[None, :].contiguous()

    def call(x: Tensor) -> Tensor:
        if weight.numbers.dtype == torch.int8:
            quantized, x_scale, _ = ops.scaled_int8_quant(x)
        else:
            quantized, x_scale = ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
        return ops.cutlass_scaled_mm(quantized, transposed, x_scale, scale, DTYPE)

    return call


def tune_linears(folder: Path, rows: tuple[int, ...], families: tuple[str, ...]) -> None:
    """Measure what `ours tuned` looks up, and print it."""
    shapes = [
        LinearShape(family, n, k, GROUP if family == "w4a16" else 0)  # type: ignore[arg-type]
        for family in families
        for n, k in LINEARS
    ]
    wanted = TuneShapes(linears=shapes, rows=rows)
    tune_all(wanted, folder, DEVICE, lambda name, done: print(f"  {done:4.0%} {name}", flush=True))
    table = MatmulTable(folder, DEVICE)
    for shape in shapes:
        for count in rows:
            print(f"tuned {shape.key(count)}: {table.find(shape, count)}", flush=True)
