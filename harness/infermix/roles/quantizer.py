"""Role: quantizer. Converts the linears of a loaded model in place, or says what to load instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class QuantizationReport:
    """What was really done. `bits_per_weight` counts scales and zero points; `kernels` maps linear name -> kernel."""

    method: str
    bits_per_weight: float
    quantized_bytes: int
    kernels: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class QuantizerContext:
    """`calibration()` yields token-id lists when the experiment names calibration data.

    With `tune`, kernels of the new linears are measured for their shapes where this machine's files do not hold them.
    """

    device: str
    dtype: str
    calibration: Callable[[], Sequence[Sequence[int]]] | None = None
    progress: Callable[[str, float], None] | None = None
    tune: bool = False


class Quantizer(Protocol):
    def load_arguments(self) -> Mapping[str, Any]:
        """Extra keyword arguments for `from_pretrained` (load-time quantizers); empty otherwise."""
        ...

    def apply(self, model: nn.Module, context: QuantizerContext) -> QuantizationReport:
        """Replace linears of `model` in place. Raises `UserError` when an option does not fit a layer's shape."""
        ...
