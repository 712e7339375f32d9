"""Role: scheduler. A pure policy over waiting, running and the KV space; the same object runs in the simulator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from infermix.roles.kv_space import BlockMoves, KVSpace
    from infermix.roles.request import Sequence


class Scheduled(msgspec.Struct, frozen=True):
    """A sequence and how many new tokens it gets in this step.

    `draft_ids` are tokens that a decoder proposes behind those that the sequence knows or has in flight; they count
    in `num_new_tokens` (1 + drafts for a verification row). Schedulers leave them empty. Drafts that form a tree say
    of each which draft it follows (an earlier one; -1: the last own token) in `draft_parents`; empty: one line.

    A step makes one or two per sequence, and a frozen dataclass takes six times as long to make as this.
    """

    sequence: Sequence
    num_new_tokens: int
    draft_ids: tuple[int, ...] = ()
    draft_parents: tuple[int, ...] = ()

    @property
    def num_own_tokens(self) -> int:
        """New tokens without the drafts: known ones, then at most one in flight."""
        return self.num_new_tokens - len(self.draft_ids)


@dataclass(slots=True)
class Plan:
    """One step: who runs, who lost its KV, and for how many steps the plan stays valid if nothing arrives or ends.

    `valid_steps` above 1: asked again after the step, the scheduler would run the same sequences, one token each,
    and so on; `KVSpace.reserve` then gives each its next tokens, for all of these steps at once too. Whoever runs
    ahead must stop at the step in which a sequence of the plan ends.

    `swapped_out` and `swapped_in` are preempted and resumed by copies, `moves`, in the order of booking, all swaps
    out before the first swap in. The engine queues the copies before the step; a sequence that comes back may be
    scheduled at once, and the step then waits for it, or later, and the copy runs beside the steps between.

    An empty plan with `wake_s` (seconds of the engine's clock) waits on purpose: nothing has to run before that time
    unless a request arrives or ends.
    """

    entries: list[Scheduled] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)
    valid_steps: int = 1
    swapped_out: list[Sequence] = field(default_factory=list)
    swapped_in: list[Sequence] = field(default_factory=list)
    moves: list[BlockMoves] = field(default_factory=list)
    wake_s: float | None = None

    @property
    def num_new_tokens(self) -> int:
        return sum(entry.num_new_tokens for entry in self.entries)


class Scheduler(Protocol):
    """Cost of `schedule` must not grow with the number of waiting sequences.

    Optional methods:

    - `observe(step_s, plan) -> None`, told after a step's tokens were read how long it took, from the later of its
      launch and the end of the step before. Only an engine that measures steps calls it.
    - `counters() -> dict[str, float]`, cumulative figures for the record. Replicas are added up, so they are sums.
    - `reset() -> None`, a new repeat begins: nothing is queued or runs, and `counters` start again from 0. An engine
      that builds a new scheduler instead need not call it.
    """

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        ...

    def finish(self, sequence: Sequence) -> None:
        """Forget a sequence that is gone; the engine releases its KV.

        `finish_reason` says how it ended, `None` that it was refused; tokens in flight behind a stop are lost.
        """
        ...

    def schedule(self, space: KVSpace, now_s: float) -> Plan:
        """Choose the next step. KV for every chosen token is reserved; an empty plan means nothing can run now.

        A preempted sequence has been released in `space`, its `num_computed` set to 0, and waits again. One that was
        swapped out keeps its `num_computed` and counts as waiting.
        """
        ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_running(self) -> int: ...
