"""Attention rows: paged decode in bf16, int8 and fp8, causal prefill; FA3, FlashInfer and torch SDPA beside ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from infermix_kernels.attention import Workspace, paged_attention
from infermix_kernels.launch import Launch, LaunchTable
from infermix_kernels.reference.attention import paged_attention as reference_attention
from kernel_timing import COLD_BYTES, DEVICE, DTYPE, GPU, Ceilings, Goal, Sheet, graph_seconds, relative_error
from torch import Tensor

HEADS, KV_HEADS, DIM = (32, 8, 128) if GPU else (4, 2, 16)
DECODES = ((64, 4096), (1, 32768), (8, 4096), (1, 4096)) if GPU else ((2, 40),)
#: The best of others on the same kind of machine, GB/s; `None`: the copy bandwidth counts.
BEST = {(64, 4096): None, (1, 32768): 2670.0, (8, 4096): 2697.0, (1, 4096): 985.0}
PREFILLS = ((4, 4096), (1, 16384)) if GPU else ((1, 40),)
FA3 = {(4, 4096): 583.0, (1, 16384): 651.0}
BLOCKS = (16, 128) if GPU else (16,)
_MAX_COPIES = 16


@dataclass
class Paged:
    """One call's worth of pools and tables; `scales` for pools of 8 bits."""

    q: Tensor
    keys: Tensor
    values: Tensor
    scales: tuple[Tensor | None, Tensor | None]
    tables: Tensor
    starts: Tensor
    contexts: Tensor
    query_len: int
    context_len: int

    @property
    def num_bytes(self) -> int:
        parts = (self.keys, self.values, *self.scales)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def ours(
        self, workspace: Workspace | None, launches: LaunchTable | None = None, launch: Launch | None = None
    ) -> Tensor:
        return paged_attention(
            self.q,
            self.keys,
            self.values,
            cu_seqlens_q=self.starts,
            context_lens=self.contexts,
            block_tables=self.tables,
            key_scales=self.scales[0],
            value_scales=self.scales[1],
            scale=DIM**-0.5,
            max_query_len=self.query_len,
            max_context_len=self.context_len,
            out=torch.empty_like(self.q),
            workspace=workspace,
            launches=launches,
            launch=launch,
        )

    def error(self, out: Tensor) -> float:
        """Of the last query rows of the last sequence, against fp32."""
        rows = slice(self.q.shape[0] - min(self.query_len, 32), self.q.shape[0])
        query = self.q[rows].float()
        reference = reference_attention(
            query,
            self.keys,
            self.values,
            cu_seqlens_q=torch.tensor([0, query.shape[0]], dtype=torch.int32),
            context_lens=self.contexts[-1:],
            block_tables=self.tables[-1:],
            scale=DIM**-0.5,
            key_scales=self.scales[0],
            value_scales=self.scales[1],
        )
        return relative_error(out.view_as(self.q)[rows], reference)

    def dense(self) -> tuple[Tensor, Tensor, Tensor]:
        """q `[B, H, n, D]`, k and v `[B, Hkv, context, D]`, contiguous."""
        batch = self.tables.shape[0]
        q = self.q.view(batch, self.query_len, HEADS, DIM).transpose(1, 2).contiguous()
        k, v = (
            pool[self.tables.long()].flatten(1, 2)[:, : self.context_len].transpose(1, 2).contiguous()
            for pool in (self.keys, self.values)
        )
        return q, k, v


