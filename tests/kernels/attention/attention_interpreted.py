"""The attention kernels under Triton's interpreter: run in a process started with TRITON_INTERPRET=1."""

from __future__ import annotations

import pytest
import torch
from attention_cases import TOLERANCE, Case, build, error, expected
from infermix_kernels.attention import Workspace, paged_attention
from infermix_kernels.kv_write import write_kv
from infermix_kernels.launch import Launch
from infermix_kernels.reference.attention import paged_attention as reference_attention

FP16, INT8, FP8 = torch.float16, torch.int8, torch.float8_e4m3fn
#: block_rows, block_tokens, num_warps, num_stages, programs_per_sm
SPLIT, PREFILL = (16, 16, 4, 2, 8), (16, 16, 4, 2, 1)
WIDE = (16, 32, 4, 2, 8)

CASES = [
    Case("decode", (1, 1, 1), (1, 17, 70), launch=SPLIT),
    Case("decode padded", (1, 1, 1), (33, 0, 16), sinks=True, launch=SPLIT),
    Case("decode whole blocks in a tile", (1, 1), (75, 40), dtype=FP16, launch=WIDE),
    Case("decode tile in a block", (1,), (90,), block_size=64, launch=SPLIT),
    Case("decode straddling blocks", (1, 1), (61, 12), block_size=24, launch=SPLIT),
    Case("decode dense", (1, 1), (55, 9), block_size=0, launch=SPLIT),
    Case("decode window", (1, 1), (90, 10), rules={"window": 20}, launch=SPLIT),
    Case("decode odd heads", (1, 1), (40, 21), heads=(6, 2), dims=(80, 48), launch=SPLIT),
    Case("decode many heads, one kv head", (1,), (40,), heads=(24, 1), launch=(16, 16, 4, 2, 8)),
    Case("decode softcap and sinks", (1, 1), (40, 3), rules={"softcap": 2.0}, sinks=True, launch=SPLIT),
    Case("decode int8", (1, 1), (50, 7), dtype=FP16, kv=INT8, launch=SPLIT),
    Case("decode int8, scales in fp16, dense", (1,), (50,), kv=INT8, scale_dtype=FP16, block_size=0, launch=SPLIT),
    Case("decode int8, strided scales", (1, 1), (50, 7), kv=INT8, scales_strided=True, launch=SPLIT),
    Case("decode fp8", (1, 1), (50, 7), kv=FP8, launch=SPLIT),
    Case("int8 in wide tiles", (33, 2), (50, 7), kv=INT8, launch=(64, 32, 4, 2, 2)),
    Case("fp8 in wide tiles", (33, 2), (50, 7), kv=FP8, dims=(64, 32), launch=(64, 32, 4, 2, 1)),
    Case("verification", (4, 1, 3), (50, 1, 3), launch=SPLIT),
    Case("verification window over several row tiles", (9, 12), (50, 12), rules={"window": 7}, launch=SPLIT),
    Case("tree", (6, 3), (41, 3), tree=True, launch=SPLIT),
    Case("tree of 64 over several row tiles", (64,), (80,), tree=True, launch=(64, 32, 4, 2, 2)),
    Case("latent", (1, 1), (50, 7), heads=(4, 1), dims=(48, 32), shared=True, launch=SPLIT),
    Case("latent, padded widths, fp16", (3, 1), (40, 0), heads=(5, 1), dims=(52, 40), shared=True, dtype=FP16,
         launch=WIDE),
    Case("latent prefill, window", (20, 2), (25, 30), heads=(2, 1), dims=(48, 32), block_size=24, shared=True,
         rules={"window": 9, "softcap": 2.0}, sinks=True, launch=PREFILL),
    Case("latent tree, dense", (6, 3), (41, 3), heads=(2, 1), dims=(48, 32), block_size=0, shared=True, tree=True,
         launch=SPLIT),
    Case("prefill", (33, 5, 20), (33, 5, 20), heads=(8, 1), launch=PREFILL),
    Case("prefill chunks after context", (33, 1, 17), (70, 40, 17), launch=PREFILL),
    Case("prefill padded", (40, 2), (40, 0), dims=(80, 48), heads=(6, 2), launch=PREFILL),
    Case("prefill dense window", (33, 7), (50, 30), block_size=0, rules={"window": 9}, launch=PREFILL),
    Case("prefill softcap and sinks", (40,), (45,), rules={"softcap": 3.0}, sinks=True, dtype=FP16, launch=PREFILL),
    Case("prefill int8 straddling", (40,), (45,), kv=INT8, block_size=24, launch=PREFILL),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case: Case) -> None:
    arguments = build(case)
    launch = Launch(*case.launch) if case.launch else None
    workspace = Workspace.allocate("cpu", 1 << 16)
    out = paged_attention(**arguments, launch=launch, workspace=workspace, check_block_tables=False)
    assert error(out, expected(arguments)) < TOLERANCE[case.dtype]


def test_reads_what_write_kv_stored() -> None:
    generator = torch.Generator().manual_seed(5)
    k, v, q = (torch.randn(23, heads, 32, generator=generator) for heads in (2, 2, 4))
    pools = [torch.zeros(4, 16, 2, 32, dtype=INT8) for _ in range(2)]
    scales = {name: torch.full((4, 2, 16), float("nan")) for name in ("key_scales", "value_scales")}
    tables = torch.tensor([[2, 0]], dtype=torch.int32)
    slots = tables[0].long().repeat_interleave(16)[:23] * 16 + torch.arange(23) % 16
    write_kv(k, v, *pools, slots, **scales)
    arguments = {
        "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
        "context_lens": torch.tensor([23], dtype=torch.int32),
        "scale": 32**-0.5,
    }
    bounds = {"max_query_len": 1, "max_context_len": 23}
    out = paged_attention(q[-1:], *pools, **arguments, **bounds, block_tables=tables, **scales)
    exact = reference_attention(q[-1:].double(), *pools, **arguments, block_tables=tables, **scales)
    assert error(out, exact) < TOLERANCE[torch.float32]
    unquantized = reference_attention(q[-1:], k[None], v[None], **arguments, block_tables=None)
    assert error(out, unquantized.double()) < 1e-2


def test_rows_outside_the_given_sequences_stay() -> None:
    arguments = build(Case("mixed", (1, 1, 40), (20, 3, 60)))
    reference = expected(arguments)
    rest = {**arguments, "block_tables": arguments["block_tables"][2:]}
    rest |= {name: arguments[name][2:] for name in ("cu_seqlens_q", "context_lens")}
    out = paged_attention(**rest, launch=Launch(*PREFILL))
    assert out[:2].isnan().all()
    first = {
        **arguments,
        "cu_seqlens_q": arguments["cu_seqlens_q"][:3],
        "context_lens": arguments["context_lens"][:2],
    }
    first |= {"max_query_len": 1}
    paged_attention(**first, launch=Launch(*SPLIT))
    assert error(out, reference) < TOLERANCE[torch.float32]
