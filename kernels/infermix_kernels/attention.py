"""Attention of new tokens over a paged or dense KV cache: the one entry to the Triton kernels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from infermix_kernels import attention_tile as tile
from infermix_kernels.attention_checks import check_arguments, check_table_contents
from infermix_kernels.attention_prefill import prefill_kernel
from infermix_kernels.attention_quantized import FP8, INT8, PLAIN
from infermix_kernels.attention_split import split_kernel
from infermix_kernels.launch import Launch, LaunchTable, ShapeClass, default_launch, num_multiprocessors

#: Rows of the largest tile of the split kernel.
_MAX_SPLIT_ROWS = 128
#: A run of tokens shorter than this many tiles is not worth a program of its own.
_MIN_TILES_PER_SPLIT = 2
_FORMATS = {torch.int8: INT8.value, torch.float8_e4m3fn: FP8.value}


@dataclass(frozen=True)
class Workspace:
    """Partial results of split contexts: `sums`, `stats` fp32, `counters` int32 (zero between launches).

    One workspace serves any number of launches one after the other, captured or not; launches that may overlap
    (several streams) need one each.
    """

    sums: Tensor
    stats: Tensor
    counters: Tensor

    @classmethod
    def allocate(cls, device: torch.device | str, num_elements: int = 1 << 22) -> Workspace:
        """Room for `num_elements` partial sums (fp32); a smaller workspace only means fewer splits."""
        return cls(
            sums=torch.empty(num_elements, dtype=torch.float32, device=device),
            stats=torch.empty(num_elements // 8, dtype=torch.float32, device=device),
            counters=torch.zeros(num_elements // 256, dtype=torch.int32, device=device),
        )

    def max_slots(self, block_rows: int, value_dim: int) -> int:
        by_stats = self.stats.numel() // (2 * block_rows)
        return min(self.sums.numel() // (block_rows * value_dim), by_stats, self.counters.numel())


@dataclass(frozen=True)
class Geometry:
    """How query rows are folded: tiles of `heads` query heads that share a KV head, `tokens` tokens each."""

    heads: int
    head_tiles: int
    tokens: int


def fold(num_heads: int, num_kv_heads: int, block_rows: int) -> Geometry:
    group = num_heads // num_kv_heads
    heads = next(size for size in range(min(group, block_rows), 0, -1) if group % size == 0)
    return Geometry(heads, num_heads // heads, block_rows // heads)


def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_tables: Tensor | None,
    scale: float,
    max_query_len: int,
    max_context_len: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    out: Tensor | None = None,
    workspace: Workspace | None = None,
    launches: LaunchTable | None = None,
    launch: Launch | None = None,
    check_block_tables: bool = False,
) -> Tensor:
    """`q [T, H, Dk]` -> `[T, H, Dv]`: prefill, chunks, decode and verification, in any mix of query lengths.

    - `keys [num_blocks, block_size, Hkv, Dk]`, `values [..., Dv]` with `block_tables [B, W]` int32, or dense rows
      `[B, capacity, Hkv, D]` with `block_tables=None`. bf16, fp16, fp32; or int8 / float8_e4m3fn with
      `key_scales`, `value_scales` `[num_blocks, block_size, Hkv]` (fp32 or fp16), one factor per token and head.
    - `cu_seqlens_q [B + 1]`, `context_lens [B]` int32. The queries of a sequence are the last tokens of its context.
      `cu_seqlens_q` may start above 0: only the rows that it covers are computed. Context 0 gives rows of zeros.
    - `max_query_len`, `max_context_len`: bounds known on the host. The launch depends on them and on shapes alone, so
      the call can be captured. Memory that no context covers is never used, whatever it holds.
    - `window` counts the query's own token. `sinks [H]` are extra logits. `tree_mask [T]` int64 replaces the causal
      rule among the new tokens of a sequence (at most 64): bit j of a token says that it sees new token j; see
      `pack_tree_mask`. Not together with `window`.
    - `workspace` is needed for capture only; `launches` holds measured launch parameters, `launch` overrides them.

    Raises `ValueError` before anything is launched when shapes, dtypes or strides do not fit; with
    `check_block_tables` (reads the device) also when an id or a context length points outside.
    """
    check_arguments(
        q,
        keys,
        values,
        cu_seqlens_q,
        context_lens,
        block_tables,
        max_context_len=max_context_len,
        max_query_len=max_query_len,
        window=window,
        sinks=sinks,
        tree_mask=tree_mask,
        scales=(key_scales, value_scales),
    )
    if check_block_tables:
        check_table_contents(keys, cu_seqlens_q, context_lens, block_tables)
    if out is None:
        out = q.new_empty(q.shape[0], q.shape[1], values.shape[3])
    call = Call(q, keys, values, out, cu_seqlens_q, context_lens, block_tables, sinks, (key_scales, value_scales))
    if q.shape[0] and context_lens.shape[0]:
        rules = Rules(scale, window, softcap, tree_mask)
        bounds = (max_query_len, max_context_len)
        prepare(call, rules, bounds, workspace, launches, launch).run()
    return out


def pack_tree_mask(mask: Tensor) -> Tensor:
    """`[T, n]` bool, n <= 64, to the `[T]` int64 of `paged_attention`: bit j of row t is `mask[t, j]`."""
    weights = torch.ones(mask.shape[1], dtype=torch.int64, device=mask.device)
    weights = weights << torch.arange(mask.shape[1], device=mask.device)
    return (mask.to(torch.int64) * weights).sum(dim=1)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A kernel with everything that its launch takes."""

    kernel: Any
    grid: tuple[int, int]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    launch: Launch

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.constants)


