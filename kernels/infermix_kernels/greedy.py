"""The most likely token of each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from infermix_kernels.checks import require, require_device, require_floats, require_rows, require_vector

_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def argmax_between(logits, begin, end, BLOCK: tl.constexpr):
    """Largest of `logits[begin:end]` and the first id that has it."""
    cols = tl.arange(0, BLOCK)
    values = tl.full([BLOCK], float("-inf"), tl.float32)
    ids = tl.full([BLOCK], _NO_TOKEN, tl.int32)
    for start in range(begin, end, BLOCK):
        inside = start + cols < end
        new = tl.load(logits + start + cols, mask=inside, other=float("-inf")).to(tl.float32)
        better = inside & ((new > values) | (ids == _NO_TOKEN))
        ids = tl.where(better, start + cols, ids)
        values = tl.where(better, new, values)
    best = tl.max(values, axis=0)
    return best, tl.min(tl.where(values == best, ids, _NO_TOKEN), axis=0)


@triton.jit
def argmax_of_row(logits, width, BLOCK: tl.constexpr):
    _, token = argmax_between(logits, 0, width, BLOCK)
    return tl.minimum(token, width - 1)


@triton.jit
def argmax_part_kernel(logits, best_values, best_ids, width, part_width, stride, BLOCK: tl.constexpr):
    """Grid: (rows, parts)."""
    row, part = tl.program_id(0), tl.program_id(1)
    begin = part * part_width
    best, token = argmax_between(
        logits + row.to(tl.int64) * stride, begin, tl.minimum(begin + part_width, width), BLOCK
    )
    tl.store(best_values + row * tl.num_programs(1) + part, best)
    tl.store(best_ids + row * tl.num_programs(1) + part, token)


@triton.jit
def argmax_join_kernel(best_values, best_ids, out, num_parts, width, PAD: tl.constexpr):
    """Grid: rows."""
    row = tl.program_id(0)
    parts = tl.arange(0, PAD)
    values = tl.load(best_values + row * num_parts + parts, mask=parts < num_parts, other=float("-inf"))
    ids = tl.load(best_ids + row * num_parts + parts, mask=parts < num_parts, other=_NO_TOKEN)
    token = tl.min(tl.where(values == tl.max(values, axis=0), ids, _NO_TOKEN), axis=0)
    tl.store(out + row, tl.minimum(token, width - 1).to(tl.int64))


def greedy(logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Ids `[R]` int64 of the largest logit of each row of `[R, V]`; the first one where several are equal."""
    require_floats(logits=logits)
    require_rows("logits", logits)
    num_rows, width = logits.shape
    require(width >= 1, "the vocabulary is empty")
    if out is None:
        out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    require_vector("out", out, num_rows)
    require(out.dtype == torch.int64, f"out is {out.dtype}, must be int64")
    require_device(logits, out)
    if num_rows == 0:
        return out
    block = min(triton.next_power_of_2(width), 2048)
    num_parts = max(1, min(triton.cdiv(width, block), 64, triton.cdiv(256, num_rows)))
    part_width = triton.cdiv(triton.cdiv(width, num_parts), block) * block
    num_parts = triton.cdiv(width, part_width)
    values = torch.empty(num_rows, num_parts, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    argmax_part_kernel[(num_rows, num_parts)](
        logits, values, ids, width, part_width, logits.stride(0), BLOCK=block, num_warps=max(1, block // 512)
    )
    pad = triton.next_power_of_2(num_parts)
    argmax_join_kernel[(num_rows,)](values, ids, out, num_parts, width, PAD=pad, num_warps=1)
    return out
