"""Proof at load that the packed path computes what the model computes.

Random tokens run twice: packed through the joint (several sequences of different lengths, joining and finishing,
chunked prefill mixed with decode), and one by one through transformers' own eager full forward. Logits are compared:
greedy tokens alone would let a wrong scale or shifted positions pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from infermix.engine.packing import PackEntry, pack
from infermix.errors import Unsupported, WrongResult
from infermix.roles.families import DRIVEN
from infermix.roles.kv_space import KVBudget

if TYPE_CHECKING:
    from torch import Tensor, nn

    from infermix.engine.bridge import Joint
    from infermix.roles.attention import AttentionBackend
    from infermix.roles.kv_space import KVLayout, KVShape, KVSpace

#: Short enough for any machine, uneven, none a multiple of a usual block or chunk.
LENGTHS = (5, 27, 14)
CHUNK = 11
NUM_DECODE = 3

#: A window up to this many tokens is crossed by one extra sequence; longer ones are reported as not crossed.
MAX_CROSSED_WINDOW = 1024
_KEPT_ROWS = 32

#: fp32 rows of one linear differ by 3e-5 between batch sizes.
_FLOAT32_TOLERANCE = 1e-4


class Piece(NamedTuple):
    """New tokens of one sequence in one step."""

    sequence: int
    start: int
    num_new: int


def self_check(
    model: nn.Module,
    joint: Joint,
    attention: AttentionBackend,
    layout: KVLayout,
    *,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    lengths: Sequence[int] = LENGTHS,
) -> dict[str, Any]:
    """Compare packed with full logits; returns the figures for the record.

    Uses a store of its own, and leaves the joint detached. Raises `WrongResult` when the relative error (norm of the
    difference over norm of the reference, over all compared rows) exceeds what the dtype explains.
    """
    windows = [group.window for group in joint.groups if group.window is not None]
    crossed = [window for window in windows if window <= MAX_CROSSED_WINDOW]
    lengths = [*lengths, *(window + 5 for window in crossed if window + 5 > max(lengths))]
    sequences = random_sequences(lengths, _vocab_size(model), seed)
    packed = _packed_or_refused(joint, attention, layout, sequences, device, dtype)
    full = [full_logits(joint, ids, _KEPT_ROWS) for ids in sequences]
    error, worst = relative_error(packed, full)
    tolerance = dtype_tolerance(dtype, len(joint.layers))
    dtype_name = str(dtype).removeprefix("torch.")
    if not error <= tolerance:
        raise WrongResult(
            f"self-check failed: packed logits differ from transformers' own full forward by {error:.2e} "
            f"(relative, {dtype_name}; rounding explains {tolerance:.1e})"
        )
    return {
        "relative_error": error,
        "worst_row_error": worst,
        "tolerance": tolerance,
        "dtype": dtype_name,
        "num_sequences": len(lengths),
        "num_tokens": sum(lengths),
        "windows_crossed": len(crossed) == len(windows),
        "reference": "transformers eager full forward",
    }


def _packed_or_refused(
    joint: Joint,
    attention: AttentionBackend,
    layout: KVLayout,
    sequences: Sequence[Sequence[int]],
    device: torch.device,
    dtype: torch.dtype,
) -> list[Tensor]:
    """In a family that was never tried, shapes that do not fit are a property of the model, not a bug of ours."""
    try:
        return packed_logits(joint, attention, layout, sequences, device=device, dtype=dtype, kept_rows=_KEPT_ROWS)
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError, TypeError) as error:
        if joint.model_type in DRIVEN:
            raise
        raise Unsupported(f"self-check failed: {joint.model_type} does not run packed: {error}") from error


def dtype_tolerance(dtype: torch.dtype, num_layers: int) -> float:
    """The relative error that rounding explains.

    fp32: 1e-4. 16-bit dtypes: every layer rounds its attention output and its sums into the residual stream a few
    times, independently in both paths, so the errors add up like a random walk: 2 eps sqrt(layers).
    """
    if dtype in (torch.float32, torch.float64):
        return _FLOAT32_TOLERANCE
    return 2 * torch.finfo(dtype).eps * max(num_layers, 1) ** 0.5


def _vocab_size(model: Any) -> int:
    return int(model.get_input_embeddings().num_embeddings)


def random_sequences(lengths: Sequence[int], vocab_size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]


def steps(lengths: Sequence[int], chunk: int = CHUNK, num_decode: int = NUM_DECODE) -> Iterator[list[Piece]]:
    """A schedule: sequence i joins at step i, is prefilled in chunks, ends with `num_decode` single tokens."""
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
    shape = layout.shape(joint.groups, KVBudget(len(lengths), max(lengths), dtype.itemsize))
    space = layout.space(shape)
    joint.attach(attention, layout.store(shape, device, dtype))
    collected: list[list[Tensor]] = [[] for _ in sequences]
    try:
        for number, pieces in enumerate(steps(lengths, chunk, num_decode)):
            first_kept = [max(0, length - kept_rows) for length in lengths]
            ordered = _reserve(space, pieces)
            rows, logits = _run(joint, space, shape, sequences, ordered, first_kept, checked=number == 0)
            for piece, part in zip(ordered, logits.float().cpu().split(rows), strict=True):
                collected[piece.sequence].append(part)
                if piece.start + piece.num_new == lengths[piece.sequence]:
                    space.release(piece.sequence)
    finally:
        joint.detach()
    return [torch.cat(parts) for parts in collected]


def full_logits(joint: Joint, ids: Sequence[int], kept_rows: int) -> Tensor:
    """The model's own logits of the last `kept_rows` tokens, fp32 on the CPU."""
    return joint.reference(torch.tensor(ids, device=joint.device), kept_rows).float().cpu()


def relative_error(seen: Sequence[Tensor], expected: Sequence[Tensor]) -> tuple[float, float]:
    """Over all rows, and of the worst row."""
    left, right = torch.cat(list(seen)).double(), torch.cat(list(expected)).double()
    difference = left - right
    rows = difference.norm(dim=-1) / right.norm(dim=-1).clamp_min(1e-30)
    return float(difference.norm() / right.norm()), float(rows.max())


def _reserve(space: KVSpace, pieces: Sequence[Piece]) -> list[Piece]:
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
