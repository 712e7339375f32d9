"""A row whose steps could not be captured on a GPU says so."""

from __future__ import annotations

from typing import Any

import pytest
from infermix.report.labels import notes

REASON = {"captured": 0, "reason": "the model cannot be captured: experts are picked on the host"}


@pytest.mark.parametrize(
    ("device", "graphs", "told"),
    [
        ("cuda", REASON, True),
        ("cuda", {"captured": 55}, False),
        ("cuda", {}, False),
        ("cpu", {"captured": 0, "reason": "steps run eagerly on cpu"}, False),
    ],
)
def test_steps_that_were_not_captured(make_record: Any, device: str, graphs: dict[str, Any], told: bool) -> None:
    record = make_record(device=device, environment={"graphs": graphs})
    assert any(REASON["reason"] in note for note in notes(record)) == told


OWN = {"captured": 0, "reason": "the decoder's work cannot be captured: its head reads the device"}


@pytest.mark.parametrize(
    ("device", "graphs", "own", "told"),
    [
        ("cuda", {"captured": 55}, OWN, True),
        ("cuda", {"captured": 55}, {"captured": 12}, False),
        ("cuda", REASON, OWN, False),
        ("cpu", {"captured": 0, "reason": "steps run eagerly on cpu"}, OWN, False),
    ],
    ids=["eager", "captured", "steps are eager too", "cpu"],
)
def test_work_of_a_part_that_was_not_captured(
    make_record: Any, device: str, graphs: dict[str, Any], own: dict[str, Any], told: bool
) -> None:
    record = make_record(device=device, environment={"graphs": graphs})
    record.parts["decoder"].executed["graphs"] = own
    assert (f"decoder launched eagerly: {own.get('reason')}" in notes(record)) == told
