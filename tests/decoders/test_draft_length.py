"""Draft length: the formula, and adaptation in both directions."""

from __future__ import annotations

import pytest
from infermix_decoders.draft_length import DraftLength, expected_tokens


@pytest.mark.parametrize(("acceptance", "count", "expected"), [(0.0, 4, 1.0), (1.0, 4, 5.0), (0.5, 2, 1.75)])
def test_expected_tokens(acceptance: float, count: int, expected: float) -> None:
    assert expected_tokens(acceptance, count) == expected


def test_fixed_stays() -> None:
    length = DraftLength(4, adaptive=False, cost_ratio=0.5)
    for _ in range(200):
        length.observe(4, 0)
    assert (length.current, length.choices) == (4, (4,))


def test_rejections_shorten_and_acceptances_lengthen() -> None:
    length = DraftLength(8, adaptive=True, cost_ratio=0.1)
    for _ in range(300):
        length.observe(length.current, 0)
    assert length.current == 1
    for _ in range(600):
        length.observe(length.current, length.current)
    assert length.current == 8
