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
