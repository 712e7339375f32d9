"""Speed against quality as inline SVG, with the Pareto front marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

from infermix.report.board import SPEED, Row, Table
from infermix.report.labels import ABSENT

WIDTH, HEIGHT = 760, 380
LEFT, RIGHT, TOP, BOTTOM = 76, 20, 16, 52
LABEL_GAP, MAX_LABELS = 24, 8


@dataclass(frozen=True)
class Point:
    """A row in the plot: `x`, `y` in pixels, `on_front` when no other row is at least as good in both and
    better in one.
    """

    index: int
    label: str
    x: float
    y: float
    quality: float
    speed: float
    on_front: bool


@dataclass(frozen=True)
class Tick:
    position: float
    text: str


@dataclass(frozen=True)
class Scatter:
    """Everything that the template draws. `quality` names the metric of the x axis; better is always to the
    right.
    """

    quality: str
    better: str
    points: Sequence[Point]
    x_ticks: Sequence[Tick]
    y_ticks: Sequence[Tick]
    front: str

    @property
    def named(self) -> list[Point]:
        """Points whose labels are drawn: the front, without those that would cover an earlier label."""
        named: list[Point] = []
        for point in self.points:
            if point.on_front and all(abs(point.y - other.y) >= LABEL_GAP for other in named):
                named.append(point)
        return named[:MAX_LABELS]


def scatter(table: Table) -> Scatter | None:
    """The plot of one table over the quality metric that most rows have; `None` with fewer than two points."""
    name = _metric(table)
    if name is None:
        return None
    rows = [(index, row) for index, row in enumerate(table.rows) if row.rank and f"quality:{name}" in row.figures]
    better = rows[0][1].record.quality[name].better
    sign = 1.0 if better == "higher" else -1.0
    pairs = [(sign * row.figures[f"quality:{name}"].value, row.figures[SPEED].value) for _, row in rows]
    x_axis, y_axis = _axis([x for x, _ in pairs]), _axis([0.0, *(y for _, y in pairs)])
    best = pareto_front(pairs)
    points = [
        Point(
            index=index,
            label=_label(row, table),
            x=round(_x(x, x_axis), 1),
            y=round(_y(y, y_axis), 1),
            quality=sign * x,
            speed=y,
            on_front=position in best,
        )
        for position, ((index, row), (x, y)) in enumerate(zip(rows, pairs, strict=True))
    ]
    return Scatter(
        quality=name,
        better=better,
        points=points,
        x_ticks=[Tick(round(_x(t, x_axis), 1), f"{sign * t:g}") for t in _ticks(x_axis)],
        y_ticks=[Tick(round(_y(t, y_axis), 1), f"{t:,g}") for t in _ticks(y_axis)],
        front=_staircase([point for point in points if point.on_front]),
    )


def pareto_front(pairs: Sequence[tuple[float, float]]) -> set[int]:
    """Indices of pairs (higher is better in both) that no other pair dominates; equal pairs are all kept."""
    order = sorted(range(len(pairs)), key=lambda i: (-pairs[i][0], -pairs[i][1]))
    front: set[int] = set()
    best, best_pair = -math.inf, None
    for index in order:
        if pairs[index][1] > best or pairs[index] == best_pair:
            front.add(index)
            best, best_pair = pairs[index][1], pairs[index]
    return front


def _metric(table: Table) -> str | None:
    counts = {
        name: sum(1 for row in table.rows if row.rank and f"quality:{name}" in row.figures)
        for name in table.quality_names
    }
    name = max(counts, key=counts.__getitem__, default=None)
    return name if name is not None and counts[name] >= 2 else None


def _axis(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = (high - low) * 0.06 or abs(high) * 0.05 or 1.0
    return (low if low == 0 else low - margin), high + margin


def _x(value: float, axis: tuple[float, float]) -> float:
    return LEFT + (value - axis[0]) / (axis[1] - axis[0]) * (WIDTH - LEFT - RIGHT)


def _y(value: float, axis: tuple[float, float]) -> float:
    return HEIGHT - BOTTOM - (value - axis[0]) / (axis[1] - axis[0]) * (HEIGHT - TOP - BOTTOM)


def _ticks(axis: tuple[float, float]) -> list[float]:
    """Round values inside the axis, four to eight of them."""
    span = axis[1] - axis[0]
    power = 10.0 ** math.floor(math.log10(span / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if span / (power * factor) <= 8)
    first, last = math.ceil(axis[0] / step), math.floor(axis[1] / step)
    return [float(f"{index * step:.10g}") for index in range(first, last + 1)]


def _staircase(front: Sequence[Point]) -> str:
    """Down from each point, then right to the next: the edge of what the front dominates."""
    ordered = sorted(front, key=lambda point: (point.x, point.y))
    corners = [f"{before.x},{after.y}" for before, after in pairwise(ordered)]
    return " ".join(text for pair in zip_longest((f"{p.x},{p.y}" for p in ordered), corners) for text in pair if text)


def _label(row: Row, table: Table) -> str:
    labels = [row.mix[column] for column in table.mix_columns if row.mix[column] != ABSENT]
    return ", ".join(labels) or row.record.cell
