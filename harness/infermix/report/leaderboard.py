"""Records in, four files out: LEADERBOARD.md, leaderboard.csv, leaderboard.json, leaderboard.html."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from infermix.record.record import Summary
from infermix.record.store import write_atomically
from infermix.report.board import Board, build_board
from infermix.report.html import html
from infermix.report.markdown import markdown
from infermix.report.tabular import csv_text, json_text


def leaderboard(records: Iterable[Summary], directory: Path, warnings: Sequence[str] = ()) -> list[Path]:
    """Write the leaderboard of `records` below `directory` and return its files.

    The same records give the same bytes, so the files can be checked for being up to date. Raises
    `UserError` naming the file that cannot be written.
    """
    return write_board(build_board(records, warnings), directory)


def write_board(board: Board, directory: Path) -> list[Path]:
    """Write an already built board; every file is replaced as a whole."""
    paths = []
    for name, text in rendered(board).items():
        paths.append(Path(directory) / name)
        write_atomically(paths[-1], text.encode())
    return paths


def rendered(board: Board) -> dict[str, str]:
    """File name -> content."""
    return {
        "LEADERBOARD.md": markdown(board),
        "leaderboard.csv": csv_text(board),
        "leaderboard.json": json_text(board),
        "leaderboard.html": html(board),
    }
