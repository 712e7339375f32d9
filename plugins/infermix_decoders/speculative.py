"""Speculative decoding with a draft model (Leviathan et al., 2023; Chen et al., 2023)."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from infermix.roles.decoder import Emission, Forward, Runner, Sampler, Want
from infermix.roles.request import Sequence
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit.sampling import draw, uniforms
from infermix.toolkit.verification import (
    AcceptanceCounters,
    Drafted,
    accepted,
    all_decode,
    completes,
    host_ids,
    in_forward_order,
    room_for_drafts,
    row_prefixes,
    with_drafts,
)

from infermix_decoders.lane_rows import lists_to_device

if TYPE_CHECKING:
    from torch import Tensor

    from infermix_decoders.draft_length import DraftLength

#: Noise streams beside the sampler's own (0): does a draft stay, and which token does the draft model propose.
ACCEPT_STREAM, DRAFT_STREAM = 1, 2


@dataclass(slots=True)
class Proposal:
    """Drafts of one round by sequence; where they are drawn, `q [R, V]` has their distributions, `rows` its rows."""

    tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    rows: dict[int, Seq[int]] = field(default_factory=dict)
    q: Tensor | None = None


@dataclass(slots=True)
class Ticket:
    rows: list[Drafted]
    draws: Tensor
    stays: Tensor | None
    sampler: Sampler


def _proposal(owners: Seq[Seq[int]], columns: list[Tensor], distributions: list[Tensor] | None) -> Proposal:
    """Of what each step drew for its owners; those that want fewer drafts are missing in the later ones."""
    if not columns:
        return Proposal()
    drawn = host_ids(torch.cat(columns))
    places = _places(owners)
    tokens = {owner: tuple([drawn[place] for place in own]) for owner, own in places.items()}
    return Proposal(tokens) if distributions is None else Proposal(tokens, places, torch.cat(distributions))


def _places(owners: Seq[Seq[int]]) -> dict[int, Seq[int]]:
    """Where the drafts of each owner are, step after step."""
    width, steps = len(owners[0]), len(owners)
    if len(owners[-1]) == width:  # as nearly always
        return {owner: range(first, steps * width, width) for first, owner in enumerate(owners[0])}
    found: dict[int, list[int]] = {}
    for place, owner in enumerate(owner for step in owners for owner in step):
        found.setdefault(owner, []).append(place)
    return dict(found)


class DraftModel:
    """The draft side: one shadow sequence per target sequence, in the same lane, over the same list of tokens."""

    def __init__(self, second: Any) -> None:
        self._second = second
        self._shadows: dict[int, Sequence] = {}

    def propose(self, wanted: Seq[tuple[Sequence, int]], *, greedy: bool) -> Proposal:
        """So many drafts for each sequence that the draft's KV has room for; reads the device once."""
        ready = [(shadow, count) for seq, count in wanted if (shadow := self._ready(seq, count)) is not None]
        columns: list[Tensor] = []
        distributions: list[Any] = []
        owners: list[list[int]] = []
        counts = [count for _, count in ready]
        for step in range(max(counts, default=0)):
            if step < 2 or step >= min(counts):  # else the same sequences, one token each, once more
                going = [shadow for shadow, count in ready if count > step]
                plan = Plan([Scheduled(each, 1 if step else each.num_uncomputed) for each in going])
            forward = self._second.runner.forward(plan)
            ids, q = self._draw(forward, greedy)
            columns.append(ids)
            distributions.append(q)
            owners.append([shadow.seq_id for shadow in forward.sequences])
            for shadow in going:
                shadow.num_computed = len(shadow.tokens) + step
                shadow.num_inflight = step + 1
        return _proposal(owners, columns, None if greedy else distributions)

    def keep(self, sequence: Sequence, num_tokens: int) -> None:
        """Of what was drafted only the first `num_tokens` tokens of the text hold."""
        shadow = self._shadows.get(sequence.seq_id)
        if shadow is not None:
            shadow.num_computed = min(shadow.num_computed, num_tokens)
            self._second.space.truncate(sequence.seq_id, shadow.num_computed)

    def forget(self, sequence: Sequence) -> None:
        if self._shadows.pop(sequence.seq_id, None) is not None:
            self._second.space.release(sequence.seq_id)
            self._second.sampler.forget(sequence.lane)

    def _ready(self, sequence: Sequence, count: int) -> Sequence | None:
        shadow = self._shadows.get(sequence.seq_id)
        if not self._second.space.reserve(sequence.seq_id, len(sequence.tokens) + count - 1):
            self.forget(sequence)  # else all could hold some room and wait for more, and nobody would draft again
            return None
        if shadow is None:
            shadow = Sequence(sequence.seq_id, sequence.request, sequence.tokens, sequence.num_prompt_tokens)
            self._shadows[sequence.seq_id] = shadow
        shadow.lane, shadow.num_inflight = sequence.lane, 0
        self._second.sampler.forget(shadow.lane)  # it saw drafts that did not stay, and not what came instead
        # After a full acceptance the draft lags by two tokens; it always computes two, so that steps are alike.
        shadow.num_computed = max(0, min(shadow.num_computed, len(sequence.tokens) - 2))
        return shadow

    def _draw(self, forward: Forward, greedy: bool) -> tuple[Tensor, Tensor | None]:
        sampler = self._second.sampler
        if greedy:
            return sampler.sample(forward), None
        q = sampler.probabilities(forward, [()] * len(forward.sequences))
        ids = draw(q, _noise([(seq, seq.num_tokens) for seq in forward.sequences], (DRAFT_STREAM,), q.device)[0])
        sampler.keep(forward, ids)
        return ids, q


