"""What drafting brings for each category of requests: acceptance, and time per token against the baseline."""

from __future__ import annotations

from collections.abc import Sequence

from infermix.measure.speculation import of_category
from infermix.report import render
from infermix.report.board import Row, Table

CATEGORY_LEGEND = (
    "Time per output token of the baseline over the row's, means over the requests of a category; behind it the "
    "tokens per verification where the row drafts."
)
_PREFIX = of_category("tpot_s_mean", "").removesuffix("]")


def categories_of(table: Table) -> Sequence[str]:
    """In alphabetic order; none unless a row drafts, since other rows treat all categories alike."""
    names = {name for row in table.rows if row.rank for name in row.record.metrics}
    if not any(name.startswith("mean_acceptance_length[") for name in names):
        return ()
    return sorted(name[len(_PREFIX) : -1] for name in names if name.startswith(_PREFIX))


def category_text(table: Table, row: Row, category: str) -> str:
    """`1.42x, 1.73`; a part that is not known is left out."""
    own = row.record.metrics.get(of_category("tpot_s_mean", category))
    bases = [each for each in table.rows if each.is_baseline and each.rank]
    base = bases[0].record.metrics.get(of_category("tpot_s_mean", category)) if len(bases) == 1 else None
    found = [render.times(base.value / own.value)] if own and base and own.value else []
    length = row.record.metrics.get(of_category("mean_acceptance_length", category))
    return ", ".join([*found, *([f"{length.value:.2f}"] if length else [])])
