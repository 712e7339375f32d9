"""The one entry for tuning: every launch parameter that a model's shapes need, measured once per machine.

Call it in set-up, never inside a measured window. What is on disk already, for this device, compiler and version of
the kernels, is not measured again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from infermix_kernels.attention_tune import ModelShape, attention_points
from infermix_kernels.launch import LaunchTable
from infermix_kernels.matmul_table import LinearShape, MatmulTable
from infermix_kernels.matmul_tune import linear_points
from infermix_kernels.search import Measure

__all__ = ["LinearShape", "ModelShape", "TuneReport", "TuneShapes", "tune_all"]

#: What is being measured, and the fraction of all work that is done.
Progress = Callable[[str, float], None]


@dataclass(frozen=True, kw_only=True)
class TuneShapes:
    """What a model asks of the kernels.

    `rows` are the numbers of rows of the linears (tokens of a step); `max_context_len` tokens and `max_num_seqs`
    bound the attention work that is tried.
    """

    attention: Sequence[ModelShape] = ()
    linears: Sequence[LinearShape] = ()
    rows: Sequence[int] = (1, 2, 4, 8, 16, 32, 64)
    max_context_len: int = 16384
    max_num_seqs: int = 64


@dataclass
class TuneReport:
    """Keys that were measured, and the files that hold them now."""

    measured: list[str] = field(default_factory=list)
    files: list[Path] = field(default_factory=list)


def tune_all(
    shapes: TuneShapes,
    folder: Path,
    device: torch.device,
    progress: Progress | None = None,
    *,
    measure: Measure | None = None,
) -> TuneReport:
    """Measure what the tables in `folder` do not have yet; a class of calls takes 10 to 30 s, mostly of compiling.

    `LaunchTable(folder, device)` and `MatmulTable(folder, device)` find the results when they are opened afterwards.
    Each result is written as soon as it is known, so that tuning can be interrupted. `measure` replaces the timing by
    CUDA graphs; without a CUDA device it is required. Raises `ValueError` and `RuntimeError` (no parameters work).
    """
    if measure is None and device.type != "cuda":
        raise ValueError(f"launch parameters are measured on a CUDA device, not on {device}")
    report = TuneReport()
    points = list(_points(shapes, folder, device, measure, report))
    for index, (name, run) in enumerate(points):
        if progress is not None:
            progress(name, index / len(points))
        run()
        report.measured.append(name)
    return report


def _points(
    shapes: TuneShapes, folder: Path, device: torch.device, measure: Measure | None, report: TuneReport
) -> Iterator[tuple[str, Callable[[], object]]]:
    attention, matmul = LaunchTable(folder, device), MatmulTable(folder, device)
    report.files = [attention.path, matmul.path]
    limits = {"max_context_len": shapes.max_context_len, "max_num_seqs": shapes.max_num_seqs}
    for model in dict.fromkeys(shapes.attention):
        for wanted, run in attention_points(model, attention, device, **limits, measure=measure):
            yield f"attention {wanted.key}", run
    for linear in dict.fromkeys(shapes.linears):
        yield from linear_points(linear, shapes.rows, matmul, device, measure)
