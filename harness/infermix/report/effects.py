"""What each part contributes over the whole matrix of cells: main effects and pairwise interactions.

The logarithm of the metric is fitted by least squares, so effects are factors: 1.20 means 20 % more than
the reference. A main effect comes from the additive model (in a full grid: the average over everything
else). An interaction is how far two changes together are from the product of each alone, from the model
with all pairs. Where cells are missing, only contrasts in the row space of the design can be estimated, and
the others say so. Intervals hold the noise between repeats of a cell, pooled; noise between processes is
not in them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from infermix.measure.stats import LEVEL, t_quantile
from infermix.record.record import Summary
from infermix.report.labels import ABSENT

Array = np.ndarray[Any, np.dtype[np.float64]]
Labels = np.ndarray[Any, np.dtype[np.str_]]
Levels = tuple[tuple[str, str], ...]

MAX_TERMS = 400
ESTIMABLE = 1e-8


@dataclass(frozen=True)
class Effect:
    """A factor on the metric. `levels`: (column, level) once for a main effect, twice for an interaction.

    `ratio` is `None` when the cells at hand cannot tell; `cells` counts those that have all the levels.
    """

    levels: Levels
    ratio: float | None
    low: float | None
    high: float | None
    cells: int

    @property
    def significant(self) -> bool:
        return self.low is not None and self.high is not None and not self.low <= 1 <= self.high


@dataclass(frozen=True)
class Effects:
    """All effects on one metric against `reference` (column -> level).

    `explained` is the share of the variance between cells that the main effects alone explain.
    """

    metric: str
    reference: Mapping[str, str]
    main: Sequence[Effect]
    interactions: Sequence[Effect]
    explained: float | None
    notes: Sequence[str] = field(default_factory=tuple)


@dataclass(frozen=True)
class _Cells:
    """The data of the fit: per cell its levels, the mean log of the metric, and the variance of that mean."""

    levels: Mapping[str, Labels]
    logs: Array
    variances: Array | None
    df: int


def effects(cells: Sequence[tuple[Summary, Mapping[str, str]]], metric: str) -> Effects | None:
    """Attribute `metric` over cells given with their mix labels; `None` when fewer than two mixes can be
    compared.
    """
    usable = [(record, mix) for record, mix in cells if _positive(record, metric)]
    chosen, notes = _one_engine(usable)
    factors = _factors([mix for _, mix in chosen])
    if not factors:
        return None
    data = _data(chosen, metric)
    reference = _reference(chosen, factors)
    terms = [((name, level),) for name in factors for level in factors[name] if level != reference[name]]
    if len(terms) > MAX_TERMS:
        return None
    main, explained = _fit(data, terms, terms)
    pairs = [(a[0], b[0]) for a, b in combinations(terms, 2) if a[0][0] != b[0][0]]
    interactions: list[Effect] = []
    if len(terms) + len(pairs) <= MAX_TERMS:
        interactions, _ = _fit(data, [*terms, *pairs], pairs)
    else:
        notes.append(f"interactions are not computed: {len(pairs)} pairs of levels")
    notes.extend(_missing(data.levels, factors))
    return Effects(metric, reference, main, interactions, explained, tuple(notes))


def _positive(record: Summary, metric: str) -> bool:
    found = record.metrics.get(metric)
    return found is not None and found.value > 0 and all(sample > 0 for sample in found.samples)


def _one_engine(
    cells: Sequence[tuple[Summary, Mapping[str, str]]],
) -> tuple[list[tuple[Summary, Mapping[str, str]]], list[str]]:
    """Cells that host the same roles (the largest such set): a whole engine has no parts to attribute to."""
    groups: dict[frozenset[str], list[tuple[Summary, Mapping[str, str]]]] = {}
    for record, mix in cells:
        hosted = frozenset(column for column, label in mix.items() if label != ABSENT and column != "settings")
        groups.setdefault(hosted, []).append((record, mix))
    if not groups:
        return [], []
    chosen = max(groups.values(), key=len)
    left = len(cells) - len(chosen)
    return chosen, [f"cells with other roles (whole engines) take no part: {left}"] if left else []


def _factors(mixes: Sequence[Mapping[str, str]]) -> dict[str, list[str]]:
    """Columns with at least two levels, each with its levels in order of their name."""
    columns = mixes[0] if mixes else {}
    found = {column: sorted({mix[column] for mix in mixes}) for column in columns}
    return {column: levels for column, levels in found.items() if len(levels) > 1}


def _reference(
    cells: Sequence[tuple[Summary, Mapping[str, str]]], factors: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """The baseline's levels; without a baseline the most frequent ones."""
    for record, mix in cells:
        if record.baseline:
            return {name: mix[name] for name in factors}
    counts = {
        name: {level: sum(mix[name] == level for _, mix in cells) for level in levels}
        for name, levels in factors.items()
    }
    return {name: max(counts[name], key=counts[name].__getitem__) for name in factors}