@dataclass(frozen=True, slots=True)
class Rules:
    """What is computed besides softmax(q k) v."""

    scale: float
    window: int | None
    softcap: float | None
    tree_mask: Tensor | None

    def numbers(self) -> tuple[float, float, int]:
        """Score factor and softcap in base 2, window."""
        log2e = math.log2(math.e)
        return self.scale * log2e, (self.softcap or 1.0) * log2e, self.window or 0


@dataclass(frozen=True, slots=True)
class Call:
    """The tensors of one call."""

    q: Tensor
    keys: Tensor
    values: Tensor
    out: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    block_tables: Tensor | None
    sinks: Tensor | None
    scales: tuple[Tensor | None, Tensor | None]

    def tensors(self) -> tuple[Tensor | None, ...]:
        return (self.q, *self.pools(), *self.scales, self.out)

    def pools(self) -> tuple[Tensor, Tensor]:
        """Keys and values as the kernels read them: quantized ones as words of four dimensions."""
        if self.keys.dtype in _FORMATS:
            return self.keys.view(torch.int32), self.values.view(torch.int32)
        return self.keys, self.values

    @property
    def num_seqs(self) -> int:
        return self.context_lens.shape[0]

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.keys.shape[2]

    @property
    def block_size(self) -> int:
        return 0 if self.block_tables is None else self.keys.shape[1]

    def shape_class(self, kernel: str, rows: int) -> ShapeClass:
        return ShapeClass(
            "split" if kernel == "split" else "prefill",
            self.q.element_size(),
            self.keys.element_size(),
            triton.next_power_of_2(self.keys.shape[3]),
            triton.next_power_of_2(self.values.shape[3]),
            rows,
            self.block_size,
        )

    def strides(self) -> tuple[int, ...]:
        scales = self.scales[0]
        keys, values = self.pools()
        return (
            *self.q.stride()[:2],
            *keys.stride()[:3],
            *values.stride()[:3],
            *((0, 0, 0) if scales is None else scales.stride()),
            0 if self.block_tables is None else self.block_tables.stride(0),
        )

    def constants(self, launch: Launch, geometry: Geometry, rules: Rules) -> dict[str, Any]:
        shape = self.shape_class("prefill", 0)
        narrowest = 64 if self.keys.dtype in _FORMATS else 16
        return {
            "GROUP": self.group,
            "HEADS": geometry.heads,
            "DK": self.keys.shape[3],
            "DV": self.values.shape[3],
            "PAD_K": max(narrowest, shape.key_dim),
            "PAD_V": max(narrowest, shape.value_dim),
            "BLOCK_M": launch.block_rows,
            "BLOCK_N": launch.block_tokens,
            "BLOCK_SIZE": self.block_size,
            "ADDRESSING": addressing(self.block_size, launch.block_tokens),
            "WINDOW": rules.window is not None,
            "SOFTCAP": rules.softcap is not None,
            "SINKS": self.sinks is not None,
            "FORMAT": _FORMATS.get(self.values.dtype, PLAIN.value),
            "COMPUTE": tl.float32 if self.q.dtype == torch.float32 else tl.float16,
            "PRECISION": "ieee" if self.q.dtype == torch.float32 else "tf32",
            "SAME_STRIDES": self.keys.stride() == self.values.stride(),
            "num_warps": launch.num_warps,
            "num_stages": launch.num_stages,
            **({"maxnreg": launch.max_registers} if launch.max_registers else {}),
        }


def addressing(block_size: int, block_tokens: int) -> int:
    """How a tile of `block_tokens` tokens lies in blocks of `block_size` (0: dense rows)."""
    if block_size == 0:
        return tile.DENSE.value
    if block_size % block_tokens == 0:
        return tile.TILE_IN_BLOCK.value
    return tile.BLOCKS_IN_TILE.value if block_tokens % block_size == 0 else tile.STRADDLING.value


def _find(launches: LaunchTable | None, shape: ShapeClass) -> Launch:
    return default_launch(shape) if launches is None else launches.find(shape)


