"""Masked-diffusion decoding, block by block (Nie et al., 2025, "Large Language Diffusion Models", arXiv 2502.09992).

The text is the prompt and, up to the longest output, masks. A step predicts every mask of the current block, keeps
the predictions that it is most confident of and masks the others again; the block after it begins when none is left
(semi-autoregressive remasking). With a threshold, a step keeps whatever it is confident enough of (Wu et al., 2025,
"Fast-dLLM", arXiv 2505.22618). A mask is never a prediction: its probability is set to zero (Sahoo et al., 2024,
"Simple and Effective Masked Diffusion Language Models", arXiv 2406.07524).
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from infermix.errors import UserError
from infermix.roles.decoder import Emission, Forward, Runner, Sampler, Want
from infermix.roles.scheduler import Plan, Scheduled
from infermix.toolkit.sampling import uniform
from infermix.toolkit.verification import completes
from torch import Tensor

if TYPE_CHECKING:
    from infermix.roles.decoder import DecoderContext
    from infermix.roles.request import Sequence

    from infermix_decoders.options import DiffusionOptions

#: Where a sequence keeps its block: with the sequence, so that neither preemption nor its company changes the text.
_BLOCK = "diffusion_block"
#: Noise of random remasking: streams that no draw of a token uses.
_REMASKING_STREAM = 1 << 32
#: Rows whose probabilities are computed at once, in fp64.
_ROWS = 256


@dataclass(slots=True)
class Block:
    """Tokens `start ... start + len(tokens) - 1` of a sequence; `None` is a mask. `step` counts its steps so far."""

    start: int
    tokens: list[int | None]
    step: int = 0

    @property
    def stop(self) -> int:
        return self.start + len(self.tokens)

    def masked(self) -> list[int]:
        """Positions in the sequence that are still masks, ascending."""
        return [self.start + index for index, token in enumerate(self.tokens) if token is None]

    def known_from(self, position: int) -> tuple[int, ...]:
        """Tokens from `position` on, up to the first mask."""
        behind = self.tokens[position - self.start :]
        end = behind.index(None) if None in behind else len(behind)
        return tuple(token for token in behind[:end] if token is not None)


@dataclass(slots=True)
class Row:
    """A sequence in a step, its block, how many tokens of it are drafts, and which positions are predicted."""

    sequence: Sequence
    block: Block
    num_drafts: int
    positions: list[int]


@dataclass(slots=True)
class Ticket:
    """`found [2, R]` float64: the predicted tokens of all rows in order, and the logarithm of their probability."""

    rows: list[Row]
    found: Tensor
    sampler: Sampler


class DiffusionDecoder:
    """One forward over whole sequences per step; emits what is final: tokens in front of the first mask.

    Predictions are drawn with the request's own sampling parameters and noise of (seed, position, step). Confidence
    is the probability of the prediction under the model itself, before temperature and filters. Masks in a prompt
    stay masks.
    """

    reads_tokens = True

    def __init__(self, options: DiffusionOptions, mask_token_id: int, *, shifted: bool = False) -> None:
        self._options, self._mask, self._shifted = options, mask_token_id, shifted
        self._threshold = None if options.threshold is None else math.log(options.threshold)
        self.details = {"mask_token_id": mask_token_id, "shifted_predictions": shifted}
        self.reset()

    def reset(self) -> None:
        names = ("denoising_forwards", "denoising_steps", "unmasked_tokens", "remasked_tokens", "canvas_tokens")
        self._counters = dict.fromkeys(names, 0.0)

    def counters(self) -> dict[str, float]:
        return dict(self._counters)

    def launch(self, plan: Plan, runner: Runner, sampler: Sampler) -> Ticket:
        entries, rows = [], {}
        for entry in plan.entries:
            assert completes(entry), "a layout that recomputes everything takes whole sequences"
            sequence, block = entry.sequence, self._block(entry.sequence)
            drafts = self._canvas(sequence, block)
            reserved = runner.reserve(sequence, len(sequence.tokens) + len(drafts))
            assert reserved, "the longest output was promised its room when the request was let in"
            entries.append(Scheduled(sequence, entry.num_new_tokens + len(drafts), drafts))
            rows[sequence.seq_id] = Row(sequence, block, len(drafts), block.masked())
            self._counters["canvas_tokens"] += len(sequence.tokens) + len(drafts)
        self._counters["denoising_forwards"] += 1
        forward = runner.forward(Plan(entries), Want(draft_logits=True, most_drafts=self._options.block_length))
        ordered = [rows[seq_id] for seq_id in dict.fromkeys(seq.seq_id for seq in forward.sequences)]
        return Ticket(ordered, self._predict(forward, ordered, sampler), sampler)

    def collect(self, ticket: Ticket) -> list[Emission]:
        ids, confidences = ticket.found.tolist()
        emissions, first = [], 0
        for row in ticket.rows:
            span = slice(first, first + len(row.positions))
            first = span.stop
            self._unmask(row, [int(token) for token in ids[span]], confidences[span])
            tokens = row.block.known_from(len(row.sequence.tokens))
            if tokens:
                ticket.sampler.accept(row.sequence, tokens)
            emissions.append(Emission(row.sequence, tokens, row.num_drafts))
        return emissions

    def _block(self, sequence: Sequence) -> Block:
        """The one that the next token lies in, where everything before it was emitted."""
        known = sequence.extra.get(_BLOCK)
        if isinstance(known, Block) and len(sequence.tokens) < known.stop:
            return known
        start = len(sequence.tokens)
        size = min(self._options.block_length, sequence.max_tokens - start)
        made = Block(start, [None] * size)
        sequence.extra[_BLOCK] = made
        return made

    def _canvas(self, sequence: Sequence, block: Block) -> tuple[int, ...]:
        """What stands behind the emitted tokens: the rest of the block, then masks."""
        rest = block.tokens[len(sequence.tokens) - block.start :]
        here = (self._mask if token is None else token for token in rest)
        return (*here, *[self._mask] * (sequence.max_tokens - block.stop))

    def _predict(self, forward: Forward, rows: Seq[Row], sampler: Sampler) -> Tensor:
        chosen = _chosen_rows(forward, rows, 0 if self._shifted else 1)
        index = torch.tensor(chosen, dtype=torch.int64).to(forward.logits.device, non_blocking=True)
        logits = forward.logits.index_select(0, index)
        logits[:, self._mask] = float("-inf")
        predicted = Forward(
            logits,
            [row.sequence for row in rows for _ in row.positions],
            forward.lanes.index_select(0, index),
            positions=[position for row in rows for position in row.positions],
            draws=[row.block.step for row in rows for _ in row.positions],
        )
        known = [(row, tuple(token for token in row.block.tokens if token is not None)) for row in rows]
        ids = sampler.sample_rows(predicted, [tokens for row, tokens in known for _ in row.positions])
        return torch.stack((ids.double(), _log_probabilities(logits, ids)))

    def _unmask(self, row: Row, tokens: Seq[int], confidences: Seq[float]) -> None:
        """Keep the predictions of one step; the others are masks again."""
        block = row.block
        if self._options.remasking == "random":
            seed, stream = row.sequence.request.sampling.seed, _REMASKING_STREAM + block.step
            confidences = [uniform(seed, position, stream) for position in row.positions]
        # The first of equal ones.
        ranked = sorted(range(len(tokens)), key=lambda index: -confidences[index])
        kept = ranked[: self._num_kept(block, [confidences[index] for index in ranked])]
        for index in kept:
            block.tokens[row.positions[index] - block.start] = tokens[index]
        block.step += 1
        self._counters["denoising_steps"] += 1
        self._counters["unmasked_tokens"] += len(kept)
        self._counters["remasked_tokens"] += len(tokens) - len(kept)

    def _num_kept(self, block: Block, confidences: Seq[float]) -> int:
        """How many of the predictions stay; `confidences` descend."""
        if self._threshold is not None:
            return max(1, sum(each >= self._threshold for each in confidences))
        size = len(block.tokens)
        steps = min(self._options.steps_per_block or size, size)
        return size // steps + (block.step < size % steps)


def build_diffusion(options: DiffusionOptions, context: DecoderContext) -> DiffusionDecoder:
    """Raises `UserError` where nobody says which token is the mask, or it is none of the vocabulary."""
    facts = context.facts
    mask = facts.mask_token_id if options.mask_token_id is None else options.mask_token_id
    if mask is None or not 0 <= mask < facts.vocab_size:
        what = "its config has no mask_token_id" if mask is None else f"{mask} is not in its vocabulary"
        raise UserError(
            f"diffusion needs the mask token of {facts.source}: {what} ({facts.vocab_size} tokens)",
            key="parts.decoder.mask_token_id",
        )
    return DiffusionDecoder(options, mask, shifted="model:shifted_predictions" in facts.features)


def _chosen_rows(forward: Forward, rows: Seq[Row], offset: int) -> list[int]:
    """Rows of the logits that predict the masks: those of the masks themselves, or (`offset` 0) those before them.

    Of each sequence there is a row for its last token and one for every draft behind it.
    """
    first: dict[int, int] = {}
    for index, sequence in enumerate(forward.sequences):
        first.setdefault(sequence.seq_id, index)
    return [
        first[row.sequence.seq_id] + position - len(row.sequence.tokens) + offset
        for row in rows
        for position in row.positions
    ]


def _log_probabilities(logits: Tensor, ids: Tensor) -> Tensor:
    """`[R]` float64 of the tokens `ids [R]`, a bounded number of rows at once."""
    parts: list[Any] = []
    for some, own in zip(logits.split(_ROWS), ids.split(_ROWS), strict=True):
        precise = some.double()
        parts.append(precise.gather(1, own[:, None]).squeeze(1) - precise.logsumexp(-1))
    return torch.cat(parts)
