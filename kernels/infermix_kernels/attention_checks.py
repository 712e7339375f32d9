"""What is refused before an attention kernel is launched: everything that host-side shapes, dtypes, strides show."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
QUANTIZED = (torch.int8, torch.float8_e4m3fn)
MAX_HEAD_DIM = 256
#: Of rows whose first part is key and value at once: widths of that part, and of the rest of the key.
MAX_LATENT, MAX_REST = 512, 128
MAX_TREE_QUERY = 64
_REQUIRED = ("q", "keys", "values", "cu_seqlens", "context_lens")


def check_arguments(
    tensors: Mapping[str, Tensor | None],
    max_query_len: int,
    max_context_len: int,
    window: int | None,
    *,
    shared: bool = False,
) -> None:
    """Raises `ValueError` with the argument's name. No device read; `tensors` are named as the kernels name them."""
    q, keys, values, cu_seqlens_q, context_lens = (_present(tensors, name) for name in _REQUIRED)
    scales = (tensors["key_scales"], tensors["value_scales"])
    _check_pools(q, keys, values, scales)
    _check_widths(keys.shape[3], values.shape[3], shared)
    _check_lengths(cu_seqlens_q, context_lens, max_query_len, max_context_len)
    _check_reach(keys, tensors["tables"], context_lens.shape[0], max_context_len)
    if window is not None:
        _require(window >= 1, f"window is {window}, must be at least 1")
    sinks, tree_mask, out = tensors["sinks"], tensors["tree_mask"], tensors["out"]
    if sinks is not None:
        _require(sinks.shape == q.shape[1:2], f"sinks has shape {tuple(sinks.shape)}, must be [{q.shape[1]}]")
        _require(sinks.is_contiguous(), "sinks must be contiguous")
    if tree_mask is not None:
        _check_tree(tree_mask, q.shape[0], max_query_len, window)
    if out is not None:
        wanted = (*q.shape[:2], values.shape[3])
        _require(out.shape == wanted, f"out has shape {tuple(out.shape)}, must be {list(wanted)}")
        _require(out.is_contiguous() and out.dtype == q.dtype, f"out must be contiguous {q.dtype}")
    for tensor in tensors.values():
        _require(tensor is None or tensor.device == q.device, f"tensors on {q.device} and on another device")


def check_queries(
    q: Tensor,
    num_kv_heads: int,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    bounds: tuple[int, int],
    window: int | None,
) -> None:
    """The part of `check_arguments` that is the same for every arrangement of keys and values."""
    _require(q.dim() == 3 and q.stride(2) == 1, "q must be [T, H, Dk] with a contiguous last dimension")
    _require(q.dtype in FLOATS, f"q is {q.dtype}; supported: bfloat16, float16, float32")
    _require(q.shape[1] % num_kv_heads == 0, f"{q.shape[1]} query heads do not fold onto {num_kv_heads} KV heads")
    _check_lengths(cu_seqlens_q, context_lens, *bounds)
    _require(window is None or window >= 1, f"window is {window}, must be at least 1")


def _present(tensors: Mapping[str, Tensor | None], name: str) -> Tensor:
    tensor = tensors[name]
    assert tensor is not None
    return tensor


def _check_reach(keys: Tensor, block_tables: Tensor | None, num_seqs: int, max_context_len: int) -> None:
    if block_tables is None:
        _require(keys.shape[0] >= num_seqs, f"{num_seqs} sequences, but {keys.shape[0]} dense rows")
        _require(keys.shape[1] >= max_context_len, f"rows of {keys.shape[1]} tokens, context {max_context_len}")
        return
    _check_index("block_tables", block_tables, 2)
    _require(block_tables.shape[0] >= num_seqs, "block_tables has fewer rows than context_lens")
    reach = block_tables.shape[1] * keys.shape[1]
    _require(reach >= max_context_len, f"block_tables reach {reach} tokens, max_context_len is {max_context_len}")