def _splits_pay(call: Call, max_query_len: int, max_context_len: int, tree: bool) -> bool:
    """Rows of a sequence fit one tile, or long queries would leave most of the device idle over a long context."""
    if tree or max_query_len * call.group <= 64:
        return True
    if max_context_len < 1024:
        return False
    programs = call.num_seqs * call.keys.shape[2] * -(-max_query_len * call.group // _MAX_SPLIT_ROWS)
    return 2 * programs <= num_multiprocessors(call.q.device)


def prepare(
    call: Call,
    rules: Rules,
    bounds: tuple[int, int],
    workspace: Workspace | None = None,
    launches: LaunchTable | None = None,
    launch: Launch | None = None,
) -> Prepared:
    """Choose kernel, grid and constants. `bounds` are the longest query and the longest context."""
    if _splits_pay(call, *bounds, rules.tree_mask is not None):
        return _prepare_split(call, rules, *bounds, workspace, launches, launch)
    return _prepare_prefill(call, rules, launches, launch)


def _prepare_prefill(call: Call, rules: Rules, launches: LaunchTable | None, launch: Launch | None) -> Prepared:
    launch = launch or _find(launches, call.shape_class("prefill", 128))
    geometry = fold(call.q.shape[1], call.keys.shape[2], launch.block_rows)
    grid = (call.q.shape[0] // geometry.tokens + call.num_seqs, geometry.head_tiles)
    described = launch.described and _describable(call, rules, launch.block_tokens)
    arguments = (
        *call.tensors(),
        *((_describe(pool, launch.block_tokens) if described else None) for pool in (call.keys, call.values)),
        call.cu_seqlens_q,
        call.context_lens,
        call.block_tables,
        call.sinks,
        call.num_seqs,
        call.q.shape[1],
        *rules.numbers(),
        *call.strides(),
    )
    constants = call.constants(launch, geometry, rules)
    constants |= {"DESCRIBED": described}
    return Prepared(prefill_kernel, grid, arguments, constants, launch)


def _describable(call: Call, rules: Rules, block_tokens: int) -> bool:
    """Whether the copy engine can read whole tiles: pools are matrices of token slots, a tile within one block."""
    if rules.window is not None or rules.softcap is not None or call.q.element_size() != 2:
        return False
    if call.keys.dtype != call.q.dtype or addressing(call.block_size, block_tokens) > tile.TILE_IN_BLOCK.value:
        return False
    return all(_is_matrix(pool) for pool in (call.keys, call.values))


def _is_matrix(pool: Tensor) -> bool:
    width = pool.shape[2] * pool.shape[3]
    power_of_two = pool.shape[3] & (pool.shape[3] - 1) == 0
    return pool.stride()[:3] == (pool.shape[1] * width, width, pool.shape[3]) and power_of_two


def _describe(pool: Tensor, block_tokens: int) -> TensorDescriptor:
    width = pool.shape[2] * pool.shape[3]
    shape = [pool.shape[0] * pool.shape[1], width]
    return TensorDescriptor(pool, shape, [width, 1], [block_tokens, pool.shape[3]])


def _prepare_split(
    call: Call,
    rules: Rules,
    max_query_len: int,
    max_context_len: int,
    workspace: Workspace | None,
    launches: LaunchTable | None,
    launch: Launch | None,
) -> Prepared:
    rows = min(max(16, triton.next_power_of_2(max_query_len * call.group)), _MAX_SPLIT_ROWS)
    launch = launch or _find(launches, call.shape_class("split", rows))
    geometry = fold(call.q.shape[1], call.keys.shape[2], launch.block_rows)
    row_tiles = -(-max_query_len // geometry.tokens)
    units = call.num_seqs * row_tiles * geometry.head_tiles
    splits = num_splits(units, max_context_len, launch, call.q.device)
    value_dim = max(16, call.values.shape[3])
    if splits > 1 and workspace is None:
        needed = units * splits * launch.block_rows * value_dim
        workspace = Workspace.allocate(call.q.device, max(needed, 1 << 16))
    if workspace is not None:
        splits = max(1, min(splits, workspace.max_slots(launch.block_rows, value_dim) // units))
    used = workspace if splits > 1 else None
    arguments = (
        *call.tensors(),
        *((used.sums, used.stats, used.counters) if used else (None, None, None)),
        call.cu_seqlens_q,
        call.context_lens,
        call.block_tables,
        call.sinks,
        rules.tree_mask,
        call.q.shape[1],
        geometry.head_tiles,
        row_tiles,
        splits,
        *rules.numbers(),
        *call.strides(),
    )
    constants = {**call.constants(launch, geometry, rules), "TREE": rules.tree_mask is not None, "SPLIT": splits > 1}
    grid = (geometry.head_tiles * splits, call.num_seqs * row_tiles)
    return Prepared(split_kernel, grid, arguments, constants, launch)


def num_splits(units: int, max_context_len: int, launch: Launch, device: torch.device) -> int:
    """How many programs share the context of one unit (sequence, KV head, row tile)."""
    wanted = num_multiprocessors(device) * launch.programs_per_sm // units
    tiles = -(-max_context_len // launch.block_tokens)
    return max(1, min(wanted, tiles // _MIN_TILES_PER_SPLIT))
