"""`infermix leaderboard [DIR] [--out DIR]`."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from infermix.record.store import scan_records
from infermix.report.board import Board, Table, build_board
from infermix.report.leaderboard import write_board
from infermix.report.terminal import leaderboard_table, reasons, terminal_console

HELP = "publish tables (Markdown, CSV, JSON, HTML) from records"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", nargs="?", type=Path, default=Path("results"), help="records (default: results)")
    parser.add_argument("--out", type=Path, help="where the files go (default: the directory of the records)")
    parser.add_argument("--rows", type=int, default=10, help="rows shown per table on the terminal (default: 10)")


def execute(args: argparse.Namespace) -> int:
    """Exit code 0 also when some files were skipped; each is named."""
    scan = scan_records(args.directory)
    board = build_board(scan.records, scan.publishable_warnings)
    console = terminal_console()
    for warning in scan.warnings:
        Console(stderr=True).print(Text(f"warning: {warning}", style="yellow"), soft_wrap=True)
    for table in board.tables:
        _print_table(table, console, args.rows)
    if not board.tables:
        console.print(Text(f"no complete records in {args.directory}"))
    written = write_board(board, args.out or _folder(args.directory))
    console.print(Text("\n".join(f"wrote {path}" for path in written)), soft_wrap=True)
    _print_unfinished(board, console)
    return 0


def _folder(path: Path) -> Path:
    return path.parent if path.is_file() else path


def _print_table(table: Table, console: Console, limit: int) -> None:
    console.print(Text(table.title, style="bold"))
    for caution in table.cautions:
        console.print(Text(caution, style="yellow"), soft_wrap=True)
    console.print(leaderboard_table(table, limit))
    for reason in reasons(table, limit):
        console.print(Text(reason, style="red"), soft_wrap=True)
    if len(table.rows) > limit:
        console.print(Text(f"and {len(table.rows) - limit} more rows in the files", style="dim"))


def _print_unfinished(board: Board, console: Console) -> None:
    if board.unfinished:
        console.print(Text(f"{board.unfinished} unfinished records take no part", style="yellow"), soft_wrap=True)
