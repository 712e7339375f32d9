"""Traces as files: rows of arrival and lengths. Every fault is told with file and line, or counted."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infermix.errors import UserError
from infermix.workload.trace_components import TraceOptions


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace: seconds on the trace's own clock, lengths in tokens. `line` is where it stands."""

    line: int
    time_s: float
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    category: str = ""


@dataclass(frozen=True)
class Trace:
    """Rows in order, times from the first one; `counts` says how many rows were read, and left out by reason."""

    path: Path
    format: str
    rows: list[Row]
    counts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Format:
    """Columns of a trace and how its time is written."""

    time: str
    input: str
    output: str
    seconds: Callable[[Any], float]
    category: str = ""
    hash_ids: str = ""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.time, self.input, self.output, self.hash_ids)))


#: A date and time, a fraction of any number of digits, and an offset from UTC.
_DATE = re.compile(r"(.+?)(?:\.(\d*))?(Z|[+-]\d\d:?\d\d)?", re.ASCII)


def _date(text: Any) -> float:
    """Seconds of a date such as `2023-11-16 18:15:46.6805900` or `2024-05-10 00:00:00.009930+00:00`.

    Without an offset it counts as UTC.
    """
    found = _DATE.fullmatch(text.strip()) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"{text!r} is no time")
    whole, digits, offset = found.groups()
    since = datetime.fromisoformat(whole + (offset or "+00:00")) - datetime(1970, 1, 1, tzinfo=UTC)
    return since.total_seconds() + float(f"0.{digits or 0}")


def _milliseconds(value: Any) -> float:
    return float(value) / 1000


FORMATS: Mapping[str, Format] = {
    "plain": Format("arrival_s", "input_tokens", "output_tokens", float),
    "azure": Format("TIMESTAMP", "ContextTokens", "GeneratedTokens", _date),
    "burstgpt": Format("Timestamp", "Request tokens", "Response tokens", float, category="Model"),
    "mooncake": Format("timestamp", "input_length", "output_length", _milliseconds, hash_ids="hash_ids"),
}


def read_trace(options: TraceOptions, base: Path) -> Trace:
    """The rows that the options ask for.

    Raises `UserError` with file and line for a file that is missing, unknown or missing columns, and, unless
    `bad_rows: skip`, for a row that is no request; also when no row is left.
    """
    path = base / options.path
    with _open(path) as file:
        lines = _lines(path, file)
        name, records = _records(path, lines, options.format)
        counts = {"rows": 0.0}
        rows = list(_window(_rows(path, name, records, options, counts), options, counts))
    if not rows:
        what = "no request is left of this trace" if counts["rows"] else "the trace has no rows"
        raise UserError(what, where=str(path), key="workload.path", hint=_left_out(counts))
    return Trace(path, name, rows, counts)


def _left_out(counts: Mapping[str, float]) -> str | None:
    reasons = [f"{count:g} {name}" for name, count in counts.items() if count]
    return "counted: " + ", ".join(reasons) if reasons else None


def _open(path: Path) -> Any:
    try:
        file = path.open(encoding="utf-8-sig", newline="")
        file.read(1)
        file.seek(0)
    except FileNotFoundError:
        raise UserError("there is no such file", where=str(path), key="workload.path") from None
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text: {error}", where=str(path), key="workload.path") from None
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path), key="workload.path") from None
    return file


def _lines(path: Path, file: Iterable[str]) -> Iterator[tuple[int, str]]:
    number = 0
    try:
        for number, text in enumerate(file, start=1):
            yield number, text
    except UnicodeDecodeError as error:
        what = f"not UTF-8 text, somewhere behind line {number}: {error}"
        raise UserError(what, where=str(path), key="workload.path") from None


Records = Iterator[tuple[int, Mapping[str, Any]]]

#: What a row of a CSV file has behind the last column, as `1,024` does to all columns behind it.
_BEYOND = "\0beyond"


def _records(path: Path, lines: Iterator[tuple[int, str]], wanted: str) -> tuple[str, Records]:
    """Format and records with their line; the first line that is not blank decides."""
    first = next(((number, text) for number, text in lines if text.strip()), None)
    if first is None:
        raise UserError("the trace is empty", where=str(path), key="workload.path")
    number, text = first
    where = f"{path}:{number}"
    if text.lstrip().startswith("{"):
        records = _json_records(path, first, lines)
        head = next(records)
        name = _format_of(list(head[1]), wanted, where)
        return name, _again(head, records)
    header = _cells(path, number, text)
    return _format_of(header, wanted, where), _csv_records(path, header, lines)


def _again(head: tuple[int, Mapping[str, Any]], rest: Records) -> Records:
    yield head
    yield from rest


def _format_of(columns: list[str], wanted: str, where: str) -> str:
    candidates = FORMATS if wanted == "auto" else {wanted: FORMATS[wanted]}
    for name, form in candidates.items():
        if set(form.columns) <= set(columns):
            _refuse_twins(columns, form, where)
            return name
    known = "; ".join(f"{name}: {', '.join(form.columns)}" for name, form in candidates.items())
    missing = [column for column in FORMATS[wanted].columns if column not in columns] if wanted != "auto" else []
    what = f"column {missing[0]!r} is missing" if missing else "these are the columns of no known trace"
    raise UserError(
        f"{what}; the file has {', '.join(columns) or 'none'}", where=where, key="workload.format", hint=known
    )


