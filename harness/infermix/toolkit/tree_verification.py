"""Draft trees: several guesses per position, verified in one forward under a tree mask.

Every node's row is drawn with the noise that plain decoding would use at its position, given its own branch. From the
last own token the draws are followed down the tree as long as one of the guesses is what was drawn. So greedy and
sampled requests get the very tokens of plain decoding, as with one line of certain drafts (`toolkit.verification`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from infermix.roles.batch import MAX_TREE_TOKENS
from infermix.roles.decoder import Emission, Forward, Runner, Sampler, Want
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit.verification import (
    AcceptanceCounters,
    Drafted,
    RowPrefixes,
    all_decode,
    completes,
    host_ids,
    in_forward_order,
    room_for_drafts,
    with_drafts,
)


class DraftTree(NamedTuple):
    """Guesses; `parents[i]` is the guess that guess i follows, an earlier one, or -1 for the text as it is."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    def depths(self) -> list[int]:
        """Of each guess, from 1."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        return depths

    def first(self, count: int) -> DraftTree:
        """A tree of its first guesses."""
        if count >= len(self.tokens):
            return self
        return DraftTree(self.tokens[:count], self.parents[:count])

    def within(self, depth: int) -> DraftTree:
        """Without the guesses that are deeper."""
        depths = self.depths()
        if max(depths, default=0) <= depth:
            return self
        kept = [index for index, own in enumerate(depths) if own <= depth]
        place = {-1: -1, **{old: new for new, old in enumerate(kept)}}
        return DraftTree(
            tuple(self.tokens[index] for index in kept), tuple(place[self.parents[index]] for index in kept)
        )

    def branch(self, index: int) -> tuple[int, ...]:
        """The tokens from the first guess of its branch down to guess `index`; none for -1."""
        tokens: list[int] = []
        while index >= 0:
            tokens.append(self.tokens[index])
            index = self.parents[index]
        return tuple(reversed(tokens))


@dataclass(slots=True)
class Verified:
    """What became of a sequence in a step: its new tokens (none inside a prompt) and the accepted guesses, in order.

    `draws[0]` is the target's token behind the last own one, `draws[i + 1]` the one behind guess i, right or wrong.
    `entry` is as it was launched, drafts included, from position `start` on; its sequence does not hold `token_ids`
    yet.
    """

    entry: Scheduled
    token_ids: tuple[int, ...] = ()
    path: tuple[int, ...] = ()
    draws: Seq[int] = ()
    start: int = 0

    def rows(self, forward: Forward) -> list[int]:
        """Where the hidden states of its own tokens and of the accepted guesses lie, in order."""
        assert forward.first_rows is not None
        first, own = forward.first_rows[self.entry.sequence.seq_id], self.entry.num_own_tokens
        rows = list(range(first, first + own))
        if self.path:
            rows += [first + own + node for node in self.path]
        return rows

    def last_row(self, forward: Forward) -> int:
        """The one of `rows` that the newest token was read from."""
        assert forward.first_rows is not None
        behind = self.path[-1] if self.path else -1
        return forward.first_rows[self.entry.sequence.seq_id] + self.entry.num_own_tokens + behind


class TreeDrafter(Protocol):
    """Guesses trees for several sequences at once.

    `num_nodes` is the most that a tree has. With `reads_hidden` forwards bring hidden states. Optional: `by_level`,
    whether no guess of its trees is deeper than one behind it, so that the last one tells how deep a tree is.
    """

    num_nodes: int
    reads_hidden: bool

    def propose(self, sequences: Seq[Sequence], depths: Seq[int]) -> Seq[DraftTree]:
        """A tree of at most that depth (>= 1) behind the tokens of each sequence; empty where nothing is known."""
        ...

    def observe(self, verified: Seq[Verified], forward: Forward) -> None:
        """What the target made of a step, before its tokens are appended; also of steps without any guesses."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended or starts over."""
        ...


#: How draws become a path: row i of `draws` belongs to node i - 1, row 0 to the last own token.
Accept = Callable[[DraftTree, Seq[int]], tuple[int, ...]]


def last_child(tokens: Seq[int], parents: Seq[int], node: int, token: int) -> int:
    """Of the guesses behind guess `node` (-1: the text) the last that is `token`; -1 where none is.

    Most often none is, which a look at the tokens alone tells. A guess has few children, while a text in a loop has
    one token everywhere: so parents are searched then, not tokens.
    """
    if token not in tokens:
        return -1
    found, index = -1, node
    try:
        while True:
            index = parents.index(node, index + 1)
            if tokens[index] == token:
                found = index
    except ValueError:
        return found