def _check_pools(q: Tensor, keys: Tensor, values: Tensor, scales: tuple[Tensor | None, Tensor | None]) -> None:
    _require(q.dim() == 3 and q.stride(2) == 1, "q must be [T, H, Dk] with a contiguous last dimension")
    _require(q.dtype in FLOATS, f"q is {q.dtype}; supported: bfloat16, float16, float32")
    for name, pool in (("keys", keys), ("values", values)):
        _require(
            pool.dim() == 4 and pool.stride(3) == 1,
            f"{name} must be [blocks, tokens, Hkv, D] with a contiguous last dimension",
        )
    _require(keys.dtype == values.dtype, f"keys are {keys.dtype}, values {values.dtype}")
    _require(keys.shape[:3] == values.shape[:3], "keys and values differ in blocks, tokens or heads")
    _require(keys.shape[3] == q.shape[2], f"keys have head dim {keys.shape[3]}, q {q.shape[2]}")
    _require(q.shape[1] % keys.shape[2] == 0, f"{q.shape[1]} query heads do not fold onto {keys.shape[2]} KV heads")
    if keys.dtype not in QUANTIZED:
        _require(keys.dtype == q.dtype, f"keys are {keys.dtype}, q is {q.dtype}")
        _require(scales == (None, None), f"scales are given for keys of {keys.dtype}")
        return
    for pool in (keys, values):
        strides = (*pool.stride()[:3], pool.shape[3], pool.storage_offset())
        _require(all(step % 4 == 0 for step in strides), "quantized pools need head dims and strides in fours")
    wanted = (keys.shape[0], keys.shape[2], keys.shape[1])
    for scale in scales:
        if scale is None or scale.shape != wanted:
            found = None if scale is None else list(scale.shape)
            raise ValueError(
                f"{keys.dtype} keys and values need scales [blocks, Hkv, tokens] {list(wanted)}, not {found}"
            )
        _require(scale.dtype in FLOATS, f"scales are {scale.dtype}; supported: bfloat16, float16, float32")
    _require(scales[0].stride() == scales[1].stride(), "key_scales and value_scales have different strides")  # type: ignore[union-attr]


def _check_widths(key_dim: int, value_dim: int, shared: bool) -> None:
    widest, rest = max(key_dim, value_dim), key_dim - value_dim
    if shared:
        fits, most = value_dim <= MAX_LATENT and rest <= MAX_REST, f"{MAX_LATENT} + {MAX_REST}"
        _require(fits, f"rows of {value_dim} + {rest}; at most {most} are supported")
    else:
        _require(widest <= MAX_HEAD_DIM, f"head dim {widest}; at most {MAX_HEAD_DIM} is supported")


def _check_lengths(cu_seqlens_q: Tensor, context_lens: Tensor, max_query_len: int, max_context_len: int) -> None:
    _check_index("cu_seqlens_q", cu_seqlens_q, 1)
    _check_index("context_lens", context_lens, 1)
    expected = context_lens.shape[0] + 1
    _require(cu_seqlens_q.shape[0] == expected, f"cu_seqlens_q has {cu_seqlens_q.shape[0]} items, not {expected}")
    _require(max_query_len >= 1, f"max_query_len is {max_query_len}")
    _require(max_context_len >= 0, f"max_context_len is {max_context_len}")


def _check_tree(tree_mask: Tensor, num_tokens: int, max_query_len: int, window: int | None) -> None:
    _require(tree_mask.dtype == torch.int64 and tree_mask.is_contiguous(), "tree_mask must be contiguous int64")
    _require(tree_mask.shape == (num_tokens,), f"tree_mask has shape {tuple(tree_mask.shape)}, not ({num_tokens},)")
    _require(max_query_len <= MAX_TREE_QUERY, f"a tree of {max_query_len} tokens; at most {MAX_TREE_QUERY}")
    _require(window is None, "a tree mask and a window together are not supported")


def _check_index(name: str, tensor: Tensor, dims: int) -> None:
    _require(tensor.dtype == torch.int32, f"{name} is {tensor.dtype}, must be int32")
    _require(tensor.dim() == dims, f"{name} has {tensor.dim()} dimensions, must have {dims}")
    _require(tensor.shape[-1] <= 1 or tensor.stride(-1) == 1, f"{name} must be contiguous in its last dimension")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def check_table_contents(
    pool: tuple[int, int], cu_seqlens_q: Tensor, context_lens: Tensor, block_tables: Tensor | None
) -> None:
    """The debug switch: reads the device and raises `ValueError` when anything points outside the pool.

    `pool` is the number of blocks and the tokens in one (of dense rows: the number of rows and their capacity).
    """
    num_blocks, block_size = pool
    query_lens = cu_seqlens_q.diff()
    _require(bool((query_lens >= 0).all()), "cu_seqlens_q decreases")
    reach = block_size * (1 if block_tables is None else block_tables.shape[1])
    outside = (context_lens < 0) | (context_lens > reach) | ((context_lens > 0) & (context_lens < query_lens))
    if bool(outside.any()):
        index = int(outside.nonzero()[0])
        raise ValueError(f"sequence {index}: context {int(context_lens[index])} does not fit (reach {reach})")
    if block_tables is None:
        return
    num_seqs = context_lens.shape[0]
    used = torch.arange(block_tables.shape[1], device=context_lens.device) * block_size < context_lens[:, None]
    ids = block_tables[:num_seqs]
    wrong = used & ((ids < 0) | (ids >= num_blocks))
    if bool(wrong.any()):
        row, column = wrong.nonzero()[0].tolist()
        raise ValueError(
            f"block_tables[{row}, {column}] is {int(ids[row, column])}, but the pool has {num_blocks} blocks"
        )
