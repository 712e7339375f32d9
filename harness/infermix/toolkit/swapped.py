"""Sequences that a scheduler moved to host memory, for schedulers that preempt by swapping."""

from __future__ import annotations

from collections import OrderedDict

from infermix.roles.kv_space import SwapSpace
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan


class SwappedQueue:
    """Who waits on the host, the one that was swapped out last in front; books moves in plan and space alike.

    A scheduler that picks the last admitted as victim thereby resumes in the order of admission. No livelock: a
    scheduler must let somebody advance while others wait here, and resume before it admits.
    """

    def __init__(self) -> None:
        self._sequences: OrderedDict[int, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sequences)

    def swap_out(self, victim: Sequence, plan: Plan, space: SwapSpace) -> bool:
        """Move a sequence to the host; `False` (and no change) when there is no room: then recompute it.

        Within a plan, all swaps out come before the first swap in.
        """
        assert not plan.swapped_in, "a plan that brought somebody back cannot swap anybody out"
        moves = space.swap_out(victim.seq_id, victim.num_computed)
        if moves is None:
            return False
        self._sequences[victim.seq_id] = victim
        self._sequences.move_to_end(victim.seq_id, last=False)
        plan.swapped_out.append(victim)
        plan.moves.append(moves)
        return True

    def swap_in(self, plan: Plan, space: SwapSpace) -> Sequence | None:
        """Bring the first one back with room for its next token; `None` when nobody waits or it does not fit."""
        if not self._sequences:
            return None
        sequence = next(iter(self._sequences.values()))
        moves = space.swap_in(sequence.seq_id, sequence.num_tokens)
        if moves is None:
            return None
        del self._sequences[sequence.seq_id]
        plan.swapped_in.append(sequence)
        plan.moves.append(moves)
        return sequence

    def discard(self, sequence: Sequence) -> None:
        """Forget a sequence that ended."""
        self._sequences.pop(sequence.seq_id, None)
