"""Which records stand on the two sides of a comparison, and which of them belong together."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infermix.errors import UserError
from infermix.record.record import Summary
from infermix.record.store import read_record, scan_records
from infermix.record.track import track_id


@dataclass(frozen=True)
class Pair:
    """One cell on both sides: its complete runs, oldest first. `name` is for people."""

    name: str
    a: Sequence[Summary]
    b: Sequence[Summary]

    @property
    def comparable(self) -> bool:
        """Whether every run belongs to the same track (model, workload, machine)."""
        return len({record.track or track_id(record) for record in (*self.a, *self.b)}) == 1


@dataclass(frozen=True)
class Sides:
    """Matched cells, and the names of those that only one side has."""

    pairs: Sequence[Pair]
    only_a: Sequence[str]
    only_b: Sequence[str]


def load_side(pattern: str) -> tuple[list[Summary], list[str]]:
    """Complete records of a file, a directory or a glob, and warnings for files that were skipped.

    A file that is named outright must be readable. Raises `UserError` when nothing is found.
    """
    path = Path(pattern)
    if path.is_file():
        return [read_record(path, Summary)], []
    places = [path] if path.is_dir() else [Path(found) for found in sorted(glob.glob(pattern, recursive=True))]
    records: list[Summary] = []
    warnings: list[str] = []
    for place in places:
        scan = scan_records(place)
        records += [record for record in scan.records if record.complete]
        warnings += scan.warnings
    if not records:
        raise UserError(
            "holds no complete record", where=pattern, hint="give a record, a folder of records or a glob"
        )
    return records, warnings


def match(a: Sequence[Summary], b: Sequence[Summary]) -> Sides:
    """Pair cells by digest, the rest by name. A single cell on each side is paired whatever it is called."""
    left, right = _by_digest(a), _by_digest(b)
    if len(left) == len(right) == 1:
        (ours,), (theirs,) = left.values(), right.values()
        return Sides([Pair(_pair_name(ours[0], theirs[0]), ours, theirs)], [], [])
    shared = sorted(left.keys() & right.keys())
    pairs = [Pair(_name(left[digest]), left.pop(digest), right.pop(digest)) for digest in shared]
    names = {_name(runs): digest for digest, runs in right.items()}
    for digest, runs in sorted(left.items()):
        other = names.pop(_name(runs), None)
        if other is not None:
            pairs.append(Pair(_name(runs), left.pop(digest), right.pop(other)))
    pairs.sort(key=lambda pair: pair.name)
    return Sides(pairs, sorted(map(_name, left.values())), sorted(map(_name, right.values())))


def _by_digest(records: Sequence[Summary]) -> dict[str, list[Summary]]:
    cells: dict[str, list[Summary]] = {}
    for record in sorted(records, key=lambda record: (record.created, record.run_id)):
        cells.setdefault(record.cell_digest, []).append(record)
    return cells


def _name(runs: Sequence[Summary]) -> str:
    return runs[0].cell


def _pair_name(a: Summary, b: Summary) -> str:
    return a.cell if a.cell == b.cell else f"{a.cell} against {b.cell}"
