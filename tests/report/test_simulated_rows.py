"""Simulated and measured rows never share a table, and never serve as each other's baseline."""

from __future__ import annotations

from collections.abc import Callable

from infermix.record.record import Record
from infermix.record.track import track_id
from infermix.report.board import build_board
from infermix.report.markdown import markdown


def test_simulated_rows_have_tables_of_their_own(make_record: Callable[..., Record]) -> None:
    measured = make_record(baseline=True)
    predicted = make_record(parts={"kv": "dense"}, speed=(200.0, 202.0, 198.0), simulated=True)
    for record in (measured, predicted):
        record.track = track_id(record)
    board = build_board([measured, predicted])
    assert [len(table.rows) for table in board.tables] == [1, 1]
    titles = [table.title for table in board.tables]
    assert [title.startswith("simulated: ") for title in titles].count(True) == 1
    assert all("ratio" not in row.figures or row.is_baseline for table in board.tables for row in table.rows)
    assert "simulated: " in markdown(board)
