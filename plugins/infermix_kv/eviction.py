"""KV layouts `h2o` and `snapkv`: a budget of tokens per sequence, those that attention looks at most. No torch.

Zhang et al., "H2O: Heavy-Hitter Oracle", 2023; Li et al., "SnapKV: LLM Knows What You are Looking for Before
Generation", 2024. Which tokens stay is decided per layer and KV head, how many is the same everywhere; kept ones move
to the front of the sequence's blocks, and the blocks behind them are free again. Keys keep their true positions.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from infermix.errors import Unsupported
from infermix.roles.kv_space import Eviction, KVBudget, KVGroup, KVShape, KVUsage
from infermix.toolkit.block_pool import BlockPool
from infermix.toolkit.host_blocks import Tables
from infermix.toolkit.paged_space import bytes_per_token

from infermix_kv.block_sizes import pool_blocks
from infermix_kv.held_swaps import HeldSwaps
from infermix_kv.sink_window import kept_counters

if TYPE_CHECKING:
    from infermix_kv.scored_store import ScoredStore

#: Scores are accumulated in fp32, one per slot and KV head.
SCORE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Policy:
    """When scores are taken, and when the cache of a sequence is cut to `budget` tokens.

    `observed_queries`: the last so many queries of a forward that brings at least as many give the scores anew
    (SnapKV); `None`: every query adds to them (H2O). `slack`: tokens that the cache may grow beyond the budget.
    `recent`: the newest tokens, which stay. `pool_kernel`: scores are smoothed by a maximum over so many neighbours.
    """

    budget: int
    recent: int
    slack: int = 0
    observed_queries: int | None = None
    pool_kernel: int = 1

    def observes(self, query_len: int) -> bool:
        return self.observed_queries is None or query_len >= self.observed_queries

    def cuts(self, num_cached: int, last_query_len: int) -> bool:
        """Before a forward, with `num_cached` tokens there and `last_query_len` new ones in the forward before."""
        return num_cached > self.budget + self.slack and self.observes(last_query_len)


class EvictingLayout:
    def __init__(self, block_size: int, policy: Policy) -> None:
        self._block_size, self._policy = block_size, policy

    def shape(self, groups: tuple[KVGroup, ...], budget: KVBudget) -> KVShape:
        """Prompts are held whole until they are cut, so a sequence of `max_model_len` must fit.

        Raises `UserError` when `max_bytes` does not hold one.
        """
        heads = sum(len(group.layers) * group.num_kv_heads for group in groups)
        per_token = bytes_per_token(groups, budget.element_bytes) + SCORE_BYTES * heads
        block_bytes = int(per_token * self._block_size)
        num_blocks = pool_blocks(block_bytes, -(-budget.max_model_len // self._block_size), budget)
        return KVShape(
            groups=groups,
            num_blocks=num_blocks,
            block_size=self._block_size,
            max_num_seqs=budget.max_num_seqs,
            max_model_len=budget.max_model_len,
            bytes=block_bytes * (num_blocks + 1),
            bytes_per_token=per_token,
            keep_all=budget.keep_all,
        )

    def space(self, shape: KVShape) -> EvictingSpace:
        return EvictingSpace(shape, self._policy)

    def store(self, shape: KVShape, device: Any, dtype: Any) -> ScoredStore:
        from infermix_kv.scored_store import ScoredStore

        return ScoredStore(shape, device, dtype, self._policy)


@dataclass(slots=True)
class _Held:
    """Blocks and tokens of one sequence; `last` bounds its latest forward, `cut_at` is where it was last cut."""

    blocks: array[int] = field(default_factory=lambda: array("i"))
    length: int = 0
    dropped: int = 0
    last: tuple[int, int] = (0, 0)
    cut_at: int = 0


class EvictingSpace(HeldSwaps):
    """Blocks in the order of the cache; `place` decides when a sequence is cut, the store which tokens stay."""

    fixed_rows = False
    recompute = False

    def __init__(self, shape: KVShape, policy: Policy) -> None:
        self._shape, self._policy, self._block_size = shape, policy, shape.block_size
        self._pool = BlockPool(shape.num_blocks)
        self._held: dict[int, _Held] = {}
        self._evictions: list[Eviction] = []
        self._prepare_swaps(shape)
        self.reset_counters()

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        held = self._held.get(seq_id) or _Held()
        if num_tokens <= held.length:
            return True
        if num_tokens > self._shape.max_model_len:
            return False
        blocks = self._pool.allocate(max(0, self._columns(num_tokens - held.dropped) - len(held.blocks)))
        if blocks is None:
            return False
        held.blocks.extend(blocks)
        held.length = num_tokens
        self._held[seq_id] = held
        return True

    def place(self, seq_id: int, start: int, stop: int) -> int:
        held = self._held[seq_id]
        if held.last != (start, stop):
            self._cut(held, start)
            held.last = start, stop
        assert stop - held.dropped <= len(held.blocks) * self._block_size, "more tokens than were reserved"
        return held.dropped

    def _cut(self, held: _Held, start: int) -> None:
        """The blocks that come free are handed out at the next reservation, after the store has moved the tokens."""
        cached, (first, last) = start - held.dropped, held.last
        if self._shape.keep_all or not self._policy.cuts(cached, last - first):
            return
        kept = self._policy.budget
        blocks = tuple(held.blocks[: self._columns(cached)])
        self._evictions.append(Eviction(blocks, cached, kept, self._policy.recent))
        held.dropped, held.cut_at = start - kept, start
        self._keep_blocks(held, held.length)

    def _keep_blocks(self, held: _Held, num_tokens: int) -> None:
        columns = self._columns(num_tokens - held.dropped)
        self._pool.release(held.blocks[columns:])
        del held.blocks[columns:]

    def _columns(self, num_cached: int) -> int:
        return -(-num_cached // self._block_size)

    def evictions(self) -> list[Eviction]:
        decided, self._evictions = self._evictions, []
        return decided

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Raises `Unsupported` when the cut falls among tokens that an eviction has moved."""
        held = self._held[seq_id]
        if num_tokens >= held.length:
            return
        if num_tokens < held.cut_at:
            raise Unsupported(f"cannot cut sequence {seq_id} at token {num_tokens}: evicted at token {held.cut_at}")
        self._keep_blocks(held, num_tokens)
        held.length = num_tokens

    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> list[tuple[int, int]] | None:
        """Every block is copied, scores included: the two cut their caches on their own.

        `None` also for a part of what the parent has computed: later queries have changed the scores of its tokens.
        """
        assert child_id not in self._held, f"sequence {child_id} already holds blocks"
        parent = self._held[parent_id]
        length = parent.length if num_tokens is None else num_tokens
        own = self._pool.allocate(self._columns(length - parent.dropped)) if length == parent.last[1] else None
        if own is None:
            return None
        self._held[child_id] = replace(parent, blocks=own, length=length)
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
        return (tuple(held.blocks[: self._columns(num_tokens - held.dropped)]),)

    def block_table(self, seq_id: int, table: int = 0) -> Sequence[int]:
        return self._held[seq_id].blocks

    def fits(self, num_tokens: int) -> bool:
        return num_tokens <= min(self._shape.max_model_len, self._shape.capacity_tokens)

    def usage(self) -> KVUsage:
        used = sum(held.length - held.dropped for held in self._held.values())
        return KVUsage(self._pool.num_used * self._block_size, used, self._shape.capacity_tokens)

    def counters(self) -> dict[str, float]:
        """Of sequences that ended or were preempted: their tokens, and how many of them were dropped."""
        return kept_counters(self._seen, self._dropped)

    def reset_counters(self) -> None:
        self._seen = self._dropped = 0
