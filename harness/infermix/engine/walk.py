"""Packed logits of whole sequences, walked as an engine would: joins, chunks, single tokens, finishes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from infermix.engine.packing import PackEntry, pack
from infermix.roles.kv_space import KVBudget

if TYPE_CHECKING:
    from torch import Tensor

    from infermix.engine.bridge import Joint
    from infermix.roles.attention import AttentionBackend
    from infermix.roles.kv_space import KVLayout, KVShape, KVSpace

CHUNK = 11
NUM_DECODE = 3


class Piece(NamedTuple):
    """New tokens of one sequence in one step."""

    sequence: int
    start: int
    num_new: int


def random_sequences(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def steps(
    lengths: Sequence[int], chunk: int = CHUNK, num_decode: int = NUM_DECODE, *, causal: bool = True
) -> Iterator[list[Piece]]:
    """A schedule: sequence i joins at step i, is prefilled in chunks, ends with `num_decode` single tokens.

    Not `causal`: all sequences at once, each whole.
    """
    if not causal:
        yield [Piece(index, 0, length) for index, length in enumerate(lengths)]
        return
    done = [0] * len(lengths)
    step = 0
    while any(count < length for count, length in zip(done, lengths, strict=True)):
        pieces = []
        for index, length in enumerate(lengths[: step + 1]):
            if done[index] < length:
                prompt = max(length - num_decode, 1)
                count = min(chunk, prompt - done[index]) if done[index] < prompt else 1
                pieces.append(Piece(index, done[index], count))
                done[index] += count
        step += 1
        yield pieces


def chunk_of(shape: KVShape, chunk: int = CHUNK) -> int:
    """The chunk of a walk, no longer than what the layout takes at once."""
    return min(chunk, shape.max_query_len or chunk)


def packed_logits(
    joint: Joint,
    attention: AttentionBackend,
    layout: KVLayout,
    sequences: Sequence[Sequence[int]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    kept_rows: int,
    chunk: int = CHUNK,
    num_decode: int = NUM_DECODE,
) -> list[Tensor]:
    """Logits of the last `kept_rows` tokens of each sequence, `[min(T, kept_rows), V]` fp32 on the CPU."""
    lengths = [len(ids) for ids in sequences]
    budget = KVBudget(
        len(lengths), max(lengths), dtype.itemsize, max_query_len=chunk, keep_all=True, states=joint.states
    )
    shape = layout.shape(joint.groups, budget)
    space = layout.space(shape)
    joint.attach(attention, layout.store(shape, device, dtype))
    collected: list[list[Tensor]] = [[] for _ in sequences]
    try:
        for number, pieces in enumerate(steps(lengths, chunk_of(shape, chunk), num_decode, causal=joint.causal)):
            first_kept = [max(0, length - kept_rows) for length in lengths]
            ordered = reserve(space, pieces)
            rows, logits = _run(joint, space, shape, sequences, ordered, first_kept, checked=number == 0)
            for piece, part in zip(ordered, logits.float().cpu().split(rows), strict=True):
                collected[piece.sequence].append(part)
                if piece.start + piece.num_new == lengths[piece.sequence]:
                    space.release(piece.sequence)
    finally:
        joint.detach()
    return [torch.cat(parts) for parts in collected]


def full_logits(joint: Joint, ids: Sequence[int], kept_rows: int, implementation: str = "eager") -> Tensor:
    """The model's own logits of the last `kept_rows` tokens, fp32 on the CPU."""
    tokens = torch.tensor(ids, device=joint.device)
    return joint.reference(tokens, kept_rows, implementation).float().cpu()


def reserve(space: KVSpace, pieces: Sequence[Piece]) -> list[Piece]:
    """Make room; returns the pieces in batch order (a layout with fixed rows orders them by row)."""
    for piece in pieces:
        reserved = space.reserve(piece.sequence, piece.start + piece.num_new)
        assert reserved, "the layout was sized for these sequences"
    if not space.fixed_rows:
        return list(pieces)
    return sorted(pieces, key=lambda piece: space.block_table(piece.sequence)[0])


def _run(
    joint: Joint,
    space: KVSpace,
    shape: KVShape,
    sequences: Sequence[Sequence[int]],
    pieces: Sequence[Piece],
    first_kept: Sequence[int],
    checked: bool,
) -> tuple[list[int], Tensor]:
    """One step; returns how many logits rows each piece has, and the rows."""
    entries: list[PackEntry] = []
    rows: list[int] = []
    counts: list[int] = []
    end = 0
    for piece in pieces:
        start = 0 if space.recompute else piece.start
        stop = piece.start + piece.num_new
        entries.append(PackEntry(piece.sequence, sequences[piece.sequence][start:stop], start))
        end += stop - start
        kept = stop - max(piece.start, min(first_kept[piece.sequence], stop))
        rows += range(end - kept, end)
        counts.append(kept)
    batch = pack(entries, space, shape, joint.device, logits_rows=rows)
    return counts, joint.forward(batch, checked=checked)
