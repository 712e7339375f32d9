"""The sampler: greedy, temperature, top-k, top-p, min-p, repetition penalty, seeded per request.

Noise is counter-based: one uniform number per token, a hash of (request seed, position). So the draw of a request
depends neither on what else is in the batch nor on preemption. Filters follow the usual order: repetition penalty,
temperature, top-k, top-p over what top-k left, min-p relative to the most likely token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from infermix.toolkit.selection import Filters

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from infermix.roles.decoder import Forward
    from infermix.roles.request import SamplingParams, Sequence
    from infermix.toolkit.selection import TokenSelector

_MASK = (1 << 64) - 1


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A number in (0, 1) from (seed, position): two rounds of the SplitMix64 finalizer (Steele et al., 2014).

    `stream` 0 chooses tokens; other streams are independent of it, for tokens that are drawn again (`Forward.draws`)
    and for what else a decoder draws at a position.
    """
    state = ((seed * 0x9E3779B97F4A7C15) ^ ((position + 1) * 0xD1342543DE82EF95)) & _MASK
    state ^= (stream * 0xA0761D6478BD642F) & _MASK
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return ((state >> 32) + 0.5) / 2.0**32


def uniforms(seeds: Seq[int], positions: Seq[int], stream: int = 0) -> np.ndarray:
    """`uniform` of each pair, `[n]` float64: unsigned 64-bit products and sums wrap around by themselves."""
    state = np.array([seed & _MASK for seed in seeds], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    state ^= (np.array(positions, np.uint64) + np.uint64(1)) * np.uint64(0xD1342543DE82EF95)
    state ^= np.uint64((stream * 0xA0761D6478BD642F) & _MASK)
    for _ in range(2):
        state += np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return ((state >> np.uint64(32)) + 0.5) / 2.0**32


def penalise_repetition(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Divide positive and multiply negative logits of seen tokens by `penalty [R, 1]` (Keskar et al., 2019)."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filter_probabilities(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Probabilities `[R, V]` (not renormalised) with everything outside top-k, top-p, min-p set to 0.

    `top_k [R, 1]` int64 (0: off), `top_p [R, 1]` (1: off), `min_p [R, 1]` (0: off). Ties are broken by token id, so
    that top-k keeps exactly k tokens.
    """
    ordered, index = torch.sort(logits, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill((top_k > 0) & (rank >= top_k), float("-inf"))
    probabilities = torch.softmax(ordered, dim=-1, dtype=torch.float64)
    before = probabilities.cumsum(-1) - probabilities
    drop = ((before >= top_p) & (top_p < 1)) | (probabilities < min_p * probabilities[:, :1])
    drop[:, 0] = False
    return torch.zeros_like(probabilities).scatter_(1, index, probabilities.masked_fill(drop, 0.0))


def draw(probabilities: Tensor, noise: Tensor) -> Tensor:
    """Inverse-CDF draw in token-id order: `probabilities [R, V]` float64, `noise [R, 1]` in (0, 1) -> ids `[R]`."""
    cumulative = probabilities.cumsum(-1)
    return (cumulative <= noise * cumulative[:, -1:]).sum(-1)


class TorchSelector:
    """The plain `TokenSelector`: `argmax`, and a draw in float64 behind a full sort."""

    def greedy(self, logits: Tensor) -> Tensor:
        return logits.argmax(-1)

    def draw(self, logits: Tensor, filters: Filters) -> Tensor:
        drawn = draw(_filtered(logits, filters), filters.noise[:, None])
        return torch.where(filters.temperature > 0, drawn, logits.argmax(-1))


class TokenSampler:
    """Keeps `next_ids [max_num_seqs + 1]` on the device: the last sampled token of each lane.

    The extra lane belongs to padded rows. `selector` picks tokens from logits. `eos_token_ids` end a request.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        eos_token_ids: tuple[int, ...],
        selector: TokenSelector = TorchSelector(),
    ) -> None:
        self.next_ids = torch.zeros(max_num_seqs + 1, dtype=torch.int64, device=device)
        self._vocab_size = vocab_size
        self.eos_token_ids, self._selector = eos_token_ids, selector
        self._seen: Tensor | None = None
        self._seen_owner: dict[int, int] = {}

    def sample(self, forward: Forward) -> Tensor:
        sequences = forward.sequences
        logits = self._adjusted(forward)
        known = forward.most_likely if logits is forward.logits and _greedy(sequences) else None
        ids = self._choose(logits, forward) if known is None else known
        self.keep(forward, ids)
        return ids

    def keep(self, forward: Forward, ids: Tensor) -> None:
        """Ids `[R]` as the next inputs of their sequences; penalties of later steps see them."""
        self.next_ids.index_copy_(0, forward.lanes, ids)
        if self._seen is not None and _penalised(forward.sequences):
            self._seen[forward.lanes, ids] = True

    def sample_rows(self, forward: Forward, drafts: Seq[tuple[int, ...]]) -> Tensor:
        """Ids `[R]` of several rows per sequence; `drafts[i]` stand between what the sequence knows and row i."""
        return self._choose(self._adjusted(forward, drafts), forward)

    def probabilities(self, forward: Forward, drafts: Seq[tuple[int, ...]]) -> Tensor:
        """The distribution `[R, V]` (fp64, normalised) of every row; one-hot where the request is greedy."""
        logits = self._adjusted(forward, drafts)
        filters = _filters_of(forward, logits.device)
        kept = _filtered(logits, filters)
        greedy = torch.zeros_like(kept).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
        return torch.where(filters.temperature[:, None] > 0, kept / kept.sum(-1, keepdim=True), greedy)

    def accept(self, sequence: Sequence, token_ids: tuple[int, ...]) -> None:
        """Tokens of a verification step that stay; penalties of later steps see them."""
        if self._seen is not None and self._seen_owner.get(sequence.lane) == sequence.seq_id:
            self._seen[sequence.lane, torch.tensor(token_ids, device=self._seen.device)] = True

    def reset(self) -> None:
        self._seen_owner.clear()

    def _choose(self, logits: Tensor, forward: Forward) -> Tensor:
        if _greedy(forward.sequences):
            return self._selector.greedy(logits)
        return self._selector.draw(logits, _filters_of(forward, logits.device))

    def _adjusted(self, forward: Forward, drafts: Seq[tuple[int, ...]] | None = None) -> Tensor:
        """Logits without the stop tokens that may not come yet, and with penalties."""
        logits = self._withhold_stops(forward.logits, forward.sequences, _positions(forward))
        if not _penalised(forward.sequences):
            return logits
        return self._penalise(logits.float(), forward, drafts)

    def _withhold_stops(self, logits: Tensor, sequences: list[Sequence], positions: list[int]) -> Tensor:
        """Before `min_new_tokens` no stop token can be chosen."""
        early = [
            (row, stops)
            for row, (seq, position) in enumerate(zip(sequences, positions, strict=True))
            if (least := seq.request.sampling.min_new_tokens)
            and position - seq.num_prompt_tokens < least
            and (stops := stop_tokens(seq.request.sampling, self.eos_token_ids))
        ]
        if not early:
            return logits
        logits = logits.clone()
        for row, stops in early:
            logits[row, list(stops)] = float("-inf")
        return logits

    def _penalise(self, logits: Tensor, forward: Forward, drafts: Seq[tuple[int, ...]] | None) -> Tensor:
        if self._seen is None:
            shape = (self.next_ids.shape[0], self._vocab_size)
            self._seen = torch.zeros(shape, dtype=torch.bool, device=logits.device)
        for seq in forward.sequences:
            if self._seen_owner.get(seq.lane) != seq.seq_id:
                self._mark_tokens(seq)
        penalties = [seq.request.sampling.repetition_penalty for seq in forward.sequences]
        penalty = torch.tensor(penalties, dtype=torch.float32).to(logits.device, non_blocking=True)
        seen = self._seen[forward.lanes]
        marks = [(row, token) for row, tokens in enumerate(drafts or ()) for token in tokens]
        if marks:
            rows, tokens = torch.tensor(marks, device=seen.device).T
            seen[rows, tokens] = True
        return penalise_repetition(logits, seen, penalty[:, None])

    def _mark_tokens(self, seq: Sequence) -> None:
        assert self._seen is not None
        self._seen[seq.lane] = False
        self._seen[seq.lane, torch.tensor(seq.tokens, device=self._seen.device)] = True
        self._seen_owner[seq.lane] = seq.seq_id

    def forget(self, lane: int) -> None:
        """A lane changed hands; its penalty history is rebuilt when next needed."""
        self._seen_owner.pop(lane, None)


def _filters_of(forward: Forward, device: torch.device) -> Filters:
    params = [seq.request.sampling for seq in forward.sequences]
    draws = forward.draws or [0] * len(params)
    columns = [
        [p.temperature for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        [uniform(p.seed, at, draw) for p, at, draw in zip(params, _positions(forward), draws, strict=True)],
        [p.top_k for p in params],
    ]
    table = torch.tensor(columns, dtype=torch.float64).to(device, non_blocking=True)
    temperature, top_p, min_p, noise, top_k = table.unbind()
    unfiltered = not any(_filters(p) for p in params)
    return Filters(temperature, top_k.long(), top_p, min_p, noise, unfiltered)


def _filtered(logits: Tensor, filters: Filters) -> Tensor:
    """Probabilities `[R, V]` in fp64 after temperature and filters, not renormalised; greedy rows as with 1."""
    temperature = torch.where(filters.temperature > 0, filters.temperature, 1.0)[:, None].float()
    # From the largest down: a tiny temperature then leaves it alone instead of overflowing to NaN.
    scaled = (logits.float() - logits.amax(-1, keepdim=True).float()) / temperature
    if filters.unfiltered:
        return torch.softmax(scaled, dim=-1, dtype=torch.float64)
    return filter_probabilities(scaled, *(each[:, None] for each in (filters.top_k, filters.top_p, filters.min_p)))


def _greedy(sequences: list[Sequence]) -> bool:
    return all(seq.request.sampling.temperature == 0 for seq in sequences)


def _next_positions(sequences: list[Sequence]) -> list[int]:
    return [seq.num_tokens for seq in sequences]


def _positions(forward: Forward) -> list[int]:
    return _next_positions(forward.sequences) if forward.positions is None else forward.positions


def _penalised(sequences: list[Sequence]) -> bool:
    return any(seq.request.sampling.repetition_penalty != 1.0 for seq in sequences)


def stop_tokens(sampling: SamplingParams, eos_token_ids: tuple[int, ...]) -> frozenset[int]:
    """Tokens that end a request."""
    eos = () if sampling.ignore_eos else eos_token_ids
    return frozenset((*eos, *sampling.stop_token_ids))


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
