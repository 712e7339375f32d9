"""Swapping for layouts that drop tokens: what a sequence has dropped stays known while its cache is on the host."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

from infermix.roles.kv_space import BlockMoves, KVShape
from infermix.toolkit.host_blocks import HostBlocks, Tables


class HeldSwaps:
    """`swap_out` and `swap_in` of a space whose `_held` says of each sequence its `blocks`, `length` and `dropped`.

    `blocks` are in the order of the cache. The space tells the cache of its sequence as it was, so that it goes on
    exactly as if it had never left.
    """

    _held: dict[int, Any]
    _seen: int
    _dropped: int

    def _prepare_swaps(self, shape: KVShape) -> None:
        self._host = HostBlocks.of(shape, self._cached_blocks)
        self._away: dict[int, Any] = {}

    def swap_out(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        held, counted = self._held[seq_id], (self._seen, self._dropped)
        space: Any = self
        moves = self._host.swap_out(space, seq_id, num_tokens)
        if moves is not None:
            self._seen, self._dropped = counted  # the sequence has not ended
            self._away[seq_id] = replace(held, blocks=array("i"), length=0)
        return moves

    def swap_in(self, seq_id: int, num_tokens: int) -> BlockMoves | None:
        self._held[seq_id] = self._away[seq_id]
        space: Any = self
        moves = self._host.swap_in(space, seq_id, num_tokens)
        del (self._held if moves is None else self._away)[seq_id]
        return moves

    def _release_host(self, seq_id: int) -> None:
        """Give back what a swapped-out sequence has on the host; unknown ids are ignored."""
        held = self._away.pop(seq_id, None)
        if held is not None:
            self._seen += self._host.saved_tokens(seq_id)
            self._dropped += held.dropped
            self._host.release(seq_id)

    def _cached_blocks(self, seq_id: int, num_tokens: int) -> Tables:
        """Blocks that hold what is cached of the first `num_tokens` tokens."""
        raise NotImplementedError
