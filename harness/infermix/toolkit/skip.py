"""Which linears quantizers leave alone. No torch."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Sequence

from infermix.errors import UserError

#: Output heads by the names that architectures give them: patterns that may match nothing.
UNTOUCHED = ("*lm_head", "*embed_out", "*output_projection")


def check_skip(patterns: Sequence[str], names: Collection[str]) -> None:
    """Raises `UserError` for a pattern that matches no module: what it means would be quantized in silence."""
    for pattern in patterns:
        if pattern not in UNTOUCHED and not any(fnmatch.fnmatch(name, pattern) for name in names):
            raise UserError(
                f"no module of the model matches {pattern!r}",
                key="parts.quantizer.skip",
                hint=f"names are such as {next((name for name in names if name.count('.') > 2), next(iter(names)))}",
            )
