"""Role: KV layout, first half. Who owns which block: pure bookkeeping, no torch.

Scheduler, simulator, `plan` and the calculators see only this half.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from infermix.roles.kv_store import KVStore


@dataclass(frozen=True)
class KVGroup:
    """Layers of equal layout, window and shape. `layers` are model layer indices."""

    layers: tuple[int, ...]
    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None

    def bytes_per_token(self, element_bytes: float) -> float:
        return len(self.layers) * self.num_kv_heads * (self.key_dim + self.value_dim) * element_bytes


@dataclass(frozen=True)
class KVBudget:
    """What the engine may use: `max_bytes` `None` means "as much as max_num_seqs x max_model_len needs"."""

    max_num_seqs: int
    max_model_len: int
    element_bytes: int
    max_bytes: int | None = None


@dataclass(frozen=True)
class KVShape:
    """A sized layout: `num_blocks` usable blocks of `block_size` tokens plus one sink block with id `num_blocks`.

    `bytes` is what the store allocates, sink included; `bytes_per_token` what one more token costs. `group_tables`
    maps a KV group to the block table that it uses; empty means that all groups share table 0. `num_host_blocks`
    blocks of every table fit the host memory that sequences are swapped out to.
    """

    groups: tuple[KVGroup, ...]
    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_model_len: int
    bytes: int
    bytes_per_token: float
    group_tables: tuple[int, ...] = ()
    num_host_blocks: int = 0

    @property
    def sink_block(self) -> int:
        return self.num_blocks

    @property
    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def blocks_per_seq(self) -> int:
        """Widest block table: blocks of one sequence of `max_model_len` tokens."""
        return -(-self.max_model_len // self.block_size)

    @property
    def num_tables(self) -> int:
        return max(self.group_tables, default=0) + 1


@dataclass(frozen=True, slots=True)
class KVUsage:
    """Slots at one moment: allocated to sequences, of those holding a token, and all."""

    allocated_tokens: int
    used_tokens: int
    capacity_tokens: int


class KVSpace(Protocol):
    """Block ownership per sequence id. Every method is O(blocks touched)."""

    #: A sequence keeps one row for life and must sit at that index of a captured batch (dense layouts).
    fixed_rows: bool
    #: Nothing is kept: the runner feeds the whole sequence at each step (`kv: none`).
    recompute: bool

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in all; `False` (and no change) when there is none."""
        ...

    def truncate(self, seq_id: int, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens and give back what is no longer needed."""
        ...

    def fork(self, parent_id: int, child_id: int) -> list[tuple[int, int]] | None:
        """Let `child_id` share the parent's tokens; returns (source, target) block copies to make, `None` if full."""
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
    """Both halves. `shape`, `space` import no torch; `store` does."""

    def shape(self, groups: tuple[KVGroup, ...], budget: KVBudget) -> KVShape: ...

    def space(self, shape: KVShape) -> KVSpace: ...

    def store(self, shape: KVShape, device: Any, dtype: Any) -> KVStore: ...