def equal_draws(tree: DraftTree, draws: Seq[int]) -> tuple[int, ...]:
    """The guesses, in order, that are what was drawn in their place."""
    path: list[int] = []
    node = -1
    while (node := last_child(tree.tokens, tree.parents, node, draws[node + 1])) >= 0:
        path.append(node)
    return tuple(path)


@dataclass(slots=True)
class TreeTicket:
    rows: list[Drafted]
    emitting: list[Drafted]
    starts: dict[int, int]
    ids: Tensor
    forward: Forward
    sampler: Sampler
    judged: list[float]
    #: By the identity of parents, which the rows keep, and how many of them are guesses.
    depths: dict[tuple[int, int], int] = field(default_factory=dict)


class TreeDecoder:
    """Runs a `TreeDrafter` and verifies its trees; lossless.

    With `uniform`, a step in which every sequence has one own token is filled up to `num_nodes`, so that it can be
    replayed from a graph.
    """

    reads_tokens = True
    draft_trees = True

    def __init__(
        self,
        drafter: TreeDrafter,
        max_depth: int,
        max_model_len: int,
        *,
        uniform: bool,
        clock_ns: Callable[[], int] | None = None,
    ) -> None:
        assert drafter.num_nodes < MAX_TREE_TOKENS, "the last own token needs a bit of the tree mask, too"
        self._drafter, self._max_depth, self._max_model_len = drafter, max_depth, max_model_len
        self._uniform = uniform
        self._counters = AcceptanceCounters(clock_ns)
        self.details: dict[str, Any] = {}
        self.reads_hidden = drafter.reads_hidden
        self.query_lens = (1, drafter.num_nodes + 1)
        # Trees of many drafters have few shapes; where they have many, a look at the last guess may do.
        by_level = getattr(drafter, "by_level", False)
        self._depth_of: Callable[[tuple[int, ...]], int]
        self._depth_of = depth_of_last if by_level else lru_cache(maxsize=1024)(depth_of)

    def launch(self, plan: Plan, runner: Runner, sampler: Sampler) -> TreeTicket:
        rows = self._rows(plan, runner)
        want = Want(draft_logits=True, hidden=self.reads_hidden)
        forward = runner.forward(Plan([row.entry for row in rows]), want)
        self._counters.target_forwards += 1
        emitting = in_forward_order(rows, forward)
        starts = {row.entry.sequence.seq_id: row.entry.sequence.num_computed for row in rows}
        draws = self._draws(forward, emitting, sampler)
        judged = self._judge(forward, emitting, sampler) if emitting else []
        return TreeTicket(rows, emitting, starts, draws, forward, sampler, judged)

    def collect(self, ticket: TreeTicket) -> list[Emission]:
        draws = host_ids(ticket.ids)
        verified: dict[int, Verified] = {}
        first = 0
        for row in ticket.emitting:
            last = first + len(row.entry.draft_ids) + 1
            own = slice(first, last)
            verified[row.entry.sequence.seq_id] = self._verify(row, draws[own], own, ticket)
            first = last
        with self._counters.drafting():
            every = list(verified.values())
            if len(every) < len(ticket.rows):
                every += [self._unfinished(row, ticket) for row in ticket.rows
                          if row.entry.sequence.seq_id not in verified]  # fmt: skip
            self._drafter.observe(every, ticket.forward)
        return [
            Emission(each.entry.sequence, each.token_ids, len(each.entry.draft_ids), each.path)
            for each in verified.values()
        ]

    def counters(self) -> dict[str, float]:
        return self._counters.as_counters()

    def reset(self) -> None:
        self._counters = AcceptanceCounters(self._counters.clock_ns)

    def forget(self, sequence: Sequence) -> None:
        self._drafter.forget(sequence)

    def _draws(self, forward: Forward, emitting: Seq[Drafted], sampler: Sampler) -> Tensor:
        if not emitting:
            return torch.empty(0, dtype=torch.int64)
        return sampler.sample_rows(forward, branch_prefixes(emitting))

    def _judge(self, forward: Forward, emitting: Seq[Drafted], sampler: Sampler) -> list[float]:
        """A number per row for acceptance rules that need more than the draws; this one does not."""
        return []

    @staticmethod
    def _unfinished(row: Drafted, ticket: TreeTicket) -> Verified:
        return Verified(row.entry, start=ticket.starts[row.entry.sequence.seq_id])

    def _path(self, row: Drafted, draws: Seq[int], span: slice, ticket: TreeTicket) -> tuple[int, ...]:
        """Which guesses stay; `span` are the row's rows among those of the forward."""
        if draws[0] not in row.entry.draft_ids:
            return ()  # the usual case, told without a look at the tree
        return equal_draws(tree_of(row).first(row.num_real), draws)

    def _verify(self, row: Drafted, draws: Seq[int], span: slice, ticket: TreeTicket) -> Verified:
        entry, num_real = row.entry, row.num_real
        sequence, path = entry.sequence, self._path(row, draws, span, ticket)
        tokens = (*[entry.draft_ids[node] for node in path], draws[path[-1] + 1]) if path else (draws[0],)
        depth = self._depth(entry.draft_parents, num_real, ticket.depths)
        self._counters.count(depth, len(path), num_real - depth, sequence.request.category)
        ticket.sampler.accept(sequence, tokens)
        return Verified(entry, tokens, path, draws, ticket.starts[sequence.seq_id])

    def _depth(self, parents: tuple[int, ...], num_real: int, known: dict[tuple[int, int], int]) -> int:
        """Of the first guesses; `known` of shapes that rows of one step share, which saves comparing them."""
        depth = known.get((id(parents), num_real))
        if depth is None:
            depth = known[id(parents), num_real] = self._depth_of(parents[:num_real])
        return depth

    def _rows(self, plan: Plan, runner: Runner) -> list[Drafted]:
        with self._counters.drafting():
            trees = self._trees(plan)
        filled_to = self._filled_to(plan, trees)
        none = DraftTree((), (-1,) * filled_to)
        shapes: dict[int, tuple[int, ...]] = {}
        rows = []
        for entry in plan.entries:
            tokens, parents = trees.get(entry.sequence.seq_id, none)
            if filled_to:  # most trees of a step have one and the same shape
                filled = shapes.get(id(parents))
                if filled is None:
                    filled = shapes[id(parents)] = parents + (-1,) * (filled_to - len(parents))
                parents = filled
            rows.append(with_drafts(entry, tokens, runner, filled_to, parents))
        return rows

    def _filled_to(self, plan: Plan, trees: dict[int, DraftTree]) -> int:
        if not self._uniform or not trees:
            return 0
        if len(trees) < len(plan.entries) and not all_decode(plan):  # who has a tree has one own token
            return 0
        most = max([entry.sequence.num_computed + entry.num_new_tokens for entry in plan.entries])
        return self._drafter.num_nodes if most + self._drafter.num_nodes <= self._max_model_len else 0

    def _trees(self, plan: Plan) -> dict[int, DraftTree]:
        """Those that are not empty, by sequence. Only behind a single own token: prompts get none."""
        wanted, depths = [], []
        for entry in plan.entries:
            if entry.num_new_tokens == 1 and completes(entry):
                depth = room_for_drafts(entry.sequence, self._max_depth, self._max_model_len)
                if depth:
                    wanted.append(entry)
                    depths.append(depth)
        if not wanted:
            return {}
        trees = self._drafter.propose([entry.sequence for entry in wanted], depths)
        if min(map(self._room, wanted)) >= self._drafter.num_nodes:
            return {entry.sequence.seq_id: tree for entry, tree in zip(wanted, trees, strict=True) if tree.tokens}
        return {
            entry.sequence.seq_id: tree.first(self._room(entry))
            for entry, tree in zip(wanted, trees, strict=True)
            if tree.tokens
        }

    def _room(self, entry: Scheduled) -> int:
        """Slots behind the entry's own tokens."""
        return self._max_model_len - entry.sequence.num_computed - entry.num_new_tokens


def depth_of(parents: Seq[int]) -> int:
    """Of the longest branch; 0 without guesses."""
    return max(DraftTree((), tuple(parents)).depths(), default=0)


def depth_of_last(parents: Seq[int]) -> int:
    """Of the last guess; 0 without guesses."""
    depth, node = 0, len(parents) - 1
    while node >= 0:
        depth, node = depth + 1, parents[node]
    return depth


def branch_prefixes(rows: Seq[Drafted]) -> RowPrefixes:
    """`toolkit.verification.row_prefixes` where drafts form trees."""
    return RowPrefixes(rows, lambda row: map(tree_of(row).branch, range(-1, len(row.drafts))))


def tree_of(row: Drafted) -> DraftTree:
    """The tree of a row, what fills it up included."""
    return DraftTree(row.drafts, row.entry.draft_parents)
