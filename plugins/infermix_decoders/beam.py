"""Beam search: each sequence keeps several rows, which share the KV of what they have in common."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from infermix.errors import UserError
from infermix.roles.decoder import Emission, Forward, Runner, Sampler
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit.sampling import stop_tokens
from infermix.toolkit.verification import completes
from torch import Tensor

from infermix_decoders.beam_search import BeamSearch, Candidate
from infermix_decoders.beam_space import BeamSpace, Fork
from infermix_decoders.lane_rows import to_device

if TYPE_CHECKING:
    from infermix.roles.kv_space import KVShape, KVSpace

    from infermix_decoders.options import BeamOptions


@dataclass(slots=True)
class Group:
    """One request: row i holds beam i; `free` are ids of rows that no beam uses now."""

    sequence: Sequence
    search: BeamSearch
    rows: list[Sequence]
    free: list[int]


@dataclass(slots=True)
class Best:
    """The best continuations of groups that are alike: `scores` and flat `places` in `beams * V`, both `[G, k]`."""

    groups: list[Group]
    scores: Tensor
    places: Tensor


@dataclass(slots=True)
class Ticket:
    found: list[Best]
    vocab_size: int


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

    def launch(self, plan: Plan, runner: Runner, sampler: Sampler) -> Ticket:
        assert self._space is not None, "the engine wraps the space before the first step"
        entries: list[Scheduled] = []
        groups: list[Group] = []
        for entry in plan.entries:
            group = self._groups.get(entry.sequence.seq_id)
            if group is None and completes(entry):
                group = self._begin(entry.sequence)
            elif group is not None:
                runner.copy(self._space.take_row_copies(entry.sequence.seq_id))
            entries += [entry] if group is None or not group.search.length else self._row_entries(group)
            groups += [group] if group is not None else []
        return self._candidates(groups, runner.forward(Plan(entries)))

    def collect(self, ticket: Ticket) -> list[Emission]:
        emissions = []
        for best in ticket.found:
            rows = zip(best.groups, best.scores.tolist(), best.places.tolist(), strict=True)
            for group, scores, places in rows:
                found = zip(scores, places, strict=True)
                self._advance(group, [Candidate(score, *divmod(place, ticket.vocab_size)) for score, place in found])
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
        group = Group(sequence, search, [sequence], [first - index for index in range(1, options.num_beams)])
        self._groups[sequence.seq_id] = group
        return group

    def _row_entries(self, group: Group) -> list[Scheduled]:
        for row in group.rows:
            row.lane = group.sequence.lane
        return [Scheduled(row, 1) for row in group.rows]

    def _candidates(self, groups: list[Group], forward: Forward) -> Ticket:
        """Groups with as many rows that want as many continuations are looked at together: few launches a step."""
        place = {seq.seq_id: row for row, seq in enumerate(forward.sequences)}
        alike: dict[tuple[int, int], list[Group]] = {}
        for group in groups:
            alike.setdefault((len(group.rows), group.search.num_candidates), []).append(group)
        found = []
        for (_, count), own in alike.items():
            rows = [place[row.seq_id] for group in own for row in group.rows]
            total = self._scores(own, forward.logits, rows).view(len(own), -1)
            found.append(Best(own, *total.topk(min(count, total.shape[1]), dim=-1)))
        return Ticket(found, forward.logits.shape[-1])

    def _scores(self, groups: list[Group], logits: Tensor, rows: list[int]) -> Tensor:
        """`[len(rows), V]`: the scores of all continuations of all beams; `rows` are those of the groups in order."""
        own = torch.log_softmax(logits.index_select(0, to_device(rows, logits.device)), dim=-1, dtype=torch.float32)
        beams = [(group, score) for group in groups for score in group.search.scores]
        withheld = [(row, stop) for row, (group, _) in enumerate(beams) for stop in self._withheld(group)]
        if withheld:
            own[tuple(torch.tensor(withheld, device=own.device).T)] = float("-inf")
        scores = torch.tensor([score for _, score in beams], dtype=torch.float32)
        return own + scores.to(own.device, non_blocking=True)[:, None]

    def _withheld(self, group: Group) -> frozenset[int]:
        """Stop tokens that come too early."""
        sampling = group.sequence.request.sampling
        early = group.search.length < sampling.min_new_tokens
        return stop_tokens(sampling, self._eos_token_ids) if early else frozenset()

    def _advance(self, group: Group, candidates: Seq[Candidate]) -> None:
        """The beams of the next step: a row goes on with its first continuation, others fork from it."""
        assert self._space is not None
        sequence, search, before = group.sequence, group.search, group.rows
        if not search.length:
            self._space.begin(sequence.seq_id, sequence.num_prompt_tokens)
        going = search.advance(candidates)
        if search.done:
            return
        num_tokens = sequence.num_prompt_tokens + search.length - 1
        used = {each.beam for each in going}
        free = [*group.free, *(row.seq_id for beam, row in enumerate(before) if beam not in used)]
        ids, forks = _assign(going, [row.seq_id for row in before], free)
        group.free = [each for each in free if each not in ids]
        group.rows = [
            Sequence(
                seq_id, sequence.request, [*sequence.tokens, *output], sequence.num_prompt_tokens,
                lane=sequence.lane, num_computed=num_tokens,
            )
            for seq_id, output in zip(ids, search.outputs, strict=True)
        ]  # fmt: skip
        self._space.arrange(sequence.seq_id, tuple(ids), forks, num_tokens)


def _assign(going: Seq[Candidate], before: Seq[int], free: Seq[int]) -> tuple[list[int], list[Fork]]:
    """Row ids of the beams in their order, and which of them fork."""
    spare, kept = iter(free), set[int]()
    ids: list[int] = []
    forks: list[Fork] = []
    for each in going:
        parent = before[each.beam]
        if parent in kept:
            ids.append(next(spare))
            forks.append((parent, ids[-1]))
        else:
            kept.add(parent)
            ids.append(parent)
    return ids, forks


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
