"""Role: quantizer. Converts the linears of a loaded model in place, or says what to load instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from infermix.roles.component import Options

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn


class QuantizerOptions(Options, frozen=True, kw_only=True):
    """Base of quantizer options that name files: what `plan` may ask before anything runs."""

    def check(self, base: Path) -> None:
        """Read the files that the options name, relative to `base`, before anything runs.

        Raises `UserError` for one that is missing or holds bad data.
        """


@dataclass(frozen=True)
class QuantizationReport:
    """What was really done. `bits_per_weight` counts scales and zero points; `kernels` maps linear name -> kernel.

    `details` are further facts for the record: plain data. `precision_bits`: significant bits of the coarsest
    numbers, where those are fewer than the stored ones (FP8 E4M3 has 4).
    """

    method: str
    bits_per_weight: float
    quantized_bytes: int
    kernels: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    precision_bits: float | None = None


@dataclass(frozen=True)
class QuantizerContext:
    """`calibration()` yields token-id lists of equal length when the quantizer asks for calibration data.

    `model_digest` identifies the unquantized weights, `directory` holds the model's files (`None` for dummy weights),
    `file` is the GGUF file from which they were converted (`None` for other models).
    With `tune`, kernels of the new linears are measured for their shapes where this machine's files do not hold them.
    """

    device: str
    dtype: str
    calibration: Callable[[], Sequence[Sequence[int]]] | None = None
    progress: Callable[[str, float], None] | None = None
    tune: bool = False
    model_digest: str = ""
    directory: Path | None = None
    file: Path | None = None


class Quantizer(Protocol):
    def load_arguments(self) -> Mapping[str, Any]:
        """Extra keyword arguments for `from_pretrained` (load-time quantizers); empty otherwise.

        A quantizer that reads packed weights of a checkpoint itself sets the attribute `reads_packed`: then the
        `quantization_config` is kept from transformers, and matrices that the files hold in packed form may be
        missing. It provides `weights:METHOD` for every `quant_method` that it reads.
        """
        ...

    def apply(self, model: nn.Module, context: QuantizerContext) -> QuantizationReport:
        """Replace linears of `model` in place. Raises `UserError` when an option does not fit a layer's shape."""
        ...
