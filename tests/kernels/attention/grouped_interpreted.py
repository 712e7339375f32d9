"""Attention over groups of 4 and 2 bits under Triton's interpreter: in a process started with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from attention_cases import error
from grouped_cases import TOLERANCE, GroupedCase, build, expected
from infermix_kernels.attention import Workspace
from infermix_kernels.attention_grouped import grouped_attention
from infermix_kernels.launch import Launch

SPLIT, RUN, WIDE, TALL = (16, 16, 4, 2, 6), (16, 16, 4, 2, 1), (16, 32, 4, 2, 1), (32, 16, 4, 2, 1)

CASES = [
    GroupedCase("int4 decode", (1, 1, 1), (1, 20, 70), launch=SPLIT),
    GroupedCase("int2 padded, verification", (2, 1, 1), (60, 0, 36), bits=2, heads=(4, 1), launch=RUN),
    GroupedCase("int4 fp16, sinks", (1,), (70,), dtype=torch.float16, sinks=True, launch=SPLIT),
    GroupedCase("int4 tiles over groups", (1,), (90,), launch=WIDE),
    GroupedCase("int2 groups that are no power of two", (1,), (125,), bits=2, heads=(2, 1), dims=(80, 48),
                group_size=48, block_size=48, launch=WIDE),
    GroupedCase("int4 odd heads", (1,), (60,), heads=(6, 2), dims=(80, 48), group_size=24, block_size=24,
                launch=RUN),
    GroupedCase("int4 window and softcap", (2,), (90,), rules={"window": 50, "softcap": 2.0}, launch=SPLIT),
    GroupedCase("int4 window inside the tail", (1,), (90,), rules={"window": 7}, launch=RUN),
    GroupedCase("int4 prefill", (50, 3), (50, 60), heads=(2, 1), launch=TALL),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case: GroupedCase) -> None:
    arguments = build(case)
    launch = Launch(*case.launch) if case.launch else None
    out = grouped_attention(**arguments, launch=launch, workspace=Workspace.allocate("cpu", 1 << 16))
    assert error(out, expected(arguments)) < TOLERANCE[case.dtype]
