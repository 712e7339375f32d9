"""Beam search: each sequence keeps several rows, which share the KV of what they have in common."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, cast

from infermix.errors import UserError
from infermix.roles.decoder import Emission, Forward, Runner, Sampler
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit.sampling import stop_tokens
from infermix.toolkit.verification import completes
from torch import Tensor

from infermix_decoders.beam_ranking import Best, Ranking, column_on_host, rank, rated
from infermix_decoders.beam_search import BeamSearch
from infermix_decoders.beam_space import BeamSpace, Fork
from infermix_decoders.lane_rows import lists_to_device, to_device

if TYPE_CHECKING:
    from infermix.roles.kv_space import KVShape, KVSpace

    from infermix_decoders.options import BeamOptions


@dataclass(slots=True)
class Group:
    """One request: row i holds beam i, whose text is its tokens; no beam uses the `spare` rows now.

    A row is its entry in every step: each gives it one token.
    """

    sequence: Sequence
    search: BeamSearch
    rows: list[Scheduled]
    spare: list[Scheduled]

    def output(self, beam: int) -> list[int]:
        return self.rows[beam].sequence.tokens[self.sequence.num_prompt_tokens :]


@dataclass(slots=True)
class Ranked:
    """Groups whose rows were ranked together, and their best continuations."""

    groups: list[Group]
    best: Best


class BeamDecoder:
    """Emits the best outputs of a request at its end. Greedy by nature: a request with a temperature is refused."""

    reads_tokens = True
    returns_outputs = True
    uses_sampler = False

    def __init__(self, options: BeamOptions, eos_token_ids: tuple[int, ...], ranking: Ranking) -> None:
        self._options, self._eos_token_ids, self._ranking = options, eos_token_ids, ranking
        self.details: dict[str, Any] = {}
        self._groups: dict[int, Group] = {}
        self._space: BeamSpace | None = None
        self._replayed = self._launched = 0

    def counters(self) -> dict[str, float]:
        """How often groups that are alike were ranked by a replay, and operator by operator."""
        return {"rankings_replayed": float(self._replayed), "rankings_launched": float(self._launched)}

    def wrap_space(self, space: KVSpace, shape: KVShape) -> Any:
        self._space = BeamSpace(space, shape, self._options.num_beams)
        return self._space

    def launch(self, plan: Plan, runner: Runner, sampler: Sampler) -> list[Ranked]:
        assert self._space is not None, "the engine wraps the space before the first step"
        entries: list[Scheduled] = []
        groups: list[Group] = []
        copies: list[tuple[int, int]] = []
        for entry in plan.entries:
            group = self._groups.get(entry.sequence.seq_id)
            if group is None and completes(entry):
                group = self._begin(entry.sequence)
            elif group is not None:
                copies += self._space.take_row_copies(entry.sequence.seq_id)
            if group is None or not group.search.length:
                entries.append(entry)
            else:
                entries += group.rows
            groups += [group] if group is not None else []
        runner.copy(copies)
        return self._candidates(groups, runner.forward(Plan(entries)))

    def collect(self, ticket: list[Ranked]) -> list[Emission]:
        assert self._space is not None
        emissions = []
        num_beams = self._options.num_beams
        for ranked in ticket:
            best = ranked.best
            for index, (scores, beams, tokens) in enumerate(best.read(num_beams)):
                group = ranked.groups[index]
                if not group.search.length:
                    self._space.begin(group.sequence.seq_id, group.sequence.num_prompt_tokens)
                if not group.search.goes_on(scores, tokens):
                    beams, tokens = group.search.advance(*best.all_of(index), group.output)
                    if group.search.done:
                        emissions.append(_emission(group))
                        continue
                self._go_on(group, beams, tokens)
        return emissions

    def reset(self) -> None:
        self._replayed = self._launched = 0
        self._groups.clear()

    def forget(self, sequence: Sequence) -> None:
        """A preempted search starts over from its prompt: nothing of it was emitted."""
        self._groups.pop(sequence.seq_id, None)
        sequence.num_inflight = 0

    def _begin(self, sequence: Sequence) -> Group:
        sampling, options = sequence.request.sampling, self._options
        _refuse_misfit(sequence, options.num_beams)
        search = BeamSearch(
            options.num_beams,
            max_new_tokens=sampling.max_new_tokens,
            stops=stop_tokens(sampling, self._eos_token_ids),
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
        )
        first = -1 - sequence.seq_id * options.num_beams
        ids = (sequence.seq_id, *(first - index for index in range(1, options.num_beams)))
        # An array: where texts fork, a copy of a list would touch every number of it.
        num_prompt, text = sequence.num_prompt_tokens, cast("list[int]", array("q", sequence.tokens))
        rows = [
            Scheduled(Sequence(seq_id, sequence.request, text, num_prompt, lane=sequence.lane), 1) for seq_id in ids
        ]
        group = self._groups[sequence.seq_id] = Group(sequence, search, rows[:1], rows[1:])
        return group

    def _candidates(self, groups: list[Group], forward: Forward) -> list[Ranked]:
        """Groups with as many rows that want as many continuations are looked at together: few launches a step."""
        alike: dict[tuple[int, int], list[Group]] = {}
        for group in groups:
            alike.setdefault((len(group.rows), group.search.num_candidates), []).append(group)
        found = list[Ranked]()
        replayed = False  # once a step: another replay would write where the first one's result lies
        for (num_rows, count), own in alike.items():
            logits, before = _rows_of(own, forward), [score for group in own for score in group.search.scores]
            early = self._too_early(own)
            if not (early or replayed) and self._ranking.replays(logits, len(own), num_rows, count):
                best, replayed = self._ranking.replay(logits, before, len(own), count), True
            else:
                best = _launch(logits, before, early, len(own), count)
            found.append(Ranked(own, best))
        self._replayed += replayed
        self._launched += len(found) - replayed
        return found

    def _too_early(self, groups: list[Group]) -> list[tuple[int, int]]:
        """(row, token) of stop tokens that come too early, of all rows of `groups`."""
        found = list[tuple[int, int]]()
        first = 0
        for group in groups:
            if group.search.length < (sampling := group.sequence.request.sampling).min_new_tokens:
                rows = range(first, first + len(group.rows))
                found += product(rows, stop_tokens(sampling, self._eos_token_ids))
            first += len(group.rows)
        return found

    def _go_on(self, group: Group, parents: list[int], tokens: list[int]) -> None:
        """The beams of the next step: a row goes on with its first continuation, others fork from it."""
        assert self._space is not None
        gone = _set_free(group, parents)
        forks = _continue(group, parents, tokens)
        sequence = group.sequence
        rows = tuple([row.sequence.seq_id for row in group.rows])
        length = sequence.num_prompt_tokens + group.search.length - 1
        self._space.arrange(sequence.seq_id, rows, forks, length, gone)


def _launch(logits: Tensor, before: list[float], early: list[tuple[int, int]], num_groups: int, count: int) -> Best:
    """Rank without a graph; tokens that come too `early` get no probability."""
    own = rated(logits)
    if early:
        own[tuple(lists_to_device(own.device, *zip(*early, strict=True)))] = float("-inf")
    scores = column_on_host(before, own.device).to(own.device, non_blocking=True)
    return Best(num_groups, rank(own, scores, num_groups, count)[0], min(count, own.shape[-1]), lambda scores: None)


def _rows_of(groups: list[Group], forward: Forward) -> Tensor:
    """The logits of all rows of `groups`, in their order; most often that is the order in which they are."""
    rows = [row.sequence for group in groups for row in group.rows]
    if rows == forward.sequences:
        return forward.logits
    place = {sequence.seq_id: index for index, sequence in enumerate(forward.sequences)}
    return forward.logits.index_select(0, to_device([place[row.seq_id] for row in rows], forward.logits.device))


def _set_free(group: Group, parents: list[int]) -> list[int]:
    """The ids of rows that no beam goes on from; they become spare ones."""
    used = set(parents)
    if len(used) == len(group.rows):
        return []
    free = [row for beam, row in enumerate(group.rows) if beam not in used]
    group.spare += free
    return [row.sequence.seq_id for row in free]


def _continue(group: Group, parents: list[int], tokens: list[int]) -> list[Fork]:
    """Put every new beam into its row: the first continuation of a beam stays in that beam's, others take spare ones.

    The text that goes on stays the same list, and grows: copies of all that is known would be most of the work.
    """
    before, rows, forks = group.rows, list[Scheduled](), list[Fork]()
    size = len(before[parents[0]].sequence.tokens)
    for parent, token in zip(parents, tokens, strict=True):
        row = before[parent]
        sequence = row.sequence
        text = sequence.tokens
        if len(text) > size:
            row = group.spare.pop()
            forks.append((sequence.seq_id, row.sequence.seq_id))
            sequence = row.sequence
            sequence.tokens = text = text[:size]
        text.append(token)
        sequence.num_computed = size
        rows.append(row)
    group.rows = rows
    return forks


def _emission(group: Group) -> Emission:
    count = group.sequence.request.sampling.num_outputs
    best, *others = [each.tokens for each in group.search.finished[:count]]
    return Emission(group.sequence, best, alternatives=tuple(others))


def _refuse_misfit(sequence: Sequence, num_beams: int) -> None:
    request, sampling = sequence.request, sequence.request.sampling
    wrong = ""
    if sampling.num_outputs > num_beams:
        wrong = f"wants {sampling.num_outputs} outputs of {num_beams} beams: raise parts.decoder.num_beams"
    elif sampling.temperature > 0:
        wrong = f"has temperature {sampling.temperature:g}, but beam search draws nothing: set it to 0"
    elif sampling.stop:
        wrong = "has stop texts, but beam search knows stop tokens only: use stop_token_ids"
    elif sampling.repetition_penalty != 1:
        wrong = (
            f"has repetition_penalty {sampling.repetition_penalty:g}, which beam search does not apply: set it to 1"
        )
    if wrong:
        raise UserError(f"request {request.request_id!r} {wrong}", key="workload")
