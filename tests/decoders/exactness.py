"""Greedy tokens against those of plain decoding, with the rule for ties: both answers of a near tie are right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from decoding import generate
from infermix.roles.engine import ScoreRequest
from infermix.roles.request import Request

#: Rows of one linear differ by 3e-5 (relative) between batch sizes; logits are around 20.
TIE = 2e-3
#: Most outputs that may differ by a tie.
MOST_EXCUSED = 0.01


def check_equal(
    engine: Any, plain_engine: Callable[[], Any], wanted: list[Request], plain: dict[str, list[int]]
) -> int:
    """How many outputs were excused; `AssertionError` for any other difference, and for too many of those.

    `plain_engine` is asked for only where an output differs.
    """
    found = generate(engine, wanted)
    excused = 0
    for request in wanted:
        ours, theirs = found[request.request_id], plain[request.request_id]
        if ours == theirs:
            continue
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        assert at is not None, f"request {request.request_id}: {len(ours)} tokens, plain decoding has {len(theirs)}"
        margin = _margin(plain_engine(), [*request.prompt_ids, *theirs[:at]])
        assert margin < TIE, f"request {request.request_id} differs at output {at}, where the margin is {margin:.4f}"
        excused += 1
    assert excused <= MOST_EXCUSED * len(wanted), f"{excused} of {len(wanted)} outputs differ by a tie"
    return excused


def _margin(engine: Any, tokens: list[int]) -> float:
    """Between the two largest logits of the token that follows."""
    (score,) = engine.score([ScoreRequest((*tokens, tokens[-1]), first=len(tokens), want_logits=True)])
    first, second = score.logits[-1].topk(2).values.tolist()
    return first - second