class SpeculativeDecoder:
    """Drafts on another model, verifies in one forward of the target.

    `rejection`: a draft x stays with probability min(1, p(x) / q(x)), the first that does not is replaced by a draw
    from the normalised max(p - q, 0): the target's distribution exactly. Behind the last draft comes a bonus token,
    and so does the token behind a prompt. Drawn from p alone, they would make the tokens depend on where rounds
    begin, hence on preemptions; so they are made as every other one, from one more draft that the target need not
    read. Only where the draft's KV has no room are tokens drawn from p alone. `coupled`: draft and target draw with
    the same noise and a draft stays where both agree: the very tokens of plain decoding, with fewer acceptances.
    Greedy requests are the same under both.
    """

    reads_tokens = True

    def __init__(
        self,
        second: Any,
        length: DraftLength,
        max_model_len: int,
        *,
        acceptance: str,
        uniform_steps: bool,
        clock_ns: Callable[[], int] | None = None,
    ) -> None:
        self._draft, self._length, self._max_model_len = DraftModel(second), length, max_model_len
        self._rejects, self._uniform = acceptance == "rejection", uniform_steps
        self._counters = AcceptanceCounters(clock_ns)
        self._draft_forwards = 0
        self.details: dict[str, Any] = {}
        self.query_lens = (1, *(count + 1 for count in length.choices))

    def launch(self, plan: Plan, runner: Runner, sampler: Sampler) -> Ticket:
        count = self._length.current
        greedy = all(entry.sequence.request.sampling.temperature == 0 for entry in plan.entries)
        # Drafts that the target reads; prompts have none, their first token comes from the target.
        limits = [self._limit(entry, count) for entry in plan.entries]
        with self._counters.drafting():
            proposal = self._propose(plan, limits, count, greedy or not self._rejects)
        rows = self._rows(plan, proposal, limits, count, runner)
        forward = runner.forward(Plan([row.entry for row in rows]), Want(draft_logits=True))
        self._counters.target_forwards += 1
        emitting = in_forward_order(rows, forward)
        if not emitting:
            return Ticket([], torch.empty(0, dtype=torch.int64), None, sampler)
        if greedy or not self._rejects:
            return Ticket(emitting, sampler.sample_rows(forward, row_prefixes(emitting)), None, sampler)
        return Ticket(emitting, *rejection_draws(forward, emitting, proposal, sampler), sampler)

    def collect(self, ticket: Ticket) -> list[Emission]:
        draws = host_ids(ticket.draws)
        stays = None if ticket.stays is None else ticket.stays.tolist()
        emissions, first = [], 0
        for row in ticket.rows:
            span = slice(first, first + len(row.entry.draft_ids) + 1)
            emissions.append(self._emission(row, draws[span], stays and stays[span], ticket.sampler))
            first = span.stop
        return emissions

    def counters(self) -> dict[str, float]:
        return {**self._counters.as_counters(), "draft_forwards": float(self._draft_forwards)}

    def reset(self) -> None:
        self._counters, self._draft_forwards = AcceptanceCounters(self._counters.clock_ns), 0

    def forget(self, sequence: Sequence) -> None:
        self._draft.forget(sequence)

    def _propose(self, plan: Plan, limits: Seq[int], count: int, coupled: bool) -> Proposal:
        pairs = zip(plan.entries, limits, strict=True)
        if coupled:
            wanted = [(entry.sequence, self._judged(entry.sequence, count - 1)) for entry, limit in pairs if limit]
        else:
            wanted = [
                (entry.sequence, self._judged(entry.sequence, limit)) for entry, limit in pairs if completes(entry)
            ]
        proposal = self._draft.propose(wanted, greedy=coupled)
        self._draft_forwards += max(map(len, proposal.tokens.values()), default=0)
        return proposal

    def _judged(self, sequence: Sequence, limit: int) -> int:
        """Tokens that a round of `limit` drafts may emit, as far as the draft has positions for them."""
        return min(limit + 1, self._max_model_len - len(sequence.tokens) + 1)

    def _limit(self, entry: Scheduled, count: int) -> int:
        if entry.num_new_tokens != 1 or not completes(entry):
            return 0
        return room_for_drafts(entry.sequence, count, self._max_model_len)

    def _rows(self, plan: Plan, proposal: Proposal, limits: Seq[int], count: int, runner: Runner) -> list[Drafted]:
        tokens = proposal.tokens
        filled_to = count if self._uniform and tokens and any(limits) and self._all_fit(plan, count) else 0
        return [
            with_drafts(entry, tokens.get(entry.sequence.seq_id, ())[:limit], runner, filled_to)
            for entry, limit in zip(plan.entries, limits, strict=True)
        ]

    def _all_fit(self, plan: Plan, count: int) -> bool:
        fitting = (entry.sequence.num_tokens + count <= self._max_model_len for entry in plan.entries)
        return all_decode(plan) and all(fitting)

    def _emission(self, row: Drafted, draws: Seq[int], stays: list[bool] | None, sampler: Sampler) -> Emission:
        sequence, drafts = row.entry.sequence, row.entry.draft_ids[: row.num_real]
        count = accepted(draws, drafts) if stays is None else _leading(stays[: row.num_real])
        tokens = (*drafts[:count], draws[count])
        self._counters.count(row.num_real, count, 0, sequence.request.category)
        self._length.observe(row.num_real, count)
        sampler.accept(sequence, tokens)
        self._draft.keep(sequence, len(sequence.tokens) + count)
        return Emission(sequence, tokens, len(row.entry.draft_ids))


