"""Draft and verify: what decoders share that propose tokens on the host and check them in one target forward.

The proposals are certain (a point mass), so rejection sampling reduces to: draw every row with the noise that one
step at a time would use, and keep drafts while they equal the draws. Acceptance has the probability that rejection
sampling gives (Leviathan et al., 2023, with q a point mass), and the tokens are those of plain decoding, also when
sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

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
    """

    clock_ns: Callable[[], int] | None = None
    drafting_ns: int = 0
    verifications: int = 0
    target_forwards: int = 0
    emitted: int = 0
    beside: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    #: Verifications, tokens emitted, drafts and accepted drafts of requests that have a category.
    by_category: dict[str, list[int]] = field(default_factory=dict)

    def count(self, num_drafts: int, num_accepted: int, num_beside: int = 0, category: str = "") -> None:
        """One verification of `num_drafts` positions, with `num_beside` more drafts for some of them."""
        self.verifications += 1
        if category:
            counted = (1, num_accepted + 1, num_drafts + num_beside, num_accepted)
            known = self.by_category.get(category, (0,) * len(counted))
            self.by_category[category] = [a + b for a, b in zip(known, counted, strict=True)]
        self.beside += num_beside
        self.emitted += num_accepted + 1
        missing = num_drafts - len(self.drafted_at)
        if missing > 0:
            self.drafted_at += [0] * missing
            self.accepted_at += [0] * missing
        for position in range(num_drafts):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < num_accepted

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Time what is done inside as drafting."""
        started = self.clock_ns() if self.clock_ns else 0
        yield
        if self.clock_ns:
            self.drafting_ns += self.clock_ns() - started

    def as_counters(self) -> dict[str, float]:
        timed = {"draft_s": self.drafting_ns / 1e9} if self.clock_ns else {}
        totals = {
            "verifications": self.verifications,
            "target_forwards": self.target_forwards,
            "verified_tokens": self.emitted,
            "draft_tokens": sum(self.drafted_at) + self.beside,
            "accepted_draft_tokens": sum(self.accepted_at),
        }
        by_position = {
            f"{name}_at_{position}": count
            for name, counts in (("drafted", self.drafted_at), ("accepted", self.accepted_at))
            for position, count in enumerate(counts, 1)
        }
        names = ("verifications", "verified_tokens", "draft_tokens", "accepted_draft_tokens")
        by_category = {
            f"{name}[{category}]": count
            for category, counts in self.by_category.items()
            for name, count in zip(names, counts, strict=True)
        }
        return {name: float(count) for name, count in {**totals, **by_position, **by_category, **timed}.items()}


def room_for_drafts(sequence: Sequence, limit: int, max_model_len: int) -> int:
    """Drafts that can still be of use: the step emits one more token than it accepts."""
    left = sequence.request.sampling.max_new_tokens - sequence.num_output_tokens - 1
    return max(0, min(limit, left, max_model_len - sequence.num_tokens - 1))


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

    With `parents` the drafts form a tree, and what fills up hangs on the last own token.
    """
    sequence = entry.sequence
    end = sequence.num_computed + entry.num_new_tokens
    wanted = max(len(drafts), filled_to)
    if wanted and not runner.reserve(sequence, end + wanted):
        wanted = 0
    kept = tuple(drafts[:wanted])
    filled = kept + (0,) * (wanted - len(kept))
    tree = (*parents[: len(kept)], *[-1] * (wanted - len(kept))) if parents else ()
    return Drafted(Scheduled(sequence, entry.num_new_tokens + wanted, filled, tree), len(kept))


def completes(entry: Scheduled) -> bool:
    """Whether the step processes the last own token of the sequence, so that it emits."""
    return entry.num_own_tokens == entry.sequence.num_uncomputed


def in_forward_order(rows: Seq[Drafted], forward: Forward) -> list[Drafted]:
    """Those that have logits, in the order of their logits (a layout with fixed rows has an order of its own)."""
    by_id = {row.entry.sequence.seq_id: row for row in rows}
    return [by_id[seq_id] for seq_id in dict.fromkeys(seq.seq_id for seq in forward.sequences)]


def row_prefixes(rows: Seq[Drafted]) -> list[tuple[int, ...]]:
    """For every row of a `draft_logits` forward, the drafts between the sequence's own token and the row."""
    return [row.drafts[:count] for row in rows for count in range(len(row.drafts) + 1)]


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
        draws = ticket.ids.tolist()
        emissions, first = [], 0
        for row in ticket.rows:
            own = draws[first : first + len(row.drafts) + 1]
            emissions.append(self._emission(row, own, ticket.sampler))
            first += len(own)
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
        decoding = all(entry.num_new_tokens == 1 and completes(entry) for entry in plan.entries)
        filled_to = self._limit if self._uniform and decoding and any(drafts) else 0
        if any(self._beyond(entry, filled_to) for entry in plan.entries):
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

    def _emission(self, row: Drafted, draws: list[int], sampler: Sampler) -> Emission:
        count = self._num_accepted(row, draws)
        tokens = tuple(draws[: count + 1])
        self._counters.count(row.num_real, count, category=row.entry.sequence.request.category)
        if self._observe is not None:
            self._observe(row.entry.sequence, draws, len(tokens))
        sampler.accept(row.entry.sequence, tokens)
        return Emission(row.entry.sequence, tokens, len(row.drafts))

    def _num_accepted(self, row: Drafted, draws: list[int]) -> int:
        return accepted(draws, row.drafts[: row.num_real])


def _draws(forward: Forward, rows: Seq[Drafted], sampler: Sampler) -> Tensor:
    if not forward.sequences:
        return torch.empty(0, dtype=torch.int64)
    return sampler.sample_rows(forward, row_prefixes(rows))