def _data(cells: Sequence[tuple[Summary, Mapping[str, str]]], metric: str) -> _Cells:
    samples = []
    for record, _ in cells:
        found = record.metrics[metric]
        samples.append(np.log(found.samples or [found.value]))
    counts = np.array([len(each) for each in samples])
    df = int((counts - 1).sum())
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in samples)
    variances = (squares / df) / counts if df else None
    levels = {name: np.array([mix[name] for _, mix in cells]) for name in cells[0][1]}
    return _Cells(levels, np.array([each.mean() for each in samples]), variances, df)


def _fit(data: _Cells, terms: Sequence[Levels], wanted: Sequence[Levels]) -> tuple[list[Effect], float | None]:
    """Effects of `wanted`, a subset of `terms`, in the model with an intercept and all `terms`."""
    design = np.column_stack([np.ones(len(data.logs)), *(_indicator(data.levels, term) for term in terms)])
    gram = design.T @ design
    inverse = np.linalg.pinv(gram, hermitian=True)
    weights = inverse @ design.T
    projection = inverse @ gram
    quantile = t_quantile((1 + LEVEL) / 2, data.df) if data.df else 0.0
    found = []
    for term in wanted:
        row = 1 + terms.index(term)
        count = int(design[:, row].sum())
        unit = np.zeros(len(gram))
        unit[row] = 1.0
        if float(np.abs(projection[row] - unit).max()) > ESTIMABLE:
            found.append(Effect(term, None, None, None, count))
        else:
            found.append(_effect(term, weights[row], data, quantile, count))
    return found, _explained(data.logs, design @ (weights @ data.logs))


def _indicator(levels: Mapping[str, Labels], term: Levels) -> Array:
    return np.all(np.stack([levels[name] == level for name, level in term]), axis=0).astype(np.float64)


def _effect(term: Levels, weights: Array, data: _Cells, quantile: float, count: int) -> Effect:
    estimate = float(weights @ data.logs)
    if data.variances is None:
        return Effect(term, math.exp(estimate), None, None, count)
    half = quantile * math.sqrt(float(weights**2 @ data.variances))
    return Effect(term, math.exp(estimate), math.exp(estimate - half), math.exp(estimate + half), count)


def _explained(logs: Array, fitted: Array) -> float | None:
    total = float(((logs - logs.mean()) ** 2).sum())
    return 1 - float(((logs - fitted) ** 2).sum()) / total if total > 0 else None


def _missing(levels: Mapping[str, Labels], factors: Mapping[str, Sequence[str]]) -> list[str]:
    grid = math.prod(len(each) for each in factors.values())
    present = len(set(zip(*(levels[name].tolist() for name in factors), strict=True)))
    if present == grid:
        return []
    return [
        f"{present} of the {grid} cells of the grid have a figure: main effects assume that the missing ones follow "
        "the product of the others"
    ]
