"""Token budgets per class of requests."""

from __future__ import annotations

from collections.abc import Mapping

from infermix.roles.kv_space import KVSpace
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan
from infermix.toolkit.iteration import IterationScheduler
from infermix.toolkit.waiting import KeyedQueue, Rank

#: The class of everything that the budgets do not name.
OTHER = ""


class ClassQueue:
    """In order of arrival among the classes that have tokens left in this step."""

    def __init__(self, budgets: Mapping[str, int], default: int) -> None:
        self._budgets = {**budgets, OTHER: default}
        self._queues = {name: KeyedQueue() for name in self._budgets}
        self._left = dict(self._budgets)
        self._numbers: dict[int, int] = {}
        self._count = 0
        self._class = OTHER

    def new_step(self) -> None:
        self._left = dict(self._budgets)

    def left(self, sequence: Sequence) -> int:
        return max(0, self._left[self._class_of(sequence)])

    def spend(self, sequence: Sequence, tokens: int) -> None:
        self._left[self._class_of(sequence)] -= tokens

    def push(self, sequence: Sequence, now_s: float) -> None:
        self._count += 1
        self._numbers[sequence.seq_id] = self._count
        self._queues[self._class_of(sequence)].push(sequence, now_s)

    def head(self, now_s: float) -> Sequence | None:
        heads = [
            (self._numbers[head.seq_id], name, head)
            for name, queue in self._queues.items()
            if self._left[name] > 0 and (head := queue.head(now_s)) is not None
        ]
        if not heads:
            return None
        _, self._class, first = min(heads, key=lambda each: each[0])
        return first

    def pop(self) -> tuple[Rank, Sequence]:
        _, sequence = self._queues[self._class].pop()
        return (0.0, self._numbers.pop(sequence.seq_id)), sequence

    def discard(self, sequence: Sequence) -> None:
        if self._numbers.pop(sequence.seq_id, None) is not None:
            self._queues[self._class_of(sequence)].discard(sequence)

    def __len__(self) -> int:
        return len(self._numbers)

    def _class_of(self, sequence: Sequence) -> str:
        category = sequence.request.category
        return category if category in self._budgets else OTHER


class ClassBudgetScheduler(IterationScheduler):
    """Chunked prefill in which one class's prompts cannot take the whole step.

    In every step the prompts of a class get at most its budget. Decodes come first and are not limited: they are
    one token each, and holding them back would only keep their KV longer. Nothing starves: budgets are at least one
    token and come back at every step, and within a class the order is that of arrival. Of those that run, the
    one that arrived last is preempted first. Where nothing can be split (`kv: none`) classes have no limit.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        swap: bool,
        watermark: float,
        budgets: Mapping[str, int],
        default: int,
    ) -> None:
        self._classes = ClassQueue(budgets, default)
        super().__init__(
            max_num_seqs, max_num_batched_tokens, True, swap=swap, waiting=self._classes, watermark=watermark
        )

    def schedule(self, space: KVSpace, now_s: float) -> Plan:
        self._classes.new_step()
        return super().schedule(space, now_s)

    def _chunk_limit(self, sequence: Sequence) -> int | None:
        return self._classes.left(sequence)

    def _planned(self, sequence: Sequence, new: int) -> None:
        self._classes.spend(sequence, new)
