"""Host lists -> one packed `Batch`: the eager step of the runner, and the self-check."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from infermix.engine.branches import branches
from infermix.roles.batch import Batch, GroupBatch

if TYPE_CHECKING:
    from infermix.roles.kv_space import KVShape, KVSpace

# Slices of a shared buffer start at multiples of 16 bytes, which kernels specialise on.
_ALIGNED_BYTES = 16


class PackEntry(NamedTuple):
    """One sequence of a step: its new tokens, and how many tokens are in the cache before them.

    The last `len(parents)` of them form a tree (`Scheduled.draft_parents`).
    """

    seq_id: int
    token_ids: Sequence[int]
    num_computed: int
    parents: tuple[int, ...] = ()


class Packed(NamedTuple):
    """A packed step on the host: `ids`, `positions [T]`, `query`, `context [B]`, `starts [B + 1]`, all int64.

    `context` counts what is cached: a layout may have dropped tokens (`KVSpace.place`). Per block table
    `tables [B, W]` int32, as wide as the longest context, and `slots [T]` int64. `tree_mask [T]` int64 is `None`
    where no drafts form a tree.
    """

    ids: np.ndarray
    positions: np.ndarray
    query: np.ndarray
    context: np.ndarray
    starts: np.ndarray
    tables: list[np.ndarray]
    slots: list[np.ndarray]
    tree_mask: np.ndarray | None = None


def arrange(entries: Sequence[PackEntry], space: KVSpace, shape: KVShape, *, trees: bool = False) -> Packed:
    """Entries in order as flat arrays; blocks for every token must be reserved in `space`.

    With `trees` there is a tree mask whether any drafts form a tree or not.
    """
    query = np.fromiter((len(entry.token_ids) for entry in entries), np.int64, len(entries))
    computed = np.fromiter((entry.num_computed for entry in entries), np.int64, len(entries))
    place = getattr(space, "place", None)
    drops = [0 if place is None else place(each.seq_id, each.num_computed, each.num_computed + len(each.token_ids))
             for each in entries]  # fmt: skip
    dropped = np.array(drops, np.int64)
    context = query + computed - dropped
    starts = np.concatenate(([0], np.cumsum(query)))
    owner = np.repeat(np.arange(len(entries)), query)
    positions = np.arange(starts[-1]) + (computed - starts[:-1])[owner]
    ids = np.fromiter(chain.from_iterable(entry.token_ids for entry in entries), np.int64, int(starts[-1]))
    places = positions - dropped[owner]
    tables = [_block_tables(entries, context, space, shape, number) for number in range(shape.num_tables)]
    slots = [_slots(table, owner, places, shape.block_size) for table in tables]
    if not trees and not any(entry.parents for entry in entries):
        return Packed(ids, positions, query, context, starts, tables, slots)
    depths, mask = branches(entries)
    return Packed(ids, computed[owner] + depths, query, context, starts, tables, slots, mask)


def pack(
    entries: Sequence[PackEntry],
    space: KVSpace,
    shape: KVShape,
    device: torch.device | str,
    *,
    logits_rows: Sequence[int] | None = None,
    all_logits: bool = False,
) -> Batch:
    """Pack `entries` in order; blocks for every token must be reserved in `space`.

    `Batch.logits_rows` is what is given, else every row with `all_logits`, else the last new token of each.
    Two copies go to the device: one of all int64 fields, one of all int32 fields.
    """
    packed = arrange(entries, space, shape)
    starts, context, tables = packed.starts, packed.context, packed.tables
    rows = _rows(starts, logits_rows, all_logits)
    fields = [packed.ids, packed.positions, rows, *packed.slots]
    if packed.tree_mask is not None:
        fields.append(packed.tree_mask)
    wide = _to_device(fields, np.int64, torch.device(device))
    narrow = _to_device([starts, context, *tables], np.int32, torch.device(device))
    by_table = tuple(GroupBatch(*pair) for pair in zip(wide[3 : 3 + len(tables)], narrow[2:], strict=True))
    query_lens = tuple(packed.query.tolist())
    return Batch(
        input_ids=wide[0],
        positions=wide[1],
        cu_seqlens_q=narrow[0],
        context_lens=narrow[1],
        logits_rows=wide[2],
        groups=tuple(by_table[number] for number in shape.group_tables or (0,) * len(shape.groups)),
        query_lens=query_lens,
        host_context_lens=tuple(context.tolist()),
        query_len=query_lens[0] if len(set(query_lens)) == 1 else None,
        context_capacity=int(context.max()),
        host_rows=tuple(tables[0][:, 0].tolist()),
        tables=by_table,
        host_logits_rows=tuple(rows.tolist()),
        state_slots=_state_slots(entries, space) if shape.states else None,
        tree_mask=None if packed.tree_mask is None else wide[-1],
    )


def sink_blocks(shape: KVShape) -> np.ndarray:
    """Id of the sink block of each block table, `[tables, 1]`."""
    return np.array([[shape.blocks_of(number)] for number in range(shape.num_tables)])


def num_dropped(space: KVSpace, seq_id: int, start: int, num_new: int) -> int:
    """Tokens before `start` that are not in the cache when `num_new` tokens from there are computed."""
    place = getattr(space, "place", None)
    return 0 if place is None else place(seq_id, start, start + num_new)


def _state_slots(entries: Sequence[PackEntry], space: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(space.state_slots(entry.seq_id)) for entry in entries)


def _rows(starts: np.ndarray, given: Sequence[int] | None, all_logits: bool) -> np.ndarray:
    if given is not None:
        return np.asarray(given, np.int64)
    return np.arange(starts[-1]) if all_logits else starts[1:] - 1


def _block_tables(
    entries: Sequence[PackEntry], context: np.ndarray, space: KVSpace, shape: KVShape, number: int
) -> np.ndarray:
    """`[B, W]`, wide enough for the longest context, the sink block behind each sequence's last block."""
    widths = (-(-context // shape.block_size)).tolist()
    columns = max(widths)
    # Slices between arrays of one type are plain memory copies, several times cheaper than numpy's conversion.
    flat = array("i", [shape.blocks_of(number)]) * (len(entries) * columns)
    for first, (entry, width) in zip(range(0, len(flat), columns), zip(entries, widths, strict=True), strict=True):
        blocks = space.block_table(entry.seq_id, number)[:width]
        flat[first : first + width] = blocks if isinstance(blocks, array) else array("i", blocks)
    return np.frombuffer(flat, np.int32).reshape(len(entries), columns)


def _slots(table: np.ndarray, owner: np.ndarray, places: np.ndarray, block_size: int) -> np.ndarray:
    return table[owner, places // block_size].astype(np.int64) * block_size + places % block_size


def _to_device(arrays: Sequence[np.ndarray], dtype: type, device: torch.device) -> list[torch.Tensor]:
    """Move several arrays in one copy; returns views of one device tensor, in the shapes given."""
    align = _ALIGNED_BYTES // np.dtype(dtype).itemsize
    starts = np.cumsum([0, *(-(-part.size // align) * align for part in arrays)]).tolist()
    kind = torch.int64 if dtype is np.int64 else torch.int32
    host = torch.empty(starts[-1], dtype=kind, pin_memory=device.type == "cuda")
    flat = host.numpy()
    for start, part in zip(starts[:-1], arrays, strict=True):
        flat[start : start + part.size] = part.reshape(-1)
    moved = host.to(device, non_blocking=True)
    return [
        moved[start : start + part.size].view(part.shape) for start, part in zip(starts[:-1], arrays, strict=True)
    ]