def _refuse_twins(columns: list[str], form: Format, where: str) -> None:
    twins = next((column for column in (*form.columns, form.category) if column and columns.count(column) > 1), None)
    if twins is not None:
        hint = "leave all but one of them out"
        raise UserError(f"{columns.count(twins)} columns are called {twins!r}", where=where, hint=hint)


def _csv_records(path: Path, header: list[str], lines: Iterator[tuple[int, str]]) -> Records:
    for number, text in lines:
        if not text.strip():
            continue
        cells = _cells(path, number, text)
        record: dict[str, Any] = dict(zip(header, cells, strict=False))
        yield number, {**record, _BEYOND: more} if (more := "".join(cells[len(header) :]).strip()) else record


def _cells(path: Path, number: int, text: str) -> list[str]:
    try:
        return next(csv.reader([text]))
    except csv.Error as error:
        raise UserError(f"not CSV: {error}", where=f"{path}:{number}") from None


def _json_records(path: Path, first: tuple[int, str], lines: Iterator[tuple[int, str]]) -> Records:
    for number, text in _again_lines(first, lines):
        if not text.strip():
            continue
        try:
            record = json.loads(text)
        except ValueError as error:
            raise UserError(f"not JSON: {error}", where=f"{path}:{number}") from None
        if not isinstance(record, dict):
            raise UserError(f"expected a JSON object, got {type(record).__name__}", where=f"{path}:{number}")
        yield number, record


def _again_lines(first: tuple[int, str], rest: Iterator[tuple[int, str]]) -> Iterator[tuple[int, str]]:
    yield first
    yield from rest


def _rows(path: Path, name: str, records: Records, options: TraceOptions, counts: dict[str, float]) -> Iterator[Row]:
    """Rows that are requests, times from the first; the others raise or are counted."""
    form, start_s, last_s = FORMATS[name], None, None
    for number, record in records:
        counts["rows"] += 1
        try:
            row = _row(number, record, form, options.block_tokens)
            if start_s is None and row.time_s < 0:
                raise _BadRow("negative_time", f"the time {row.time_s:g} s is negative")
            if last_s is not None and row.time_s < last_s:
                raise _BadRow("out_of_order", f"the time is {last_s - row.time_s:g} s before that of the row before")
        except _BadRow as fault:
            if options.bad_rows == "refuse":
                hint = "bad_rows: skip leaves such rows out and counts them"
                raise UserError(str(fault), where=f"{path}:{number}", hint=hint) from None
            counts[fault.reason] = counts.get(fault.reason, 0) + 1
            continue
        last_s = row.time_s
        start_s = row.time_s if start_s is None else start_s
        yield Row(number, row.time_s - start_s, row.input_tokens, row.output_tokens, row.hash_ids, row.category)


class _BadRow(Exception):
    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


def _row(number: int, record: Mapping[str, Any], form: Format, block_tokens: int) -> Row:
    if _BEYOND in record:
        raise _BadRow("too_many_values", f"there are more values than columns, the last being {record[_BEYOND]!r}")
    for column in form.columns:
        if record.get(column) in (None, ""):
            raise _BadRow("missing_value", f"there is no {column!r}")
    time_s = _number(form.seconds, record, form.time)
    if not abs(time_s) < float("inf"):
        raise _BadRow("not_a_number", f"{form.time!r} is {record[form.time]!r}, no finite time")
    inputs, outputs = (_number(_whole, record, column) for column in (form.input, form.output))
    for column, tokens in ((form.input, inputs), (form.output, outputs)):
        if tokens < 1:
            raise _BadRow("no_tokens", f"{column!r} is {tokens}, a request needs at least one token")
    hash_ids = _hash_ids(record[form.hash_ids], inputs, block_tokens) if form.hash_ids else ()
    return Row(number, time_s, inputs, outputs, hash_ids, _category(record, form))


def _category(record: Mapping[str, Any], form: Format) -> str:
    """Empty for a format that has none, whatever stands in a column without a name."""
    return str(record.get(form.category) or "") if form.category else ""


def _number(read: Callable[[Any], Any], record: Mapping[str, Any], column: str) -> Any:
    try:
        if isinstance(record[column], bool):
            raise TypeError(record[column])
        return read(record[column])
    except (ValueError, TypeError, OverflowError):
        raise _BadRow("not_a_number", f"{column!r} is {record[column]!r}") from None


def _whole(value: Any) -> int:
    number = float(value)
    if number != int(number):
        raise ValueError(value)
    return int(number)


def _hash_ids(value: Any, input_tokens: int, block_tokens: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(each) is int for each in value):
        raise _BadRow("bad_hash_ids", f"'hash_ids' is {value!r}, not a list of whole numbers")
    if len(value) != -(-input_tokens // block_tokens):
        raise _BadRow(
            "bad_hash_ids",
            f"{len(value)} hash ids for a prompt of {input_tokens} tokens in blocks of {block_tokens}",
        )
    return tuple(value)


def _window(rows: Iterator[Row], options: TraceOptions, counts: dict[str, float]) -> Iterator[Row]:
    """Rows of the asked stretch of time; the first `num_requests` are cut later, where skipped ones are known."""
    end_s = float("inf") if options.duration_s is None else options.start_s + options.duration_s
    for row in rows:
        if row.time_s >= end_s and options.bad_rows == "refuse":
            return
        if options.start_s <= row.time_s < end_s:
            yield row
        else:
            counts["outside_window"] = counts.get("outside_window", 0) + 1
