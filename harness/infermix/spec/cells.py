"""Cells out of resolved experiments in YAML shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from infermix.spec.digest import Digests
from infermix.spec.experiment import (
    DEFAULT_ENGINE,
    DEFAULT_PARTS,
    Cell,
    Experiment,
    Limits,
    Measure,
    ModelSource,
    Use,
)
from infermix.spec.naming import cell_names, collapse
from infermix.spec.sweep import Point

#: A resolved experiment in YAML shape, short forms expanded.
Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """What all cells of a file share."""

    name: str
    base: Path
    baseline: Mapping[str, Any]


def completed(row: Row) -> Row:
    """Options without a name belong to the default component of their role."""
    engine, parts = row.get("engine"), row.get("parts")
    if engine is not None:
        row["engine"] = {"use": DEFAULT_ENGINE, **engine}
    if parts is not None:
        row["parts"] = {role: {"use": DEFAULT_PARTS[role], **part} for role, part in parts.items()}
    return row


def build_cells(
    rows: Sequence[Row], points: Sequence[Point], baselines: frozenset[int], settings: Settings
) -> tuple[tuple[Cell, ...], dict[int, Point]]:
    """The cells, and the point behind each of them by its index. Cells that resolve to the same one are merged."""
    digests = Digests(settings.base)
    experiments = [_experiment(row, settings) for row in rows]
    first: dict[str, int] = {}
    for index, experiment in enumerate(experiments):
        first.setdefault(digests.of(experiment), index)
    overrides = [_overrides(points[index]) for index in first.values()]
    names = cell_names(overrides, list(first), settings.name)
    cells = tuple(
        Cell(
            index=position,
            name=names[position],
            experiment=experiments[index],
            overrides=overrides[position],
            digest=digest,
            baseline=index in baselines,
            data=digests.data(experiments[index]),
        )
        for position, (digest, index) in enumerate(first.items())
    )
    return cells, {position: points[index] for position, index in enumerate(first.values())}


def _overrides(point: Point) -> dict[str, Any]:
    return {".".join(path): collapse(assigned.value) for path, assigned in point.items()}


def _experiment(row: Row, settings: Settings) -> Experiment:
    return Experiment(
        name=settings.name,
        model=msgspec.convert(row["model"], ModelSource),
        workload=_use(row["workload"]),
        device=row.get("device", "auto"),
        dtype=row.get("dtype", "auto"),
        engine=_use(row["engine"]) if "engine" in row else Use(DEFAULT_ENGINE),
        parts={role: _use(part) for role, part in row.get("parts", {}).items()},
        transforms=tuple(_use(item) for item in row.get("transforms", ())),
        measure=msgspec.convert(row.get("measure", {}), Measure),
        limits=msgspec.convert(row.get("limits", {}), Limits),
        quality=tuple(_use(item) for item in row.get("quality", ())),
        seed=row.get("seed", 0),
        baseline=dict(settings.baseline),
        base=str(settings.base),
    )


def _use(value: Row) -> Use:
    return Use(value["use"], {key: item for key, item in value.items() if key != "use"})