def rejection_draws(
    forward: Forward, rows: Seq[Drafted], proposal: Proposal, sampler: Sampler
) -> tuple[Tensor, Tensor]:
    """Per row of the verification `[R]`: the token that ends the round there, and whether the row's draft stays.

    A row that fills up a captured step, or whose draft model had no room, has q = 0: its draw is from p. The bonus
    has a draft of its own, which is the draw where it stays.
    """
    p = sampler.probabilities(forward, row_prefixes(rows))
    tokens, q = _draft_rows(rows, proposal, p)
    assert forward.positions is not None
    keys = list(zip(forward.sequences, forward.positions, strict=True))
    own = tokens[:, None]
    ratio = p.gather(1, own).squeeze(1), q.gather(1, own).squeeze(1)
    coins, noise = _noise(keys, (ACCEPT_STREAM, 0), p.device)
    stays = (coins.squeeze(1) * ratio[1] < ratio[0]) & (ratio[1] > 0)
    left = residual(p, q)
    empty = left.sum(-1, keepdim=True) <= 0  # p equals q: the draft stays, its replacement is never used
    return torch.where(stays, tokens, draw(torch.where(empty, p, left), noise)), stays


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What a rejected draft is replaced from, not normalised: max(p - q, 0)."""
    return (p - q).clamp_(min=0)


def _draft_rows(rows: Seq[Drafted], proposal: Proposal, p: Tensor) -> tuple[Tensor, Tensor]:
    """Draft token `[R]` and draft distribution `[R, V]` in place of every row's prediction."""
    tokens: list[int] = []
    targets: list[int] = []
    sources: list[int] = []
    for row in rows:
        seq_id = row.entry.sequence.seq_id
        judged = min(row.num_real + 1, len(proposal.tokens.get(seq_id, ())))
        targets += range(len(tokens), len(tokens) + judged)
        sources += proposal.rows.get(seq_id, ())[:judged]
        tokens += [*proposal.tokens.get(seq_id, ())[:judged], *(0,) * (len(row.drafts) + 1 - judged)]
    q = torch.zeros_like(p)
    own, into, out_of = lists_to_device(p.device, tokens, targets, sources)
    if proposal.q is not None:
        q.index_copy_(0, into, proposal.q.index_select(0, out_of))
    return own, q


def _noise(keys: Seq[tuple[Sequence, int]], streams: Seq[int], device: torch.device) -> Tensor:
    """`[len(streams), R, 1]` in (0, 1), fp64, from each request's seed and position."""
    seeds = [sequence.request.sampling.seed for sequence, _ in keys]
    positions = [position for _, position in keys]
    made = torch.empty(len(streams), len(keys), 1, dtype=torch.float64, pin_memory=device.type == "cuda")
    for row, stream in zip(made.numpy(), streams, strict=True):
        row[:, 0] = uniforms(seeds, positions, stream)
    return made.to(device, non_blocking=True)


def _leading(flags: Seq[bool]) -> int:
    return next((index for index, flag in enumerate(flags) if not flag), len(flags))
