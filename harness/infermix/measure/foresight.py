"""How well a scheduler foresaw the lengths of outputs, from its counters.

The counters of one repeat: `predicted_outputs`, sequences that ended and whose output had been predicted, and
`predicted_output_error_tokens`, the sum of the absolute errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

#: Unit and direction of each figure.
FORESIGHT_METRICS: Mapping[str, tuple[str, Literal["higher", "lower", "none"]]] = {
    "output_prediction_error": ("tokens", "lower"),
}


def foresight(counters: Mapping[str, float]) -> dict[str, float]:
    """The mean absolute error of one repeat; empty for a scheduler that predicts nothing, or nothing yet."""
    count = counters.get("predicted_outputs")
    return {"output_prediction_error": counters["predicted_output_error_tokens"] / count} if count else {}
