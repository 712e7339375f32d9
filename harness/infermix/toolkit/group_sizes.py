"""What `plan` can say of group sizes: the matrices that quantizers convert are known before a load. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from infermix.roles.component import Features
    from infermix.roles.facts import ModelFacts

#: Matrices that become quantized linears unless `skip` says otherwise.
_QUANTIZED_KINDS = ("attention", "mlp", "shared_expert")
_SIZES = (8, 16, 32, 64, 128, 256)


def group_needs(model: ModelFacts, group_size: int) -> Features:
    """A need that nothing meets, worded for the reader, when `group_size` divides not every row; otherwise none.

    0 stands for whole rows, which always fit.
    """
    widths = {matrix.in_features for matrix in model.matrices if matrix.kind in _QUANTIZED_KINDS}
    unfit = sorted(width for width in widths if group_size and width % group_size)
    if not unfit:
        return frozenset()
    fitting = ", ".join(str(size) for size in _SIZES if all(width % size == 0 for width in widths))
    sizes = f" (such as {fitting})" if fitting else ""
    return frozenset({f"group_size:one that divides {unfit[0]} inputs{sizes}, not {group_size}"})
