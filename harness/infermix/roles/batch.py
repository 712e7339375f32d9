"""The packed batch of one forward pass.

Device tensors have the shapes given here; in a captured step they are persistent, of fixed capacity, and updated
in place. Padded rows have context length 0, write to the sink block and return zeros.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

#: Most new tokens of a sequence whose drafts form a tree: the bits of a row of `Batch.tree_mask`.
MAX_TREE_TOKENS = 64


@dataclass(slots=True)
class GroupBatch:
    """Addresses of one KV group: `slot_mapping [T]` int64 (where new tokens go), `block_tables [B, W]` int32."""

    slot_mapping: Tensor
    block_tables: Tensor


@dataclass(slots=True)
class Batch:
    """T new tokens of B sequences, flat, each with its own query length (prefill, chunk, decode, verification alike).

    - `input_ids [T]`, `positions [T]` int64; `cu_seqlens_q [B + 1]`, `context_lens [B]` int32 (context includes the
      new tokens); `logits_rows [R]` int64, the rows of T whose logits are wanted.
    - `query_lens`, `host_context_lens`: the same on the host; `host_context_lens` is `None` in a captured step, where
      no Python may depend on it.
    - `query_len`: the common query length, or `None` when lengths differ. A captured step of different lengths (only
      for parts that provide `graph:mixed`) has upper bounds in `query_lens`, and padding rows with context length 0
      anywhere behind its sequences. `context_capacity`: an upper bound on
      `context_lens`, static for a captured step (its context bucket).
    - `groups`: one `GroupBatch` per KV group; `tables`: one per block table, those of no group included.
    - `host_logits_rows`: `logits_rows` on the host, ascending; `None` in a captured step.
    - `host_rows`: first block of each sequence on the host, for layouts with one block per sequence; `None` in a
      captured step, where row i of such a layout is sequence i (`KVSpace.fixed_rows`).
    - `state_slots`: slots of each sequence's recurrent states on the host, for layouts that keep any. The state after
      n tokens lies in slot n modulo their number.
    - `tree_mask [T]` int64 where drafts form trees, else `None`: bit j of a token says that it sees new token j of
      its sequence; all that was cached before is seen. Such tokens have the positions of their depth. A sequence of
      more than `MAX_TREE_TOKENS` new tokens is causal whatever its bits say.
    - `extra`: what parts compute once per forward (masks, gather indices) and share between layers.
    """

    input_ids: Tensor
    positions: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    logits_rows: Tensor
    groups: tuple[GroupBatch, ...]
    query_lens: tuple[int, ...]
    host_context_lens: tuple[int, ...] | None
    query_len: int | None
    context_capacity: int
    host_rows: tuple[int, ...] | None = None
    tables: tuple[GroupBatch, ...] = ()
    host_logits_rows: tuple[int, ...] | None = None
    state_slots: tuple[tuple[int, ...], ...] | None = None
    tree_mask: Tensor | None = None
    extra: dict[Any, Any] = field(default_factory=dict)

    @property
    def num_seqs(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])

    @property
    def captured(self) -> bool:
        return self.host_context_lens is None
