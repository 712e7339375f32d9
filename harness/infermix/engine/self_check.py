"""Proof at load that the packed path computes what the model computes.

Random tokens run twice: packed through the joint (several sequences of different lengths, joining and finishing,
chunked prefill mixed with decode), and one by one through transformers' own eager full forward. Logits are compared:
greedy tokens alone would let a wrong scale or shifted positions pass. What hides in the rounding of a whole model is
left to `engine.attention_check`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from infermix.engine.attention_check import check_attention_part
from infermix.engine.layout_loss import PlainAttention, PlainlyWritten
from infermix.engine.walk import full_logits, packed_logits, random_sequences
from infermix.errors import Unsupported, WrongResult
from infermix.roles.families import DRIVEN, STATEFUL

if TYPE_CHECKING:
    from torch import Tensor, nn

    from infermix.engine.bridge import Joint
    from infermix.roles.attention import AttentionBackend
    from infermix.roles.kv_space import KVLayout

#: Short enough for any machine, uneven, none a multiple of a usual block or chunk.
LENGTHS = (5, 27, 14)

#: A window up to this many tokens is crossed by one extra sequence, far enough that a ring of blocks which holds the
#: window and one chunk wraps around; longer ones are reported as not crossed.
MAX_CROSSED_WINDOW = 1024
_CROSSED_BY = 40
_KEPT_ROWS = 32

#: fp32 rows of one linear differ by this much (relative) between batch sizes.
_BATCH_NOISE = 3e-5
_FLOAT32_TOLERANCE = 1e-4
#: Our error may be this many times what separates two of transformers' own attention implementations.
_FLOOR_FACTOR = 2
#: What a lossy layout costs differs between two ways to compute: numbers near the middle of a step fall either way.
_LOSS_FACTOR = 1.5
#: Stands in the record where attention and KV store cannot be compared with their plain meaning.
LOSSY = "not checked alone: attention or KV layout is lossy"
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


@dataclass(frozen=True)
class Reference:
    """Random sequences and what the model says to them: the last rows of its own eager full forward, fp32 on the CPU.

    `of` names the state of the model that was asked, for the record. `judge` is how rows are to be compared,
    `noise_floor` how far apart the model's own answers are by that measure: with transformers' eager and SDPA
    attention, and for rounded activations with fewer tokens in a forward and with embeddings off by rounding.
    """

    sequences: tuple[tuple[int, ...], ...]
    logits: tuple[Tensor, ...]
    windows_crossed: bool
    of: str
    judge: str
    noise_floor: float


def collect_reference(
    model: nn.Module,
    joint: Joint,
    *,
    seed: int = 0,
    lengths: Sequence[int] = LENGTHS,
    of: str = "the model",
    rounded: bool = False,
) -> Reference:
    """First half of the check: ask the model as it is now. `joint` is detached.

    `rounded`: linears may round activations to few bits, each row or all of them together.

    Whatever changes the model without being allowed to change its logits (a lossless quantizer, model transforms)
    has to come afterwards, so that the check covers it.
    """
    windows = [group.window for group in joint.groups if group.window is not None]
    crossed = [window for window in windows if window <= MAX_CROSSED_WINDOW]
    lengths = [*lengths, *(window + _CROSSED_BY for window in crossed if window + _CROSSED_BY > max(lengths))]
    sequences = random_sequences(lengths, _vocab_size(model), seed)
    logits = tuple(full_logits(joint, ids, _KEPT_ROWS) for ids in sequences)
    judge = _judge(joint)
    floors = [_noise_floor(joint, sequences, logits, judge)]
    if rounded:
        nudged = _nudged_floor(joint, sequences, logits, judge)
        floors.append(nudged / _FLOOR_FACTOR)
        if joint.causal:
            floors.append(_company_floor(joint, sequences, logits, judge))
    return Reference(
        sequences=tuple(map(tuple, sequences)),
        logits=logits,
        windows_crossed=len(crossed) == len(windows),
        of=of,
        judge=judge,
        noise_floor=max(floors),
    )


def self_check(
    model: nn.Module,
    joint: Joint,
    attention: AttentionBackend,
    layout: KVLayout,
    *,
    device: torch.device,
    dtype: torch.dtype,
    reference: Reference | None = None,
    exact: bool = True,
    kv_error: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Compare packed with full logits, then attention with its plain meaning; returns the figures for the record.

    `reference` is collected here when the caller has none. `exact` says that neither `attention` nor `layout` loses
    anything but rounding; without it, attention is not checked on its own, unless `kv_error` states how much the
    layout alone loses. Then logits may be off by what that costs, measured in the plainest way of writing and reading
    it. Uses stores of its own, and leaves the joint detached. Raises `WrongResult` when a relative error exceeds what
    the dtype, or the model's own sensitivity to rounding, explains.
    """
    reference = reference or collect_reference(model, joint, seed=seed)
    packed = _packed_or_refused(joint, attention, layout, reference.sequences, device, dtype)
    error = JUDGES[reference.judge](packed, reference.logits)
    loss = None if kv_error is None else _layout_loss(joint, layout, reference, device, dtype)
    tolerance = max(dtype_tolerance(dtype), _FLOOR_FACTOR * reference.noise_floor) + _LOSS_FACTOR * (loss or 0.0)
    dtype_name = str(dtype).removeprefix("torch.")
    if not error <= tolerance:
        raise WrongResult(
            f"self-check failed: packed logits differ from transformers' own full forward by {error:.2e} "
            f"(relative, {reference.judge}, {dtype_name}; rounding explains {tolerance:.1e})"
        )
    return {
        "relative_error": error,
        "judged_by": reference.judge,
        "worst_row_error": float(row_errors(packed, reference.logits).max()),
        "tolerance": tolerance,
        "noise_floor": reference.noise_floor,
        "dtype": dtype_name,
        "num_sequences": len(reference.sequences),
        "num_tokens": sum(map(len, reference.sequences)),
        "windows_crossed": reference.windows_crossed,
        "reference": f"transformers eager full forward of {reference.of}",
        **({} if loss is None else {"layout_loss": loss}),
        "attention": _attention_alone(joint, attention, layout, reference, device, dtype, seed, kv_error)
        if exact or kv_error is not None
        else LOSSY,
    }


