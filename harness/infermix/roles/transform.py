"""Role: model transform. Changes modules of a loaded model in place: merged products, fused modules, compilation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from torch import nn

    from infermix.roles.facts import ModelFacts

#: When a transform is applied. Structure changes come before the quantizer, so that it sees the merged linears;
#: what works on the modules that are really called (compilation) comes after it.
Stage = Literal["before_quantizer", "after_quantizer"]
STAGES: tuple[Stage, ...] = ("before_quantizer", "after_quantizer")


@dataclass(frozen=True, kw_only=True)
class TransformReport:
    """What was really done.

    `replaced` counts modules by kind (`{"rms_norm": 25}`), `kept` maps what did not match to the reason, `verified`
    maps a kind of `replaced` to the largest relative error that its modules showed on random input.
    """

    name: str
    replaced: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)
    verified: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class TransformContext:
    """`max_num_seqs` bounds the rows of a decode step; random input for verification is drawn from `seed`.

    `max_model_len` bounds the positions, 0 when it is not known. With `tune`, kernels that a transform brings are
    measured for the model's shapes where this machine's files do not hold them yet.
    """

    device: str
    dtype: str
    seed: int
    facts: ModelFacts
    max_num_seqs: int
    max_model_len: int = 0
    tune: bool = False
    progress: Callable[[str, float], None] = lambda phase, fraction: None


class ModelTransform(Protocol):
    """May have an attribute `selector`, a `infermix.toolkit.selection.TokenSelector` once it is applied: tokens are
    then picked from the logits by it. Of several the last one counts."""

    stage: Stage

    def apply(self, model: nn.Module, context: TransformContext) -> TransformReport:
        """Change `model` in place, so that its logits stay the same up to rounding.

        A module that does not match is kept, and the report says why. Raises `Unsupported` when nothing of the model
        matches, `WrongResult` when a replacement does not compute what it replaces.
        """
        ...
