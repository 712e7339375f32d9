"""The engine that evaluators compare with: reference parts, plain weights, the cell's own dtype and device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from infermix.compose import compose
from infermix.errors import UserError
from infermix.spec.experiment import REFERENCE_ENGINE, REFERENCE_PARTS, Cell, Use

if TYPE_CHECKING:
    from infermix.compose import CellPlan
    from infermix.plugins import Catalogue


def reference_cell(cell: Cell) -> Cell:
    """The same cell with the reference engine and parts, and no evaluators of its own."""
    experiment = msgspec.structs.replace(
        cell.experiment,
        engine=Use(REFERENCE_ENGINE),
        parts={role: Use(name) for role, name in REFERENCE_PARTS.items()},
        transforms=(),
        quality=(),
    )
    return msgspec.structs.replace(cell, name=f"{cell.name} (reference)", experiment=experiment)


def reference_plan(cell: Cell, catalogue: Catalogue) -> CellPlan:
    """Raises `UserError` when the reference parts cannot run this model here."""
    (plan,) = compose([reference_cell(cell)], catalogue)
    if not plan.runs:
        raise UserError("the reference parts cannot run this model: " + "; ".join(plan.reasons), key="quality")
    return plan
