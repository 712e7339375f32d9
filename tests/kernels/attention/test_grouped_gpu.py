"""Attention over 4- and 2-bit groups on a GPU: every shape against fp64, and capture."""

from __future__ import annotations

from typing import Any

import group_write_interpreted as written
import pytest
import torch
from attention_cases import error
from grouped_cases import TOLERANCE, GroupedCase, build, expected
from infermix_kernels.attention import Workspace
from infermix_kernels.attention_grouped import grouped_attention
from infermix_kernels.group_write import write_groups
from infermix_kernels.launch import Launch
from infermix_kernels.reference import grouped as meant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LENS: dict[str, dict[str, Any]] = {
    "decode": {"query_lens": (1,) * 5, "contexts": (1, 4097, 0, 777, 2048)},
    "prefill": {"query_lens": (300, 1, 65, 128), "contexts": (300, 40, 1000, 128)},
    "verify": {"query_lens": (5, 8, 1), "contexts": (2000, 8, 333)},
}
COMMON: dict[str, Any] = {"heads": (32, 8), "group_size": 32, "block_size": 32, "recent": 64}
#: Compiling takes longest: every width and dtype once, every kind of query in the most common one.
SHAPES: tuple[tuple[tuple[int, int], torch.dtype, tuple[str, ...]], ...] = (
    ((128, 128), BF16, ("decode", "prefill", "verify")),
    ((64, 64), FP16, ("decode", "verify")),
    ((192, 128), BF16, ("decode", "prefill")),
    ((96, 96), FP32, ("decode",)),
    ((256, 256), BF16, ("decode",)),
)
CASES = [
    *(
        GroupedCase(f"{kind} int{bits} {dims} {dtype}", **LENS[kind], **COMMON, bits=bits, dims=dims, dtype=dtype)
        for bits in (4, 2)
        for dims, dtype, kinds in SHAPES
        for kind in kinds
    ),
    *(
        GroupedCase(f"decode int4 groups of {size}", **LENS["decode"], heads=(8, 2), dims=(128, 128), dtype=BF16,
                    group_size=size, block_size=128, recent=recent)
        for size, recent in ((8, 1), (16, 33), (64, 64), (128, 1))
    ),
    *(
        GroupedCase(f"{kind} int2 rules", **lens, **COMMON, bits=2, dims=(128, 128), dtype=BF16, sinks=True,
                    rules={"window": 300, "softcap": 5.0})
        for kind, lens in LENS.items()
    ),
    GroupedCase("other tiles", **LENS["decode"], **COMMON, dims=(128, 128), dtype=BF16, launch=(16, 64, 4, 3, 4)),
    GroupedCase("one long sequence", (1,), (30000,), **COMMON, dims=(128, 128), dtype=BF16),
    GroupedCase("long chunk over a long context", (130,), (20000,), **COMMON, dims=(128, 128), dtype=BF16),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_fp64(case: GroupedCase) -> None:
    arguments = build(case, seed=len(case.name), device="cuda")
    launch = Launch(*case.launch) if case.launch else None
    workspace = Workspace.allocate("cuda")
    out = grouped_attention(**arguments, launch=launch, workspace=workspace, check_block_tables=True)
    assert error(out, expected(arguments)) < TOLERANCE[case.dtype]
    again = build(case, seed=1, device="cuda")
    out = grouped_attention(**again, launch=launch, workspace=workspace)
    assert error(out, expected(again)) < TOLERANCE[case.dtype]


@pytest.mark.parametrize("bits", [4, 2])
def test_a_captured_call_follows_its_tensors(bits: int) -> None:
    """A context that grows or shrinks inside the tail reads other tokens of the same memory."""
    case = GroupedCase("capture", (1,) * 3, (700, 300, 64), bits=bits, **COMMON, dims=(128, 128), dtype=BF16)
    arguments = {**build(case, device="cuda"), "workspace": Workspace.allocate("cuda")}
    grouped_attention(**arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_attention(**arguments)
    for contexts in ((700, 300, 64), (699, 0, 63), (698, 299, 1)):
        arguments["context_lens"].copy_(torch.tensor(contexts, dtype=torch.int32))
        reference = expected(arguments)
        out.fill_(float("nan"))
        graph.replay()
        assert error(out, reference) < TOLERANCE[BF16]


@pytest.mark.parametrize(("bits", "fresh"), [(4, False), (2, True)])
def test_groups_are_written_as_plain_pytorch_writes_them(bits: int, fresh: bool) -> None:
    """A scale or a number may be rounded the other way now and then: PyTorch divides by multiplying on a GPU."""
    generator = torch.Generator().manual_seed(bits)
    pools, plain = (written.moved(written.random_pools(bits, 32, (128, 64), generator), "cuda") for _ in range(2))
    for name in ("tail_keys", "tail_values"):
        getattr(plain, name).copy_(getattr(pools, name))
    k, v = (torch.randn(9, written.HEADS, dim, generator=generator).to("cuda") for dim in (128, 64))
    old = torch.randint(2 * written.CAPACITY, (3, 32), generator=generator).to("cuda")
    new = torch.randint(-6, 9, (3, 32), generator=generator).clamp(min=-1).to("cuda") if fresh else None
    target = torch.tensor([3, 0, 4], device="cuda")
    rows = [written.gather(tail, each, old, new) for tail, each in ((pools.tail_keys, k), (pools.tail_values, v))]
    meant.write_groups(*rows, plain, target)
    write_groups(k, v, pools, target, old, new, num_groups=4)
    for ours, theirs in ((pools.key_factors, plain.key_factors), (pools.value_factors, plain.value_factors)):
        assert torch.allclose(ours[:4].float(), theirs[:4].float(), rtol=2**-10)
    for ours, theirs in ((pools.keys, plain.keys), (pools.values, plain.values)):
        off = (meant.unpack(ours[:4], bits).int() - meant.unpack(theirs[:4], bits).int()).abs()
        assert int(off.max()) <= 1
        assert float(off.float().mean()) < 1e-3
        assert not ours[4].any()
