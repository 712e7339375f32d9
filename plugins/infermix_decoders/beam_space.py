"""The KV of a search: every sequence has several rows, which fork and fall away at each step. No torch."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infermix.roles.kv_space import KVShape, KVSpace, KVUsage

#: Parent and child of a row that begins with what the parent has computed.
Fork = tuple[int, int]

#: Shortcuts past `reserve`, which would see one row of a sequence only.
_OF_ONE_ROW = ("reserve_next", "steps_for")


class BeamSpace:
    """A `KVSpace` in which one sequence stands for `width` rows: a scheduler lets in, grows and preempts all at once.

    The first row has the sequence's own id. Rows appear with `arrange`; before that, room for all of them is promised
    to the sequence, so that a scheduler which reserves the worst case ahead keeps its word. What a layout offers
    besides goes through; only the prompt is published in a prefix cache, since rows differ behind it.
    """

    def __init__(self, space: KVSpace, shape: KVShape, width: int) -> None:
        self._space, self._block_size, self._width = space, shape.block_size, width
        self._rows: dict[int, tuple[int, ...]] = {}
        self._lengths: dict[int, int] = {}
        self._prompts: dict[int, int] = {}
        self._forks: dict[int, list[Fork]] = {}
        self._copies: dict[int, list[tuple[int, int]]] = {}
        self._promised: dict[int, int] = {}
        #: Tokens that a sequence without rows holds itself.
        self._own: dict[int, int] = {}
        if hasattr(space, "match"):
            self.match = self._match
        if hasattr(space, "register"):
            self.register = self._register

    def __getattr__(self, name: str) -> Any:
        if name in _OF_ONE_ROW:
            raise AttributeError(name)
        return getattr(self._space, name)

    def begin(self, seq_id: int, num_prompt_tokens: int) -> None:
        """The prompt is computed; from now on the sequence has rows."""
        self._promised.pop(seq_id, None)
        self._own.pop(seq_id, None)
        self._prompts[seq_id] = num_prompt_tokens
        self._rows[seq_id] = (seq_id,)

    def arrange(
        self, seq_id: int, rows: tuple[int, ...], forks: list[Fork], num_tokens: int, gone: Seq[int] = ()
    ) -> None:
        """From the next step on the sequence has `rows`, of which `forks` begin with `num_tokens` of their parents.

        Rows that are `gone` give their KV back, also where they come again as forks; those are made when the next
        step reserves its room.
        """
        for row in gone:
            self._space.release(row)
        self._rows[seq_id], self._lengths[seq_id] = rows, num_tokens
        if forks:
            self._forks[seq_id] = forks

    def take_row_copies(self, seq_id: int) -> list[tuple[int, int]]:
        """Block copies that forks of this sequence need before the next forward."""
        return self._copies.pop(seq_id, [])

    def reserve(self, seq_id: int, num_tokens: int) -> bool:
        rows = self._rows.get(seq_id)
        if rows is None:
            return self._reserve_prompt(seq_id, num_tokens)
        if not self._fork(seq_id):
            return False
        for done, row in enumerate(rows):
            if not self._space.reserve(row, num_tokens):
                for other in rows[:done]:
                    self._space.truncate(other, self._lengths[seq_id])
                return False
        return True

    def release(self, seq_id: int) -> None:
        pending = {child for _, child in self._forks.pop(seq_id, ())}
        for row in self._rows.pop(seq_id, (seq_id,)):
            if row not in pending:
                self._space.release(row)
        for known in (self._lengths, self._prompts, self._copies, self._promised, self._own):
            known.pop(seq_id, None)

    def fits(self, num_tokens: int) -> bool:
        """Whether all rows of one sequence fit, at the worst without a block in common."""
        whole = self._width * self._whole_blocks(num_tokens)
        return self._space.fits(num_tokens) and whole <= self._space.usage().capacity_tokens

    def usage(self) -> KVUsage:
        """Rows of a sequence are no sequences to whoever counts: what they reserved is not told."""
        return replace(self._space.usage(), reserved_tokens=None)

    def _reserve_prompt(self, seq_id: int, num_tokens: int) -> bool:
        """Room for the first row now, and for the others later, none of which others were promised."""
        whole = self._whole_blocks(num_tokens)
        extra, before = (self._width - 1) * whole, self._promised.get(seq_id, 0)
        if extra > before:
            usage = self._space.usage()
            free = usage.capacity_tokens - usage.allocated_tokens - sum(self._promised.values()) + before
            if free < extra + whole - self._whole_blocks(self._own.get(seq_id, 0)):
                return False
        if not self._space.reserve(seq_id, num_tokens):
            return False
        self._promised[seq_id] = max(extra, before)
        self._own[seq_id] = max(num_tokens, self._own.get(seq_id, 0))
        return True

    def _match(self, seq_id: int, token_ids: Seq[int], max_tokens: int, salt: str = "") -> int:
        found: int = self._space.match(seq_id, token_ids, max_tokens, salt)  # type: ignore[attr-defined]
        self._own[seq_id] = found
        return found

    def _fork(self, seq_id: int) -> bool:
        forks, length = self._forks.get(seq_id, []), self._lengths.get(seq_id)
        while forks:
            parent, child = forks[0]
            pairs = self._space.fork(parent, child, length)
            if pairs is None:
                return False
            self._copies.setdefault(seq_id, []).extend(pairs)
            del forks[0]
        return True

    def _register(
        self, seq_id: int, token_ids: Seq[int], num_computed: int, salt: str = "", last: bool = False
    ) -> None:
        known = min(num_computed, self._prompts.get(seq_id, num_computed))
        self._space.register(seq_id, token_ids, known, salt, last)  # type: ignore[attr-defined]

    def _whole_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size) * self._block_size
