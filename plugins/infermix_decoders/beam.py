"""Beam search: each sequence keeps several rows, which share the KV of what they have in common."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from infermix.errors import UserError
from infermix.roles.decoder import Emission, Forward, Runner, Sampler
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit.sampling import stop_tokens
from infermix.toolkit.verification import completes
from torch import Tensor

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
class Best:
    """The best continuations of groups that are alike, best first: `found [3, G, k]` int64 on the device.

    They are the place among the `width` best ones of each row, row after row; the token; and the bits of the score
    in float64. One tensor, since every read waits for the device.
    """

    groups: list[Group]
    found: Tensor
    width: int

    def rows(self) -> Iterator[tuple[Group, list[float], list[int], list[int]]]:
        """Scores, beams and tokens of each group, waited for."""
        places, tokens, scores = self.found.cpu().numpy()
        columns = scores.view(np.float64), places // self.width, tokens
        return zip(self.groups, *(column.tolist() for column in columns), strict=True)


class BeamDecoder:
    """Emits the best outputs of a request at its end. Greedy by nature: a request with a temperature is refused."""

    reads_tokens = True
    returns_outputs = True
    uses_sampler = False

    def __init__(self, options: BeamOptions, eos_token_ids: tuple[int, ...]) -> None:
        self._options, self._eos_token_ids = options, eos_token_ids
        self._groups: dict[int, Group] = {}
        self._space: BeamSpace | None = None

    def wrap_space(self, space: KVSpace, shape: KVShape) -> Any:
        self._space = BeamSpace(space, shape, self._options.num_beams)
        return self._space

    def launch(self, plan: Plan, runner: Runner, sampler: Sampler) -> list[Best]:
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

    def collect(self, ticket: list[Best]) -> list[Emission]:
        emissions = []
        for best in ticket:
            for group, scores, beams, tokens in best.rows():
                self._advance(group, scores, beams, tokens)
                if group.search.done:
                    emissions.append(_emission(group))
        return emissions

    def reset(self) -> None:
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

    def _candidates(self, groups: list[Group], forward: Forward) -> list[Best]:
        """Groups with as many rows that want as many continuations are looked at together: few launches a step."""
        alike: dict[tuple[int, int], list[Group]] = {}
        for group in groups:
            alike.setdefault((len(group.rows), group.search.num_candidates), []).append(group)
        return [self._best(own, _rows_of(own, forward), num_rows, count) for (num_rows, count), own in alike.items()]

    def _best(self, groups: list[Group], logits: Tensor, num_rows: int, count: int) -> Best:
        """`logits [groups * num_rows, V]`. No row gives more than `count`, and to look for these in each row first
        is much faster than among all continuations of a group."""
        own = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        self._withhold(groups, own)
        rated, tokens = own.topk(min(count, own.shape[-1]), dim=-1)
        before = [score for group in groups for score in group.search.scores]
        total = rated.add_(_column(before, own.device)).view(len(groups), -1)
        scores, places = total.topk(min(count, total.shape[-1]), dim=-1)
        tokens = tokens.view(total.shape).gather(1, places)
        return Best(groups, torch.stack((places, tokens, scores.double().view(torch.int64))), rated.shape[-1])

    def _withhold(self, groups: list[Group], scores: Tensor) -> None:
        """Stop tokens that come too early get no probability in the rows of their groups."""
        rows: list[int] = []
        stops: list[int] = []
        first = 0
        for group in groups:
            if group.search.length < group.sequence.request.sampling.min_new_tokens:
                found = stop_tokens(group.sequence.request.sampling, self._eos_token_ids)
                for row in range(first, first + len(group.rows)):
                    rows += [row] * len(found)
                    stops += found
            first += len(group.rows)
        if rows:
            scores[tuple(lists_to_device(scores.device, rows, stops))] = float("-inf")

    def _advance(self, group: Group, scores: list[float], beams: list[int], tokens: list[int]) -> None:
        """The beams of the next step: a row goes on with its first continuation, others fork from it."""
        assert self._space is not None
        sequence, search = group.sequence, group.search
        if not search.length:
            self._space.begin(sequence.seq_id, sequence.num_prompt_tokens)
        parents, tokens = search.advance(scores, beams, tokens, group.output)
        if search.done:
            return
        gone = _set_free(group, parents)
        forks = _continue(group, parents, tokens)
        rows = tuple([row.sequence.seq_id for row in group.rows])
        self._space.arrange(sequence.seq_id, rows, forks, sequence.num_prompt_tokens + search.length - 1, gone)


def _rows_of(groups: list[Group], forward: Forward) -> Tensor:
    """The logits of all rows of `groups`, in their order; most often that is the order in which they are."""
    rows = [row.sequence for group in groups for row in group.rows]
    if rows == forward.sequences:
        return forward.logits
    place = {sequence.seq_id: index for index, sequence in enumerate(forward.sequences)}
    return forward.logits.index_select(0, to_device([place[row.seq_id] for row in rows], forward.logits.device))


def _column(values: Seq[float], device: torch.device) -> Tensor:
    """fp32 `[n, 1]`, without waiting for the device."""
    host = torch.empty(len(values), 1, dtype=torch.float32, pin_memory=device.type == "cuda")
    host.numpy()[:, 0] = values
    return host.to(device, non_blocking=True)


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
