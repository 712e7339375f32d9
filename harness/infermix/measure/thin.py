"""Runs of so many requests that a record cannot keep them all."""

from __future__ import annotations

from collections.abc import Mapping

from infermix.measure.metrics import repeat_figures
from infermix.record.record import Repeat

#: Requests that a repeat keeps at most.
MOST_REQUESTS = 20_000


def thin(repeat: Repeat, goodput: Mapping[str, float]) -> None:
    """Keep evenly spread requests of a longer repeat, and the figures of all of them beside."""
    if len(repeat.requests) <= MOST_REQUESTS:
        return
    repeat.figures = {**repeat_figures(repeat, goodput), "requests": float(len(repeat.requests))}
    step = len(repeat.requests) / MOST_REQUESTS
    repeat.requests = [repeat.requests[int(index * step)] for index in range(MOST_REQUESTS)]
