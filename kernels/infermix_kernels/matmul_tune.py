"""Measures launches of the matrix products for the linears of a model on this machine and keeps them on disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from infermix_kernels import fp8, gemv, w4a16, w8a8, w8a16
from infermix_kernels.matmul_launch import (
    DotLaunch,
    ExpandLaunch,
    GemvLaunch,
    MatmulLaunch,
    MatmulWorkspace,
    RowLaunch,
    launch_for_fp32,
)
from infermix_kernels.matmul_table import LinearLaunch, LinearShape, MatmulTable, rows_class
from infermix_kernels.pack import PLANE, RUN, PackedW4
from infermix_kernels.search import Measure, search, seconds_of
from infermix_kernels.w8a8_row import FP8_ROW

#: Bytes of weights between two reads of the same one, so that none comes from the cache.
_COLD_BYTES = 200 << 20
_SHARED_BYTES = 227 * 1024
_TILE_AXES: dict[str, tuple[Any, ...]] = {
    "block_n": (16, 32, 64, 128, 256),
    "num_warps": (1, 2, 4, 8),
    "num_stages": (2, 3, 4, 5, 6),
    "split_k": (1, 2, 4, 8),
}


def linear_points(
    shape: LinearShape,
    rows: Sequence[int],
    table: MatmulTable,
    device: torch.device,
    measure: Measure | None = None,
) -> Iterator[tuple[str, Callable[[], LinearLaunch]]]:
    """The classes of row counts of a linear that `table` does not have yet, each with what measures and stores it.

    A class is measured at its largest count.
    """
    for num_rows in dict.fromkeys(rows_class(count) for count in rows):
        if num_rows <= _max_rows(shape) and not table.measured(shape, num_rows):
            yield shape.key(num_rows), partial(_tune, shape, num_rows, table, device, measure)


def _max_rows(shape: LinearShape) -> int:
    return gemv.MAX_ROWS if shape.family == "skinny" else 1 << 14


def _tune(
    shape: LinearShape, num_rows: int, table: MatmulTable, device: torch.device, measure: Measure | None
) -> LinearLaunch:
    calls = _calls(shape, num_rows, device)

    def seconds(launch: LinearLaunch) -> float | None:
        if not _fits(shape, launch):
            return None
        return seconds_of([partial(call, launch=launch) for call in calls], measure)

    best, shortest = search(_starts(shape, num_rows), partial(_axes, shape, num_rows), seconds)
    table.store(shape, num_rows, best, shortest)
    return best


def _starts(shape: LinearShape, num_rows: int) -> list[LinearLaunch]:
    """The default first, then other kinds of launches."""
    size = num_rows, shape.out_features, shape.in_features
    starts: list[LinearLaunch]
    if shape.family == "skinny":
        starts = [gemv.default_launch(*size)]
    elif shape.family == "w4a16":
        starts = [w4a16.default_launch(*size), w4a16.tile_launch(*size)]
        starts += [ExpandLaunch(), w4a16.SHARED_TILE, w4a16.SQUARE_TILE] if num_rows > 64 else []
        starts += [w4a16.broad_launch(*size)] if num_rows > 16 else []
    elif shape.family == "w8a16":
        starts = [w8a16.default_launch(*size, shape.group_size or shape.in_features)]
    elif shape.family == "int8":
        starts = [w8a8.default_launch(*size), *_byte_starts(shape, num_rows)]
    else:
        starts = [fp8.default_launch(*size), *_byte_starts(shape, num_rows)]
    if shape.element_bytes == 4:
        step = RUN if shape.family == "w4a16" else 64
        starts = [launch_for_fp32(each, step) if isinstance(each, MatmulLaunch) else each for each in starts]
        starts = [each for each in starts if not isinstance(each, RowLaunch | ExpandLaunch)]
    return list(dict.fromkeys(starts))


def _byte_starts(shape: LinearShape, num_rows: int) -> list[LinearLaunch]:
    if num_rows == 1:
        return [RowLaunch() if shape.family == "int8" else FP8_ROW] if shape.in_features % 4 == 0 else []
    if num_rows <= 64:
        return []
    plain = MatmulLaunch(128, 128, 128, 1, 8, 4, swap=False)
    described = [replace(plain, descriptors=True), replace(plain, block_n=256, num_stages=3, descriptors=True)]
    return [plain, *(described if shape.in_features % 16 == 0 else [])]


def _axes(shape: LinearShape, num_rows: int, launch: LinearLaunch) -> Mapping[str, Sequence[Any]]:
    if isinstance(launch, ExpandLaunch):
        return {}
    if isinstance(launch, GemvLaunch):
        return {"block_n": (1, 2, 4), "block_k": (512, 1024, 2048), "num_warps": (2, 4, 8)}
    if isinstance(launch, DotLaunch | RowLaunch):
        return {"block_n": (2, 4, 8, 16), "block_words": (256, 512, 1024), "num_warps": (2, 4, 8)}
    axes: dict[str, Sequence[Any]] = dict(_TILE_AXES)
    if launch.descriptors:
        del axes["split_k"]
    if shape.family != "w4a16" and not shape.group_size:
        axes["block_k"] = (64, 128, 256)
    if shape.family == "w4a16" and num_rows > 16:
        axes["planes"] = (1, 2, 4)
    if num_rows > 64:
        axes["block_m"] = (64, 128, 256)
        axes["group_m"] = (1, 8)
    return axes


def _fits(shape: LinearShape, launch: LinearLaunch) -> bool:
    """Whether the tiles fit into shared memory, and a warp has something to do."""
    if not isinstance(launch, MatmulLaunch):
        return True
    weight_bytes = {"w4a16": 0.5, "skinny": shape.element_bytes}.get(shape.family, 1)
    x_bytes = 1 if shape.family in ("int8", "fp8") else shape.element_bytes
    step = launch.block_k * (launch.block_m * x_bytes + launch.block_n * weight_bytes)
    per_warp = launch.block_m * launch.block_n // launch.num_warps
    return 64 <= per_warp <= 4096 and step * max(launch.num_stages - 1, 1) <= _SHARED_BYTES


def _calls(shape: LinearShape, num_rows: int, device: torch.device) -> list[Callable[..., object]]:
    """Calls on different weights, as the layers of a model are. Random contents: zeros would be faster."""
    dtype = torch.float32 if shape.element_bytes == 4 else torch.bfloat16
    if triton.knobs.runtime.interpret and dtype == torch.bfloat16:
        dtype = torch.float16  # the interpreter computes bfloat16 wrongly
    x = torch.randn(num_rows, shape.in_features, device=device, dtype=dtype)
    out = torch.empty(num_rows, shape.out_features, device=device, dtype=dtype)
    pdl = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    options = {"out": out, "workspace": MatmulWorkspace.allocate(device), "pdl": pdl}
    size = shape.out_features * shape.in_features * {"skinny": shape.element_bytes, "w4a16": 0.5}.get(shape.family, 1)
    copies = max(1, min(64, int(_COLD_BYTES / size))) if device.type == "cuda" else 1
    return [_call(shape, x, options) for _ in range(copies)]


def _call(shape: LinearShape, x: Tensor, options: dict[str, Any]) -> Callable[..., object]:
    if shape.family == "skinny":
        weight = torch.randn(shape.out_features, shape.in_features, device=x.device, dtype=x.dtype)
        return partial(gemv.skinny_linear, x, weight, **options)
    if shape.family == "w4a16":
        return partial(w4a16.w4a16_linear, x, _random_w4(shape, x), **options)
    weight, scale = _random_w8(shape, x.device)
    linear = {"w8a16": w8a16.w8a16_linear, "int8": w8a8.w8a8_linear, "fp8": fp8.fp8_linear}[shape.family]
    return partial(linear, x, weight, scale, **options)


def _random_w4(shape: LinearShape, x: Tensor) -> PackedW4:
    words = -(-shape.in_features // RUN) * PLANE
    groups = shape.in_features // shape.group_size
    size = (groups, shape.out_features)
    return PackedW4(
        torch.randint(-(2**31), 2**31 - 1, (shape.out_features, words), dtype=torch.int32, device=x.device),
        torch.rand(size, device=x.device).to(x.dtype) / 64,
        torch.randint(0, 16, size, dtype=torch.uint8, device=x.device) if shape.zeros else None,
        shape.in_features,
        shape.group_size,
    )


def _random_w8(shape: LinearShape, device: torch.device) -> tuple[Tensor, Tensor]:
    size = (shape.out_features, shape.in_features)
    groups = (shape.in_features // shape.group_size,) if shape.group_size else ()
    scale = torch.rand(*groups, shape.out_features, device=device) / 64
    if shape.family == "fp8":
        return torch.randn(size, device=device).to(torch.float8_e4m3fn), scale
    return torch.randint(-127, 128, size, dtype=torch.int8, device=device), scale
