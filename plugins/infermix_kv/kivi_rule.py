"""When tokens of the KV layout `kivi` are quantized: a function of the context alone. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KiviRule:
    """The tail is a ring of `capacity` tokens: token p lies at p % capacity until token p + capacity comes.

    Groups of `group_size` tokens are quantized when all of them are older than the last `num_recent` tokens. Since
    that depends on the context alone, tokens that `truncate` takes back (`max_truncate` at most) bring the state of
    the shorter context back: what is no longer counted as quantized is still in the ring.
    """

    group_size: int
    capacity: int

    @property
    def num_recent(self) -> int:
        """Two groups less than the ring: one that fills up, one that `truncate` may take back."""
        return max(self.capacity - 2 * self.group_size, 1)

    @property
    def max_truncate(self) -> int:
        return self.group_size

    @property
    def max_tail(self) -> int:
        """Most tokens that are read from the tail."""
        return self.num_recent + self.group_size - 1

    def num_flushed(self, context: int) -> int:
        """Tokens of a context that are read quantized: whole groups."""
        return max(context - self.num_recent, 0) // self.group_size * self.group_size

    def flushed(self, contexts: Any) -> Any:
        """`num_flushed` of a tensor of contexts."""
        return (contexts - self.num_recent).clamp(min=0) // self.group_size * self.group_size
