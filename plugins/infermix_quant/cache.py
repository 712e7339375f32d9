"""Quantized models in the user's cache folder, as standard checkpoints, found again by content."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from infermix.measure.clock import now_ns
from infermix.paths import cache_dir
from infermix.roles.quantizer import QuantizationReport, QuantizerContext
from infermix.toolkit.calibration import samples_digest
from safetensors import SafetensorError
from torch import nn

from infermix_quant import common
from infermix_quant.checkpoint_read import PackedCheckpoint
from infermix_quant.checkpoint_write import CONFIG, WEIGHTS, save_checkpoint
from infermix_quant.formats import Unsaveable
from infermix_quant.quantizer_checkpoint import read_linears

#: Part of the key: raised when an algorithm or a format changes what comes out.
_VERSION = 3
_REPORT = "infermix_report.json"
_FACTS = ("method", "skipped", "details", "precision_bits", "files")


def cached(
    model: nn.Module,
    context: QuantizerContext,
    name: str,
    options: msgspec.Struct,
    form: str,
    quantize: Callable[[], QuantizationReport],
) -> QuantizationReport:
    """What `quantize()` makes of `model`, from the cache where it was made before.

    The key is the digest of the unquantized weights, the dtype, the method with its options, and the token ids of the
    calibration. `details` of the report say how long the method took (`quantize_s`, also when that was earlier),
    where the checkpoint (format `form`) lies and whether it was there, or why it could not be kept. Dummy weights are
    never kept. An entry whose files are no longer those that were written is thrown away and made again; `replaced`
    says what was wrong with it.
    """
    if context.directory is None or not context.model_digest:
        return quantize()
    target = cache_dir("quantized") / f"{name}-{_key(context, name, options, form)}"
    damage = _damage(target) if target.is_dir() else None
    if target.is_dir() and damage is None:
        return _restore(model, context, target)
    if damage is not None:
        shutil.rmtree(target)
    start = now_ns()
    report = quantize()
    report = replace(report, details={**report.details, "quantize_s": (now_ns() - start) / 1e9})
    settings = {**msgspec.to_builtins(options), "format": form}
    try:
        _save(model, context.directory, target, settings, report)
    except (Unsaveable, OSError, SafetensorError) as reason:  # a full disk must not cost what was just quantized
        return replace(report, details={**report.details, "checkpoint": f"not kept: {reason}"})
    found = {} if damage is None else {"replaced": damage}
    return replace(report, details={**report.details, "checkpoint": target.name, "from_cache": False, **found})


def _key(context: QuantizerContext, name: str, options: msgspec.Struct, form: str) -> str:
    given = {key: value for key, value in msgspec.to_builtins(options).items() if key != "calibration"}
    samples = samples_digest(context.calibration()) if context.calibration else ""
    content = [_VERSION, context.model_digest, context.dtype, name, given, samples, form]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]


def _save(
    model: nn.Module, source: Path, target: Path, settings: Mapping[str, Any], report: QuantizationReport
) -> None:
    """Complete or absent: built aside and renamed. Whoever comes second drops its own."""
    aside = Path(tempfile.mkdtemp(prefix=f"{target.name}.", dir=target.parent))
    try:
        save_checkpoint(model, aside, source, settings)
        facts = {"method": report.method, "skipped": report.skipped, "details": report.details}
        facts["files"] = {name: _digest(aside / name) for name in (CONFIG, WEIGHTS)}
        (aside / _REPORT).write_text(json.dumps({**facts, "precision_bits": report.precision_bits}), encoding="utf-8")
        if not target.exists():
            os.rename(aside, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _damage(directory: Path) -> str | None:
    """What is wrong with an entry, `None` when its files are those that were written."""
    try:
        facts = json.loads((directory / _REPORT).read_text(encoding="utf-8"))
        if missing := [key for key in _FACTS if key not in facts]:
            return f"{_REPORT} has no {missing[0]}"
        files = facts["files"]
        changed = [name for name in (CONFIG, WEIGHTS) if _digest(directory / name) != files[name]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"the entry cannot be read: {error}"
    return f"{changed[0]} is not the file that was written" if changed else None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _restore(model: nn.Module, context: QuantizerContext, directory: Path) -> QuantizationReport:
    packed = PackedCheckpoint(directory, context.device)
    with torch.no_grad():
        own = model.state_dict()
        for name, value in packed.plain_tensors().items():
            if name in own:
                own[name].copy_(value)
    made = read_linears(model, packed, context)
    facts = json.loads((directory / _REPORT).read_text(encoding="utf-8"))
    details = {**facts["details"], "checkpoint": directory.name, "from_cache": True}
    return common.report(facts["method"], made, tuple(facts["skipped"]), details, facts["precision_bits"])
