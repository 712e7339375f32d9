"""Hand a loaded model to a quantizer, with the calibration data that its options ask for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infermix.roles.quantizer import QuantizationReport, Quantizer, QuantizerContext
from infermix.toolkit.calibration import CalibratedOptions, CalibrationData, draw_calibration

if TYPE_CHECKING:
    from infermix.engine.loader import LoadedModel
    from infermix.roles.engine import EngineContext


def quantize(
    loaded: LoadedModel,
    quantizer: Quantizer,
    options: Any,
    context: EngineContext,
    tokenizer: Any,
    *,
    tune: bool = False,
) -> QuantizationReport:
    """Convert `loaded.model` in place; `details` of the report say what it was calibrated on.

    Raises `UserError` for options that do not fit the model or a corpus that cannot be used.
    """
    calibration = _calibration(options, context, tokenizer)
    report = quantizer.apply(
        loaded.model,
        QuantizerContext(
            device=context.machine.device,
            dtype=context.dtype,
            calibration=None if calibration is None else lambda: calibration.samples,
            progress=context.progress,
            tune=tune,
            model_digest=context.facts.digest,
            directory=loaded.directory,
            file=loaded.file,
        ),
    )
    if calibration is None:
        return report
    return replace(report, details={**report.details, "calibration": dict(calibration.facts)})


def _calibration(options: Any, context: EngineContext, tokenizer: Any) -> CalibrationData | None:
    """`None` for a quantizer that looks at no activations."""
    if not (isinstance(options, CalibratedOptions) and options.calibrates):
        return None
    return draw_calibration(
        options.calibration,
        tokenizer,
        vocab_size=context.facts.vocab_size,
        max_tokens=context.facts.max_position_embeddings,
        base=context.base or Path(),
    )
