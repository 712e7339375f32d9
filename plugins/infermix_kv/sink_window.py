"""KV layout `sink_window`: the first tokens and the last ones of every sequence, in constant memory. No torch.

Xiao et al., "Efficient Streaming Language Models with Attention Sinks", 2023. Two differences, both forced by what
the joint offers: keys are stored after the rotary embedding and keep their true positions (the paper numbers
positions inside the cache), and whole blocks are dropped, between forwards, so that a query sees at least `window`
recent tokens and at most one block and its own step's tokens more.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from infermix.errors import Unsupported
from infermix.roles.kv_space import KVBudget, KVGroup, KVShape, KVUsage
from infermix.toolkit.block_pool import BlockPool
from infermix.toolkit.host_blocks import Tables
from infermix.toolkit.paged_space import bytes_per_token

from infermix_kv.block_sizes import pool_blocks
from infermix_kv.held_swaps import HeldSwaps

if TYPE_CHECKING:
    from infermix.toolkit.pool_store import PagedStore


class SinkWindowLayout:
    def __init__(self, block_size: int, sink_tokens: int, window: int, max_chunk_tokens: int) -> None:
        self._block_size, self._window, self._max_chunk_tokens = block_size, window, max_chunk_tokens
        self._sink_blocks = -(-sink_tokens // block_size)

    def shape(self, groups: tuple[KVGroup, ...], budget: KVBudget) -> KVShape:
        """Raises `UserError` when `max_bytes` does not hold one sequence."""
        size, longest = self._block_size, budget.max_model_len
        query_len = min(budget.max_query_len or longest, self._max_chunk_tokens, longest)
        per_seq = -(-longest // size)
        most = per_seq if budget.keep_all else min(per_seq, self._most_blocks(query_len))
        per_token = bytes_per_token(groups, budget.element_bytes)
        num_blocks = pool_blocks(int(per_token * size), most, budget)
        return KVShape(
            groups=groups,
            num_blocks=num_blocks,
            block_size=size,
            max_num_seqs=budget.max_num_seqs,
            max_model_len=longest,
            bytes=int(per_token * size) * (num_blocks + 1),
            bytes_per_token=per_token,
            table_limits=(most if most < per_seq else None,),
            max_query_len=query_len if most < per_seq else None,
            max_rewind=self._window if most < per_seq else None,
        )

    def _most_blocks(self, query_len: int) -> int:
        """A step begins with `window` to `window + block_size - 1` recent tokens, its first new one among them."""
        recent = self._window + self._block_size - 1 + query_len - 1
        return self._sink_blocks + -(-recent // self._block_size)

    def space(self, shape: KVShape) -> SinkWindowSpace:
        return SinkWindowSpace(shape, self._sink_blocks, self._window)

    def store(self, shape: KVShape, device: Any, dtype: Any) -> PagedStore:
        from infermix.toolkit.pool_store import PagedStore

        return PagedStore(shape, device, dtype)


@dataclass(slots=True)
class _Held:
    """Blocks of one sequence in the order of its cache, its tokens, and how many of them were dropped.

    `placed` tokens were in a forward, or will be in one that was launched: the next one begins there or later.
    """

    blocks: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0
    dropped: int = 0
    placed: int = 0


class SinkWindowSpace(HeldSwaps):
    """Sink blocks stay; when the window moves past a block, it goes to the end of the table to be written again.

    Without a limit per sequence (`KVShape.table_limits`) nothing is dropped.
    """

    fixed_rows = False
    recompute = False

    def __init__(self, shape: KVShape, sink_blocks: int, window: int) -> None:
        self._shape, self._block_size = shape, shape.block_size
        self._sink_blocks, self._window = sink_blocks, window
        self._limit = shape.table_limits[0]
        self._pool = BlockPool(shape.num_blocks)
        self._held: dict[int, _Held] = {}
        self._prepare_swaps(shape)
        self.reset_counters()

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        held = self._held.get(seq_id) or _Held()
        if num_tokens <= held.length:
            return True
        if num_tokens > self._shape.max_model_len:
            return False
        # Who comes back from the host needs as many blocks as left, whatever the next forward drops.
        cached = num_tokens - self._dropped_at(held, held.placed if held.blocks else 0)
        columns = min(-(-cached // self._block_size), self._most)
        blocks = self._pool.allocate(max(0, columns - len(held.blocks)))
        if blocks is None:
            return False
        held.blocks.extend(blocks)
        held.length = num_tokens
        self._held[seq_id] = held
        return True

    @property
    def _most(self) -> int:
        return self._shape.blocks_per_seq if self._limit is None else self._limit

    def _dropped_at(self, held: _Held, start: int) -> int:
        """Tokens dropped before token `start` is computed: whole blocks behind the sinks; never fewer than before."""
        if self._limit is None:
            return 0
        past = start + 1 - self._window - self._sink_blocks * self._block_size
        return max(held.dropped, past // self._block_size * self._block_size)

    def place(self, seq_id: int, start: int, stop: int) -> int:
        held = self._held[seq_id]
        dropped = self._dropped_at(held, start)
        if dropped > held.dropped:
            first, count = self._sink_blocks, (dropped - held.dropped) // self._block_size
            blocks = held.blocks
            held.blocks = blocks[:first] + blocks[first + count :] + blocks[first : first + count]
            held.dropped = dropped
        held.placed = stop
        assert stop - dropped <= len(held.blocks) * self._block_size, "more tokens than were reserved"
        return dropped

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Raises `Unsupported` when the cut falls among dropped tokens."""
        held = self._held[seq_id]
        if num_tokens >= held.length:
            return
        if not self._can_cut(held, num_tokens):
            raise Unsupported(
                f"cannot cut sequence {seq_id} at token {num_tokens}: {held.dropped} were dropped there"
            )
        kept = -(-(num_tokens - held.dropped) // self._block_size)
        self._pool.release(held.blocks[kept:])
        del held.blocks[kept:]
        held.length = num_tokens
        held.placed = min(held.placed, num_tokens)

    def _can_cut(self, held: _Held, num_tokens: int) -> bool:
        return not held.dropped or num_tokens >= held.dropped + self._sink_blocks * self._block_size

    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> list[tuple[int, int]] | None:
        """Every block is copied: the child's window moves on its own."""
        assert child_id not in self._held, f"sequence {child_id} already holds blocks"
        parent = self._held[parent_id]
        length = parent.length if num_tokens is None else num_tokens
        columns = min(-(-(length - parent.dropped) // self._block_size), len(parent.blocks))
        own = self._pool.allocate(columns) if self._can_cut(parent, length) else None
        if own is None:
            return None
        self._held[child_id] = _Held(array("i", own), length, parent.dropped, min(parent.placed, length))
        return list(zip(parent.blocks, own, strict=False))

    def release(self, seq_id: int) -> None:
        held = self._held.pop(seq_id, None)
        if held is not None:
            self._pool.release(held.blocks)
            self._seen += held.length
            self._dropped += held.dropped
        self._release_host(seq_id)

    def _cached_blocks(self, seq_id: int, num_tokens: int) -> Tables:
        held = self._held[seq_id]
        return (tuple(held.blocks[: -(-(num_tokens - held.dropped) // self._block_size)]),)

    def block_table(self, seq_id: int, table: int = 0) -> Sequence[int]:
        return self._held[seq_id].blocks

    def fits(self, num_tokens: int) -> bool:
        needed = min(-(-num_tokens // self._block_size), self._most)
        return num_tokens <= self._shape.max_model_len and needed <= self._shape.num_blocks

    def usage(self) -> KVUsage:
        size = self._block_size
        used = sum(min(held.length - held.dropped, len(held.blocks) * size) for held in self._held.values())
        return KVUsage(self._pool.num_used * size, used, self._shape.capacity_tokens)

    def counters(self) -> dict[str, float]:
        """Of sequences that ended or were preempted: their tokens, and how many of them were dropped."""
        return kept_counters(self._seen, self._dropped)

    def reset_counters(self) -> None:
        self._seen = self._dropped = 0


def kept_counters(seen: int, dropped: int) -> dict[str, float]:
    """Sums, since counters are read as how far they moved: a fraction would not survive that."""
    return {"kv_ended_tokens": float(seen), "kv_dropped_tokens": float(dropped)}
