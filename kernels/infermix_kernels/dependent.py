"""Programmatic dependent launch: a kernel may start while its predecessor on the stream drains.

A kernel launched with `pdl=True` waits in `wait_for_inputs` until everything before it has finished and is visible;
what comes before that call (reading weights) overlaps the predecessor's end. It needs compute capability 9.0; other
kernels on the stream need not know of it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Blocks until the kernels before this one have finished, and lets the next one start early."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_lines(rows, step_bytes, first, last, LINES: tl.constexpr, PDL: tl.constexpr):
    """Asks for what `rows` (addresses) hold at `first ... last` steps of `step_bytes`, LINES cache lines a step.

    For weights, before the wait: they come from memory while the predecessor still runs. Without PDL, nothing.
    """
    if PDL:
        lines = tl.arange(0, LINES) * 128
        for step in range(first, last):
            at = rows[:, None] + (step * step_bytes + lines)[None, :]
            tl.inline_asm_elementwise(
                "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
            )
