"""Sampling with temperature, top-k, top-p and min-p over the vocabulary, without sorting it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from infermix_kernels.checks import require, require_device, require_floats, require_rows, require_vector
from infermix_kernels.greedy import argmax_part_kernel
from infermix_kernels.sampling_parts import BINS, count_kernel, list_kernel
from infermix_kernels.sampling_search import draw_kernel

MAX_VOCABULARY = 1 << 18
MAX_PARTS = 32
#: Programs of all rows together that keep a large device busy.
_PROGRAMS = 512
_BLOCK = 2048


@dataclass(frozen=True)
class SamplingWorkspace:
    """Scratch memory of `sample`; one serves any number of calls one after the other, captured or not."""

    peaks: Tensor
    peak_ids: Tensor
    masses: Tensor
    counts: Tensor
    lengths: Tensor
    values: Tensor
    ids: Tensor

    @classmethod
    def allocate(cls, device: torch.device | str, num_rows: int, vocabulary: int) -> SamplingWorkspace:
        """For up to `num_rows` rows of up to `vocabulary` logits."""
        parts = num_rows * MAX_PARTS

        def empty(size: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(size, dtype=dtype, device=device)

        return cls(
            peaks=empty(parts, torch.float32),
            peak_ids=empty(parts, torch.int32),
            masses=empty(parts, torch.int64),
            counts=empty(min(parts, _PROGRAMS + num_rows) * BINS.value, torch.int32),
            lengths=empty(num_rows, torch.int32),
            values=empty(num_rows * vocabulary, torch.float32),
            ids=empty(num_rows * vocabulary, torch.int32),
        )


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    noise: Tensor,
    *,
    out: Tensor | None = None,
    workspace: SamplingWorkspace | None = None,
) -> Tensor:
    """One token per row of `logits [R, V]`, int64 `[R]`.

    All parameters are `[R]`: `temperature` (0: the most likely token, the first of equal ones), `top_k` (0: off),
    `top_p` (1: off) over what top-k left, `min_p` (0: off) relative to the most likely token, `noise` in (0, 1), the
    point of the cumulative distribution, in order of token ids, at which the draw is made. Among tokens of equal
    logits, the first ids are kept. Probabilities below 2**-44 of the largest are not drawn. Without a `workspace`,
    scratch memory is allocated in the call.
    """
    parameters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "noise": noise}
    _check(logits, parameters)
    num_rows, width = logits.shape
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    require_vector("out", out, num_rows)
    require(out.dtype == torch.int64, f"out is {out.dtype}, must be int64")
    workspace = workspace or SamplingWorkspace.allocate(logits.device, num_rows, width)
    room = workspace.lengths.numel() >= num_rows and workspace.values.numel() >= num_rows * width
    require(room, f"the workspace has no room for {num_rows} rows of {width}")
    require_device(logits, out, workspace.values)
    if num_rows:
        _launch(logits, parameters, out, workspace)
    return out


def _check(logits: Tensor, parameters: dict[str, Tensor]) -> None:
    require_floats(logits=logits)
    require_rows("logits", logits)
    num_rows, width = logits.shape
    require(1 <= width <= MAX_VOCABULARY, f"a vocabulary of {width}; 1 to {MAX_VOCABULARY} are supported")
    top_k = parameters["top_k"]
    require(not top_k.dtype.is_floating_point, f"top_k is {top_k.dtype}, must be an integer dtype")
    for name, parameter in parameters.items():
        require_vector(name, parameter, num_rows)
    require_device(logits, *parameters.values())


def parts_of(num_rows: int, width: int) -> tuple[int, int]:
    """(programs per row, tokens of each): few rows are cut into many parts."""
    wanted = max(1, min(MAX_PARTS, _PROGRAMS // num_rows, triton.cdiv(width, _BLOCK)))
    part_width = triton.cdiv(triton.cdiv(width, wanted), _BLOCK) * _BLOCK
    return triton.cdiv(width, part_width), part_width


def _launch(logits: Tensor, parameters: dict[str, Tensor], out: Tensor, w: SamplingWorkspace) -> None:
    num_rows, width = logits.shape
    num_parts, part_width = parts_of(num_rows, width)
    temperature, top_k, top_p, min_p, noise = parameters.values()
    filters = (top_k, top_p, min_p)
    sizes = {"PARTS": triton.next_power_of_2(num_parts), "BLOCK": _BLOCK}
    grid, stride = (num_rows, num_parts), logits.stride(0)
    argmax_part_kernel[grid](logits, w.peaks, w.peak_ids, width, part_width, stride, BLOCK=_BLOCK, num_warps=8)
    count_kernel[grid](
        logits, temperature, w.peaks, w.masses, w.counts, width, part_width, stride, **sizes, num_warps=8
    )
    list_kernel[grid](
        logits, temperature, *filters, w.peaks, w.counts, w.values, w.ids, w.lengths, width, part_width, stride,
        **sizes, num_warps=8,
    )  # fmt: skip
    draw_kernel[(num_rows,)](
        logits, temperature, *filters, noise, w.peaks, w.peak_ids, w.masses, w.values, w.ids, w.lengths, out, width,
        part_width, num_parts, stride, PARTS=sizes["PARTS"], BLOCK=1024, num_warps=8,
    )  # fmt: skip
