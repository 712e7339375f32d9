"""Attention kernels on a GPU: bandwidth of decoding, FLOP/s of prefill; `--benchmark-only` prints times."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent / "limits"))
import kv_works
from infermix_kernels.attention import Workspace, paged_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HEADS, KV_HEADS, DIM = 32, 8, 128
#: Sequences, query length, context. The first four read what fits no cache, or rotate over as much.
DECODE = [(64, 1, 4096), (1, 1, 32768), (8, 1, 4096), (1, 1, 4096), (8, 8, 4096)]
PREFILL = [(4, 4096), (1, 16384)]
POOL_TOKENS = 64 * 4096


def _pool(block_size: int, kv: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    shape = (POOL_TOKENS // block_size, block_size, KV_HEADS, DIM)
    data = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    if kv == torch.bfloat16:
        return data, None
    scales = torch.rand(shape[0], KV_HEADS, block_size, device="cuda") * 0.02 + 0.01
    return (data * 40).clamp(-127, 127).to(kv), scales


def _calls(batch: int, query: int, context: int, block_size: int, kv: torch.dtype) -> list[Callable[[], Any]]:
    """Calls on disjoint parts of one pool, so that none finds its tokens in a cache."""
    keys, key_scales = _pool(block_size, kv)
    values, value_scales = _pool(block_size, kv)
    order = torch.randperm(keys.shape[0], device="cuda").to(torch.int32)
    width = context // block_size
    workspace = Workspace.allocate("cuda")
    starts = torch.arange(0, batch * query + 1, query, device="cuda", dtype=torch.int32)
    contexts = torch.full((batch,), context, device="cuda", dtype=torch.int32)
    calls: list[Callable[[], Any]] = []
    for number in range(min(16, keys.shape[0] // (batch * width))):
        tables = order[number * batch * width :][: batch * width].view(batch, width)
        q = torch.randn(batch * query, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        arguments: dict[str, Any] = {
            "cu_seqlens_q": starts,
            "context_lens": contexts,
            "block_tables": tables,
            "key_scales": key_scales,
            "value_scales": value_scales,
            "max_query_len": query,
            "max_context_len": context,
            "out": torch.empty_like(q),
            "workspace": workspace,
        }
        calls.append(partial(paged_attention, q, keys, values, scale=DIM**-0.5, **arguments))
    return calls


def _replay(calls: list[Callable[[], Any]]) -> Callable[[], None]:
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()

    def run() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return run


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("kv", [torch.bfloat16, torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shape", DECODE, ids=str)
def test_decode(benchmark: Any, shape: tuple[int, int, int], kv: torch.dtype, block_size: int) -> None:
    calls = _calls(*shape, block_size, kv)
    benchmark(_replay(calls))
    seconds = benchmark.stats.stats.median / len(calls)
    token_bytes = 4 * DIM if kv == torch.bfloat16 else 2 * DIM + 8
    benchmark.extra_info["gb_per_s"] = shape[0] * shape[2] * KV_HEADS * token_bytes / seconds / 1e9


@pytest.mark.parametrize("block_size", [16, 128])
@pytest.mark.parametrize("shape", PREFILL, ids=str)
def test_prefill(benchmark: Any, shape: tuple[int, int], block_size: int) -> None:
    batch, length = shape
    calls = _calls(batch, length, length, block_size, torch.bfloat16)
    benchmark(_replay(calls))
    seconds = benchmark.stats.stats.median / len(calls)
    benchmark.extra_info["tflop_per_s"] = 2 * batch * length**2 * HEADS * DIM / seconds / 1e12


@pytest.mark.parametrize("kv", ["int4", "int2", "latent16", "latent128"])
def test_decode_of_other_layouts(benchmark: Any, kv: str) -> None:
    """4- and 2-bit groups of the Llama shape, rows of DeepSeek-V3 with 16 and 128 query heads."""
    work = kv_works.make(kv, 64, 4096, 64)
    benchmark(_replay([partial(work.ours, Workspace.allocate("cuda"))] * 2))
    benchmark.extra_info["gb_per_s"] = 2 * work.num_bytes / benchmark.stats.stats.median / 1e9