def _layout_loss(
    joint: Joint, layout: KVLayout, reference: Reference, device: torch.device, dtype: torch.dtype
) -> float:
    """The error of the logits when the layout is written plainly and read by plain attention."""
    packed = _packed_or_refused(joint, PlainAttention(), PlainlyWritten(layout), reference.sequences, device, dtype)
    return JUDGES[reference.judge](packed, reference.logits)


def _attention_alone(
    joint: Joint,
    attention: AttentionBackend,
    layout: KVLayout,
    reference: Reference,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    kv_error: float | None,
) -> dict[str, Any]:
    lengths = [len(ids) for ids in reference.sequences]
    return check_attention_part(
        joint, attention, layout, lengths, device=device, dtype=dtype, seed=seed, kv_error=kv_error
    )


def relative_error(seen: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Norm of the difference over norm of the expected, all rows together."""
    left, right = torch.cat(list(seen)).double(), torch.cat(list(expected)).double()
    return float((left - right).norm() / right.norm())


def row_errors(seen: Sequence[Tensor], expected: Sequence[Tensor]) -> Tensor:
    """The same for every row, `[R]`."""
    left, right = torch.cat(list(seen)).double(), torch.cat(list(expected)).double()
    return (left - right).norm(dim=-1) / right.norm(dim=-1).clamp_min(1e-30)


def median_row_error(seen: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    return float(row_errors(seen, expected).median())


JUDGES: Mapping[str, Callable[[Sequence[Tensor], Sequence[Tensor]], float]] = {
    "all rows": relative_error,
    "median row": median_row_error,
}


def _judge(joint: Joint) -> str:
    """In 16 bits a near tie may send a token to another expert: such rows differ entirely, and rightly so."""
    config = joint.model.config.get_text_config(decoder=True)
    experts = [getattr(config, name, None) for name in _EXPERT_KEYS]
    routed = any(isinstance(number, int) and number > 1 for number in experts)
    return "median row" if routed and joint.model.dtype.itemsize < 4 else "all rows"


def dtype_tolerance(dtype: torch.dtype) -> float:
    """The relative error that rounding explains in any model.

    fp32: 1e-4. 16-bit dtypes: four times their eps; SmolLM2 and tiny random models of a dozen families differ by two.
    """
    return _FLOAT32_TOLERANCE if dtype.itemsize >= 4 else 4 * torch.finfo(dtype).eps


def _noise_floor(joint: Joint, sequences: Sequence[Sequence[int]], full: Sequence[Tensor], judge: str) -> float:
    """0 in fp32, and where transformers has only one implementation."""
    if joint.model.dtype.itemsize >= 4 or not joint.has_sdpa:
        return 0.0
    return JUDGES[judge]([full_logits(joint, ids, _KEPT_ROWS, "sdpa") for ids in sequences], full)


def _company_floor(joint: Joint, sequences: Sequence[Sequence[int]], full: Sequence[Tensor], judge: str) -> float:
    """How far the model's own logits of a token are from those that it gives when fewer tokens follow.

    A causal model gives the same ones but for rounding. LLM.int8, as its library does it, chooses the columns that it
    keeps in 16 bits for all tokens of a forward at once.
    """
    seen, expected = [], []
    for ids, rows in zip(sequences, full, strict=True):
        for end in {len(ids) // 3, 2 * len(ids) // 3} - {0}:
            shorter, first = full_logits(joint, ids[:end], _KEPT_ROWS), len(ids) - len(rows)
            start = max(first, end - len(shorter))
            if start < end:
                seen.append(shorter[start - end :])
                expected.append(rows[start - first : end - first])
    return JUDGES[judge](seen, expected)


def _nudged_floor(joint: Joint, sequences: Sequence[Sequence[int]], full: Sequence[Tensor], judge: str) -> float:
    """How far the model's own logits move when its embeddings move by what batch sizes alone change in a linear.

    A sum that lies between two steps of 8-bit activations falls to either side, and everything behind it with it. The
    nudge is as large as rounding gets, so it counts as the whole of what may be seen.
    """
    draw = torch.Generator().manual_seed(0)
    size = max(_BATCH_NOISE, torch.finfo(joint.model.dtype).eps)

    def nudge(_: Any, __: Any, embedded: Tensor) -> Tensor:
        return embedded * (1 + size * torch.randn(embedded.shape, generator=draw).to(embedded))

    hook = joint.model.get_input_embeddings().register_forward_hook(nudge)
    try:
        return JUDGES[judge]([full_logits(joint, ids, _KEPT_ROWS) for ids in sequences], full)
    finally:
        hook.remove()


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
        if joint.model_type in DRIVEN | STATEFUL:
            raise
        raise Unsupported(f"self-check failed: {joint.model_type} does not run packed: {error}") from error


def _vocab_size(model: Any) -> int:
    return int(model.get_input_embeddings().num_embeddings)
