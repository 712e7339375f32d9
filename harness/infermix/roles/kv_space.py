"""Role: KV layout, first half. Who owns which block: pure bookkeeping, no torch.

Scheduler, simulator, `plan` and the calculators see only this half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from infermix.roles.facts import StateTensor
    from infermix.roles.kv_store import KVStore


@dataclass(frozen=True)
class KVGroup:
    """Layers of equal layout, window and shape. `layers` are model layer indices.

    With `shared_values`, a value is the first `value_dim` numbers of its key and takes no room of its own.
    """

    layers: tuple[int, ...]
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    shared_values: bool = False

    def bytes_per_token(self, element_bytes: float) -> float:
        width = self.key_dim if self.shared_values else self.key_dim + self.value_dim
        return len(self.layers) * self.num_kv_heads * width * element_bytes


@dataclass(frozen=True)
class LayerState:
    """What one recurrent layer keeps per sequence, however long the sequence is."""

    layer: int
    tensors: tuple[StateTensor, ...]

    def bytes(self, element_bytes: int) -> int:
        return sum(tensor.bytes(element_bytes) for tensor in self.tensors)


@dataclass(frozen=True)
class KVBudget:
    """What the engine may use: `max_bytes` `None` means "as much as max_num_seqs x max_model_len needs".

    `max_query_len` is the most new tokens of one sequence in one forward, `None` where nobody knows: a layout that
    depends on it chooses, and says so in `KVShape.max_query_len`. `keep_all` forbids a lossy layout to drop tokens
    (the self-check compares with the full computation). `states` are what the model's recurrent layers keep;
    only layouts of form "state" have a place for them.
    """

    max_num_seqs: int
    max_model_len: int
    element_bytes: int
    max_bytes: int | None = None
    max_query_len: int | None = None
    keep_all: bool = False
    states: tuple[LayerState, ...] = ()


@dataclass(frozen=True)
class KVShape:
    """A sized layout: `num_blocks` usable blocks of `block_size` tokens plus one sink block with id `num_blocks`.

    `bytes` is what the store allocates, sink included; `bytes_per_token` what the slots of one token take in all
    groups, `bytes_per_seq` what a sequence (and the sink) costs besides. `group_tables` maps a KV group to the block
    table that it uses; empty means that all groups share table 0. `side_tables` more tables follow those, which only
    the store reads (`Batch.tables`). `host_blocks[t]` blocks of table t fit the host memory that sequences are
    swapped out to; empty means none. `max_truncate` is how many tokens `truncate` can take back at once (`None`: any
    number), `max_rewind` how many where each of them came in a forward of its own.

    Block tables may have pools of their own: `table_blocks[t]` usable blocks (the sink behind them), of which one
    sequence holds at most `table_limits[t]` (`None`: as many as its tokens need). Empty means `num_blocks` and no
    limit for all. `max_query_len` is the most new tokens of one sequence that a forward may bring (`None`: any
    number); the runner splits longer prompts over several forwards. `keep_all` repeats the budget's.

    `states` are kept in `num_state_slots` slots and a sink sequence, `state_slots_per_seq` of them for each sequence.
    """

    groups: tuple[KVGroup, ...]
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    bytes: int
    bytes_per_token: float
    group_tables: tuple[int, ...] = ()
    host_blocks: tuple[int, ...] = ()
    table_blocks: tuple[int, ...] = ()
    table_limits: tuple[int | None, ...] = ()
    max_query_len: int | None = None
    keep_all: bool = False
    side_tables: int = 0
    bytes_per_seq: float = 0.0
    max_truncate: int | None = None
    max_rewind: int | None = None
    states: tuple[LayerState, ...] = ()
    num_state_slots: int = 0
    state_slots_per_seq: int = 1

    @property
    def sink_block(self) -> int:
        return self.num_blocks

    def table_of(self, group: int) -> int:
        """The block table that a KV group uses."""
        return self.group_tables[group] if self.group_tables else 0

    def blocks_of(self, table: int) -> int:
        """Usable blocks of the pool behind a block table, which is also the id of its sink block."""
        return self.table_blocks[table] if self.table_blocks else self.num_blocks

    def host_blocks_of(self, table: int) -> int:
        """Blocks of a table that the host holds."""
        return self.host_blocks[table] if self.host_blocks else 0

    def most_blocks_of(self, table: int) -> int:
        """Blocks of a table that one sequence of the longest length holds."""
        limit = self.table_limits[table] if self.table_limits else None
        return self.blocks_per_seq if limit is None else min(limit, self.blocks_per_seq)

    def held_tokens(self, group: int, num_tokens: int) -> int:
        """Slots that a group holds for one sequence of `num_tokens`: whole blocks, at most those of a ring."""
        limit = self.table_limits[self.table_of(group)] if self.table_limits else None
        blocks = -(-num_tokens // self.block_size)
        return self.block_size * (blocks if limit is None else min(blocks, limit))

    def bytes_of_slots(self, groups: Sequence[KVGroup]) -> float:
        """Bytes of one slot in each of some of the layout's groups."""
        values = sum(group.bytes_per_token(1) for group in self.groups)
        return self.bytes_per_token * sum(group.bytes_per_token(1) for group in groups) / values if values else 0.0

    def bytes_of_sequence(self, num_tokens: int) -> float:
        """Bytes that one sequence of `num_tokens` holds; beyond their limit, rings add nothing."""
        return self.bytes_per_seq + sum(
            self.bytes_of_slots((group,)) * self.held_tokens(index, num_tokens)
            for index, group in enumerate(self.groups)
        )

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def blocks_per_seq(self) -> int:
        """Widest block table: blocks of one sequence of `max_model_len` tokens."""
        return -(-self.max_model_len // self.block_size)

    @property
    def num_tables(self) -> int:
        return max(self.group_tables, default=0) + 1 + self.side_tables


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Slots at one moment: allocated to sequences, of those reserved for a token, and all. A shared slot counts once.

    `reserved_tokens` is the sum of what the sequences reserved, shared slots counted for each (`None`: not known).
    """

    allocated_tokens: int
    used_tokens: int
    capacity_tokens: int
    reserved_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Eviction:
    """Cut one sequence's cache from `num_cached` tokens in `blocks` to `num_kept`, moved to the front of the blocks.

    The last `num_recent` tokens stay whatever their scores.
    """

    blocks: tuple[int, ...]
    num_cached: int
    num_kept: int
    num_recent: int


class KVSpace(Protocol):
    """Block ownership per sequence id. Every method is O(blocks touched).

    Optional methods, which whoever wants them asks for:

    - `place(seq_id, start, stop) -> int` of a layout that drops tokens: arrange the table for a forward that computes
      tokens `start ... stop - 1` of the sequence, and return how many earlier tokens are not in the cache. Token p
      then lies at index p minus that number; positions stay true, `Batch.context_lens` counts what is cached. Asked
      again for the same tokens, the answer is the same.
    - `evictions() -> list[Eviction]`, what `place` decided since the last call; the store carries it out
      (`KVStore.evict`) before the next forward.
    - `reserve_next(entries) -> int`: `reserve` of one token more than is computed for the sequence of each entry (a
      `Scheduled`), in order, until there is no room; returns for how many. One call for a whole step of decodes.
    - `steps_for(num_seqs) -> int`: for how many steps that many sequences surely get one token more each, if nobody
      else reserves; each of them holds what it holds now.
    - `counters() -> dict[str, float]`, cumulative figures for the record; `reset_counters()` starts them anew.
    - copy-on-write and prefix caching: `roles.kv_prefix`.
    """

    #: A sequence keeps one row for life and must sit at that index of a captured batch (dense layouts).
    fixed_rows: bool
    #: Nothing is kept: the runner feeds the whole sequence at each step (`kv: none`).
    recompute: bool

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all; `False` (and no change) when there is none."""
        ...

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and give back what is no longer needed.

        Raises `Unsupported` for a cut that the layout cannot make (`KVShape.max_truncate`).
        """
        ...

    def fork(self, parent_id: int, child_id: int, num_tokens: int | None = None) -> list[tuple[int, int]] | None:
        """Let `child_id` share the parent's first `num_tokens` tokens (`None`: all that are reserved).

        Returns (source, target) block copies to make at once, `None` (and no change) if full, or if the parent no
        longer holds what the child would need. Tokens that the parent has reserved but not computed must be left out:
        it will write them. Where block tables have pools of their own, the pairs are meant for `KVStore.copy` of the
        same layout alone.
        """
        ...

    def release(self, seq_id: int) -> None:
        """Give back everything; unknown ids are ignored."""
        ...

    def block_table(self, seq_id: int, table: int = 0) -> Sequence[int]:
        """Blocks of the sequence in order; live and read-only, valid until the next call that changes it."""
        ...

    def fits(self, num_tokens: int) -> bool:
        """Whether one sequence of `num_tokens` could be held by an empty space."""
        ...

    def usage(self) -> KVUsage: ...


@dataclass(frozen=True, slots=True)
class BlockMoves:
    """Blocks of one sequence to copy between device and host.

    `device_blocks[t][i]` and `host_blocks[t][i]` belong together, for every block table t.
    """

    seq_id: int
    to_host: bool
    device_blocks: tuple[tuple[int, ...], ...]
    host_blocks: tuple[tuple[int, ...], ...]

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.device_blocks))


class SwapSpace(KVSpace, Protocol):
    """A space whose sequences can move to host memory and back; the layout provides `kv:swap`.

    Moves must be copied in the order in which they were booked, since a later one may use blocks that an earlier one
    gave free. A swapped-out sequence holds no device block; `release` gives back its host blocks.
    """

    def swap_out(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        """Move the first `num_tokens` tokens to the host and give all device blocks back.

        `None` (and no change) when the host has no room or there is nothing to save.
        """
        ...

    def swap_in(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        """Bring a sequence back with room for `num_tokens` tokens in all; `None` (and no change) when there is none.

        `num_tokens` is at least what was saved.
        """
        ...


class KVLayout(Protocol):
    """Both halves. `shape`, `space` import no torch; `store` does.

    May say `form`, what it keeps of the model: "latent" is one compressed row per token and layer of MLA models (a
    group with `shared_values`); "state" the keys and values of attention layers and the states of recurrent ones, in
    a space with `state_slots(seq_id)` and a store with `states`; without it "expanded", keys and values alone.
    """

    def shape(self, groups: tuple[KVGroup, ...], budget: KVBudget) -> KVShape: ...

    def space(self, shape: KVShape) -> KVSpace: ...

    def store(self, shape: KVShape, device: Any, dtype: Any) -> KVStore: ...