def make(batch: int, query: int, context: int, block: int, kv: torch.dtype | None = None) -> Paged:
    width = -(-context // block)
    keys, key_scales = _pool(batch * width, block, kv)
    values, value_scales = _pool(batch * width, block, kv)
    return Paged(
        torch.randn(batch * query, HEADS, DIM, device=DEVICE).to(DTYPE),
        keys,
        values,
        (key_scales, value_scales),
        torch.randperm(batch * width, device=DEVICE).to(torch.int32).view(batch, width),
        torch.arange(0, batch * query + 1, query, device=DEVICE, dtype=torch.int32),
        torch.full((batch,), context, device=DEVICE, dtype=torch.int32),
        query,
        context,
    )


def _pool(num_blocks: int, block: int, kv: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    data = torch.randn(num_blocks, block, KV_HEADS, DIM, device=DEVICE, dtype=DTYPE)
    if kv is None:
        return data, None
    scales = torch.rand(num_blocks, KV_HEADS, block, device=DEVICE) * 0.02 + 0.01
    return (data * 40).clamp(-127, 127).to(kv), scales


def copies(first: Paged, again: Callable[[], Paged]) -> list[Paged]:
    """As many calls on different memory as keep the cache cold."""
    count = max(1, min(_MAX_COPIES, -(-COLD_BYTES // first.num_bytes)))
    return [first, *(again() for _ in range(count - 1))]


#: Label, what makes a call of a piece of work, whether it is ours.
Contender = tuple[str, Callable[["Paged"], Callable[[], Tensor]], bool]


def decode_rows(sheet: Sheet, limits: Ceilings, launches: LaunchTable | None) -> None:
    for batch, context in DECODES:
        row = f"decode B={batch} ctx={context}"
        if not sheet.wants(row):
            continue
        best, copy = BEST.get((batch, context)), limits.copy / 1e9
        goal = Goal("GB/s", True, 1.0, 1.1, over=best) if best else Goal("GB/s", True, 0.95, 0.98, over=copy)
        for block in BLOCKS:
            works = copies(make(batch, 1, context, block), partial(make, batch, 1, context, block))
            for label, calls, ours in _decoders(block, launches):
                sheet.add(row, label, goal, partial(_bandwidth, calls, works), ours=ours, ceiling=copy)


def _bandwidth(calls: Callable[[Paged], Callable[[], Tensor]], works: list[Paged]) -> tuple[float, float]:
    """(GB/s of keys and values, error)."""
    ready = [calls(work) for work in works]
    error = works[0].error(ready[0]())
    return works[0].num_bytes / graph_seconds(ready) / 1e9, error


def _decoders(block: int, launches: LaunchTable | None) -> list[Contender]:
    return [
        *_our_ways(block, launches),
        (f"FA3 paged block {block}", _fa3, False),
        (f"FlashInfer block {block}", _flashinfer, False),
        *_dense_ways(block, causal=False),
    ]


def _our_ways(block: int, launches: LaunchTable | None) -> list[Contender]:
    workspace = Workspace.allocate(DEVICE)
    ways: list[Contender] = [(f"ours block {block}", partial(_ours, workspace, None), True)]
    if launches is not None:
        ways.append((f"ours tuned block {block}", partial(_ours, workspace, launches), True))
    return ways


def _dense_ways(block: int, causal: bool) -> list[Contender]:
    """Dense views do not depend on the size of blocks: measured once."""
    if block != BLOCKS[0]:
        return []
    backends = {"SDPA cuDNN dense": "CUDNN_ATTENTION", "SDPA flash dense": "FLASH_ATTENTION"}
    return [(label, partial(_sdpa, name, causal=causal), False) for label, name in backends.items()]


def _ours(workspace: Workspace, launches: LaunchTable | None, work: Paged) -> Callable[[], Tensor]:
    return partial(work.ours, workspace, launches)


def _fa3(work: Paged) -> Callable[[], Tensor]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    return partial(
        flash_attn_varlen_func,
        work.q,
        work.keys,
        work.values,
        max_seqlen_q=work.query_len,
        cu_seqlens_q=work.starts,
        max_seqlen_k=work.context_len,
        seqused_k=work.contexts,
        softmax_scale=DIM**-0.5,
        causal=True,
        block_table=work.tables,
        fa_version=3,
    )


def _flashinfer(work: Paged) -> Callable[[], Tensor]:
    import flashinfer

    batch, width = work.tables.shape
    room = torch.empty(128 << 20, dtype=torch.uint8, device=DEVICE)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=True)
    indptr = torch.arange(0, batch * width + 1, width, dtype=torch.int32)
    last = torch.full((batch,), (work.context_len - 1) % work.keys.shape[1] + 1, dtype=torch.int32)
    wrapper.plan(
        indptr.to(DEVICE), work.tables.flatten(), last.to(DEVICE), HEADS, KV_HEADS, DIM, work.keys.shape[1],
        q_data_type=DTYPE, kv_data_type=DTYPE, sm_scale=DIM**-0.5,
    )  # fmt: skip
    return partial(wrapper.run, work.q, (work.keys, work.values))


def _sdpa(backend: str, work: Paged, *, causal: bool) -> Callable[[], Tensor]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = work.dense()

    def call() -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2).reshape(work.q.shape)

    return call


def quantized_rows(sheet: Sheet, limits: Ceilings, launches: LaunchTable | None) -> None:
    """Tokens per second of int8 and fp8 KV over those of bf16, in the same run."""
    batch, context = DECODES[0]
    rows = {
        f"decode KV {name} B={batch} ctx={context}": kv
        for name, kv in (("int8", torch.int8), ("fp8", torch.float8_e4m3fn))
    }
    goal = Goal("x bf16", True, 1.75, 1.85)
    for block in BLOCKS if any(sheet.wants(row) for row in rows) else ():
        plain = graph_seconds([partial(make(batch, 1, context, block).ours, Workspace.allocate(DEVICE))])
        for row, kv in rows.items():
            for label, calls, ours in [*_our_ways(block, launches), *_other_launches(block)]:
                sheet.add(row, label, goal, partial(_times_faster, calls, block, kv, plain), ours=ours)


def _other_launches(block: int) -> list[Contender]:
    """Launches beside the default one: rows, tokens, warps, stages, programs a multiprocessor, registers."""
    if block != BLOCKS[0] or not GPU:
        return []
    workspace = Workspace.allocate(DEVICE)
    return [
        (f"ours {'/'.join(map(str, each))}", partial(_launched, workspace, Launch(*each)), True)
        for each in (
            (16, 64, 2, 3, 4, 200),
            (16, 64, 2, 4, 4, 200),
            (16, 64, 2, 3, 8, 0),
            (16, 64, 2, 3, 16, 200),
            (16, 64, 4, 3, 4, 0),
            (16, 128, 4, 3, 4, 0),
            (16, 128, 4, 2, 4, 128),
            (16, 32, 2, 5, 4, 0),
        )
    ]


def _launched(workspace: Workspace, launch: Launch, work: Paged) -> Callable[[], Tensor]:
    return partial(work.ours, workspace, None, launch)


def _times_faster(
    calls: Callable[[Paged], Callable[[], Tensor]], block: int, kv: torch.dtype, plain: float
) -> tuple[float, float]:
    batch, context = DECODES[0]
    work = make(batch, 1, context, block, kv)
    call = calls(work)
    error = work.error(call())
    seconds = graph_seconds([call])
    print(f"  {kv}: {work.num_bytes / seconds / 1e9:.0f} GB/s, {seconds * 1e6:.1f} us", flush=True)
    return plain / seconds, error


def prefill_rows(sheet: Sheet, limits: Ceilings, launches: LaunchTable | None) -> None:
    for batch, length in PREFILLS:
        row = f"prefill B={batch} S={length}"
        if not sheet.wants(row):
            continue
        goal = Goal("TFLOP/s", True, 0.75, 1.0, over=FA3.get((batch, length), 1.0))
        for block in BLOCKS:
            work = make(batch, length, length, block)
            for label, calls, ours in _prefills(block, launches):
                ceiling = limits.matmul / 1e12
                sheet.add(row, label, goal, partial(_flop_rate, calls, work), ours=ours, ceiling=ceiling)


def _flop_rate(calls: Callable[[Paged], Callable[[], Tensor]], work: Paged) -> tuple[float, float]:
    """(TFLOP/s of a causal product, error)."""
    call = calls(work)
    error = work.error(call())
    flops = 2 * work.tables.shape[0] * work.query_len**2 * HEADS * DIM
    return flops / graph_seconds([call] * 4) / 1e12, error


def _prefills(block: int, launches: LaunchTable | None) -> list[Contender]:
    dense: list[Contender] = [("FA3 dense", _fa3_dense, False), ("flex", _flex, False)]
    return [
        *_our_ways(block, launches),
        (f"FA3 paged block {block}", _fa3, False),
        *_dense_ways(block, causal=True),
        *(dense if block == BLOCKS[0] else []),
    ]


def _fa3_dense(work: Paged) -> Callable[[], Tensor]:
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    _, k, v = work.dense()
    k, v = (part.transpose(1, 2).reshape(-1, KV_HEADS, DIM).contiguous() for part in (k, v))
    return partial(
        flash_attn_varlen_func, work.q, k, v, max_seqlen_q=work.query_len, cu_seqlens_q=work.starts,
        max_seqlen_k=work.context_len, cu_seqlens_k=work.starts, softmax_scale=DIM**-0.5, causal=True, fa_version=3,
    )  # fmt: skip


def _flex(work: Paged) -> Callable[[], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, k, v = work.dense()
    length = work.query_len
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, length, length, device=str(DEVICE))
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True).transpose(1, 2).reshape(work.q.shape)


def decode_launches() -> int:
    """Kernels of attention in a decode step of one sequence, the combination of its splits included."""
    from kernel_small import launches_of

    batch, context = DECODES[-1]
    return launches_of(partial(make(batch, 1, context, 16).ours, Workspace.allocate(DEVICE)))
