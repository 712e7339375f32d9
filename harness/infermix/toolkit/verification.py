"""Draft and verify: what decoders share that propose tokens on the host and check them in one target forward.

The proposals are certain (a point mass), so rejection sampling reduces to: draw every row with the noise that one
step at a time would use, and keep drafts while they equal the draws. Acceptance has the probability that rejection
sampling gives (Leviathan et al., 2023, with q a point mass), and the tokens are those of plain decoding, also when
sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from infermix.roles.decoder import Emission, Forward, Runner, Sampler, Want
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan, Scheduled


class Proposer(Protocol):
    """Guesses the continuation of a sequence from what the host knows.

    Optional: `observe(sequence, draws, num_emitted)`, what the target said in a verification, before its tokens are
    appended: `draws[:num_emitted]` follow the text, those behind them were computed after a wrong draft.
    """

    def propose(self, sequence: Sequence, limit: int) -> Seq[int]:
        """At most `limit` (>= 1) token ids that may follow `sequence.tokens`."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended or starts over."""
        ...


@dataclass(slots=True)
class AcceptanceCounters:
    """Cumulative figures of drafting: verifications, drafts and acceptances, in all and by draft position.

    Of a tree, a position is a depth, drafted once however many drafts it has.

    With a clock also the seconds spent in `drafting`: those of the device only where that block ends by reading it.
    `verified` counts verifications by category, drafted positions, drafts beside them and accepted drafts: there are
    few kinds, and telling a step's apart costs one look-up per sequence.
    """

    clock_ns: Callable[[], int] | None = None
    drafting_ns: int = 0
    target_forwards: int = 0
    verified: dict[tuple[str, int, int, int], int] = field(default_factory=dict)

    def count(self, num_drafts: int, num_accepted: int, num_beside: int = 0, category: str = "") -> None:
        """One verification of `num_drafts` positions, with `num_beside` more drafts for some of them."""
        kind = (category, num_drafts, num_beside, num_accepted)
        self.verified[kind] = self.verified.get(kind, 0) + 1

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Time what is done inside as drafting."""
        started = self.clock_ns() if self.clock_ns else 0
        yield
        if self.clock_ns:
            self.drafting_ns += self.clock_ns() - started

    def as_counters(self) -> dict[str, float]:
        timed = {"draft_s": self.drafting_ns / 1e9} if self.clock_ns else {}
        categories = sorted({category for category, *_ in self.verified if category})
        by_category = {
            f"{name}[{category}]": count for category in categories for name, count in self._totals(category).items()
        }
        totals = {**self._totals(), "target_forwards": self.target_forwards}
        return {
            name: float(count) for name, count in {**totals, **self._by_position(), **by_category, **timed}.items()
        }

    def _totals(self, category: str | None = None) -> dict[str, int]:
        """Of one category, or of all requests."""
        totals = dict.fromkeys(("verifications", "verified_tokens", "draft_tokens", "accepted_draft_tokens"), 0)
        for (own, drafts, beside, accepted_drafts), times in self.verified.items():
            if category is None or own == category:
                totals["verifications"] += times
                totals["verified_tokens"] += times * (accepted_drafts + 1)
                totals["draft_tokens"] += times * (drafts + beside)
                totals["accepted_draft_tokens"] += times * accepted_drafts
        return totals

    def _by_position(self) -> dict[str, int]:
        longest = max((drafts for _, drafts, _, _ in self.verified), default=0)
        counts = {
            f"{name}_at_{position}": 0 for name in ("drafted", "accepted") for position in range(1, longest + 1)
        }
        for (_, drafts, _, accepted_drafts), times in self.verified.items():
            for name, last in (("drafted", drafts), ("accepted", accepted_drafts)):
                for position in range(1, last + 1):
                    counts[f"{name}_at_{position}"] += times
        return counts


def room_for_drafts(sequence: Sequence, limit: int, max_model_len: int) -> int:
    """Drafts that can still be of use: the step emits one more token than it accepts."""
    most = sequence.max_tokens if sequence.max_tokens < max_model_len else max_model_len
    left = most - len(sequence.tokens) - sequence.num_inflight - 1
    return limit if limit < left else max(0, left)


@dataclass(slots=True)
class Drafted:
    """A plan entry with its drafts; the first `num_real` are proposals, the rest fill up to a captured length."""

    entry: Scheduled
    num_real: int

    @property
    def drafts(self) -> tuple[int, ...]:
        return self.entry.draft_ids


def with_drafts(
    entry: Scheduled, drafts: Seq[int], runner: Runner, filled_to: int = 0, parents: Seq[int] = ()
) -> Drafted:
    """The entry with `drafts` behind its own tokens, none when the KV has no room; filled up to `filled_to`.

    With `parents` the drafts form a tree, and what fills up hangs on the last own token (in `parents`, too, where
    they are that many).
    """
    sequence, num_real = entry.sequence, len(drafts)
    wanted = max(num_real, filled_to)
    if not wanted or not runner.reserve(sequence, sequence.num_computed + entry.num_new_tokens + wanted):
        return Drafted(Scheduled(sequence, entry.num_new_tokens), 0)
    filled, tree = tuple(drafts), tuple(parents)
    if num_real < wanted:
        filled += (0,) * (wanted - num_real)
        if tree and len(tree) != wanted:
            tree = tree[:num_real] + (-1,) * (wanted - num_real)
    return Drafted(Scheduled(sequence, entry.num_new_tokens + wanted, filled, tree), num_real)


def completes(entry: Scheduled) -> bool:
    """Whether the step processes the last own token of the sequence, so that it emits."""
    sequence = entry.sequence
    known = len(sequence.tokens) + sequence.num_inflight
    return sequence.num_computed + entry.num_new_tokens - len(entry.draft_ids) == known


def all_decode(plan: Plan) -> bool:
    """Whether every sequence of a plan has one own token and emits."""
    return all(entry.num_new_tokens == 1 and completes(entry) for entry in plan.entries)


def in_forward_order(rows: Seq[Drafted], forward: Forward) -> list[Drafted]:
    """Those that have logits, in the order of their logits (a layout with fixed rows has an order of its own).

    Of a `draft_logits` forward: the rows of a sequence lie together, one more than it has drafts.
    """
    by_id = {row.entry.sequence.seq_id: row for row in rows}
    ordered, place, sequences = [], 0, forward.sequences
    while place < len(sequences):
        row = by_id[sequences[place].seq_id]
        ordered.append(row)
        place += len(row.entry.draft_ids) + 1
    return ordered


class RowPrefixes(Seq[tuple[int, ...]]):
    """For every row of a `draft_logits` forward, the drafts between the sequence's own token and the row.

    Penalties and masks alone want to know, so they are made when they are first looked at.
    """

    def __init__(self, rows: Seq[Drafted], of_row: Callable[[Drafted], Iterable[tuple[int, ...]]]) -> None:
        self._rows, self._of_row = rows, of_row

    def __len__(self) -> int:
        return sum(len(row.drafts) + 1 for row in self._rows)

    def __getitem__(self, index: Any) -> Any:
        return self._made[index]

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self._made)

    @cached_property
    def _made(self) -> list[tuple[int, ...]]:
        return [prefix for row in self._rows for prefix in self._of_row(row)]


def row_prefixes(rows: Seq[Drafted]) -> RowPrefixes:
    """Where drafts form one line each."""
    return RowPrefixes(rows, lambda row: [row.drafts[:count] for count in range(len(row.drafts) + 1)])


def host_ids(ids: Tensor) -> Seq[int]:
    """Sampled ids `[R]`, waited for. Numbers are made of those alone that are looked at; a slice copies nothing."""
    numbers: Any = ids.cpu().numpy()
    return memoryview(numbers)


def accepted(draws: Seq[int], drafts: Seq[int]) -> int:
    """How many leading drafts equal what was drawn in their place."""
    count = 0
    while count < len(drafts) and draws[count] == drafts[count]:
        count += 1
    return count


@dataclass(slots=True)
class Ticket:
    rows: list[Drafted]
    ids: Tensor
    sampler: Sampler


class VerifyingDecoder:
    """Runs a `Proposer` and verifies its drafts; lossless for greedy and sampled requests alike.

    Proposals need the tokens of the last step, so the engine does not run ahead. With `uniform`, a step in which
    every sequence has one own token is filled up to `num_draft_tokens`, so that it can be replayed from a graph.
    """

    reads_tokens = True

    def __init__(
        self,
        proposer: Proposer,
        num_draft_tokens: int,
        max_model_len: int,
        *,
        uniform: bool,
        clock_ns: Callable[[], int] | None = None,
    ) -> None:
        self._proposer, self._limit, self._max_model_len = proposer, num_draft_tokens, max_model_len
        self._uniform = uniform
        self._observe = getattr(proposer, "observe", None)
        self._counters = AcceptanceCounters(clock_ns)
        self.query_lens = (1, num_draft_tokens + 1)

    def launch(self, plan: Plan, runner: Runner, sampler: Sampler) -> Ticket:
        rows = self._rows(plan, runner)
        forward = runner.forward(Plan([row.entry for row in rows]), Want(draft_logits=True))
        self._counters.target_forwards += 1
        emitting = in_forward_order(rows, forward)
        return Ticket(emitting, _draws(forward, emitting, sampler), sampler)

    def collect(self, ticket: Ticket) -> list[Emission]:
        draws = host_ids(ticket.ids)
        emissions, first = [], 0
        for row in ticket.rows:
            last = first + len(row.entry.draft_ids) + 1
            emissions.append(self._emission(row, draws[first:last], ticket.sampler))
            first = last
        return emissions

    def counters(self) -> dict[str, float]:
        return self._counters.as_counters()

    def reset(self) -> None:
        self._counters = AcceptanceCounters(self._counters.clock_ns)

    def forget(self, sequence: Sequence) -> None:
        self._proposer.forget(sequence)

    def _rows(self, plan: Plan, runner: Runner) -> list[Drafted]:
        with self._counters.drafting():
            drafts = [self._drafts(entry) for entry in plan.entries]
        filled_to = self._limit if self._uniform and any(drafts) and all_decode(plan) else 0
        if filled_to and any(self._beyond(entry, filled_to) for entry in plan.entries):
            filled_to = 0
        return [
            with_drafts(entry, proposed, runner, filled_to)
            for entry, proposed in zip(plan.entries, drafts, strict=True)
        ]

    def _beyond(self, entry: Scheduled, filled_to: int) -> bool:
        return entry.sequence.num_computed + entry.num_new_tokens + filled_to > self._max_model_len

    def _drafts(self, entry: Scheduled) -> Seq[int]:
        if not completes(entry):
            return ()
        limit = room_for_drafts(entry.sequence, self._limit, self._max_model_len)
        return self._proposer.propose(entry.sequence, limit) if limit else ()

    def _emission(self, row: Drafted, draws: Seq[int], sampler: Sampler) -> Emission:
        sequence, count = row.entry.sequence, self._num_accepted(row, draws)
        tokens = tuple(draws[: count + 1])
        self._counters.count(row.num_real, count, 0, sequence.request.category)
        if self._observe is not None:
            self._observe(sequence, draws, count + 1)
        sampler.accept(sequence, tokens)
        return Emission(sequence, tokens, len(row.entry.draft_ids))

    def _num_accepted(self, row: Drafted, draws: Seq[int]) -> int:
        return accepted(draws, row.entry.draft_ids[: row.num_real])


def _draws(forward: Forward, rows: Seq[Drafted], sampler: Sampler) -> Tensor:
    if not forward.sequences:
        return torch.empty(0, dtype=torch.int64)
    return sampler.sample_rows(forward, row_prefixes(rows))
