"""Programmatic dependent launch: a kernel may start while its predecessor on the stream drains.

A kernel launched with `pdl=True` waits in `wait_for_inputs` until everything before it has finished and is visible;
what comes before that call (reading weights) overlaps the predecessor's end. It needs compute capability 9.0; other
kernels on the stream need not know of it.

`fetch_ahead` overlaps more: before it waits, a program asks for the weights that it will read. Without it, a chain of
small products leaves the memory idle at every end and every start, for about 4 us of a product on an H200.
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
def fetch_ahead(pointers):
    """Have the 128-byte lines at `pointers` brought into the L2 cache; nothing waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)],
        dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
