"""Records on disk: one JSON file each, written atomically, read strictly.

A file has one line per field, so that records under version control give readable differences.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import msgspec

from infermix.errors import UserError
from infermix.record.record import SCHEMA_VERSION, Record, Summary

S = TypeVar("S", bound=Summary)

#: Written beside records by `infermix leaderboard`; never read as a record.
GENERATED_NAMES = frozenset({"leaderboard.json"})


class _Head(msgspec.Struct):
    """What tells a record from other JSON, and whether its cell is done."""

    schema_version: int
    cell_digest: str = ""
    created: str = ""
    complete: bool = False


@dataclass(frozen=True)
class Scan(Generic[S]):
    """Records found below a directory with their files (same order), and one warning per file that was
    skipped.
    """

    records: list[S] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    root: str = ""

    @property
    def publishable_warnings(self) -> list[str]:
        """The warnings without the path that leads to the directory, which tells about the user's machine."""
        return [warning.replace(f"{self.root}{os.sep}", "") for warning in self.warnings]


def write_record(record: Record, directory: Path) -> Path:
    """Write `record` below `directory` (created on demand) and return its file.

    Either the whole file is there afterwards or nothing is. Figures that are not finite cannot be JSON:
    they are left out, and a line of the record's log says so. Raises `UserError` naming the path when it
    cannot be written.
    """
    path = Path(directory) / record_file_name(record)
    write_atomically(path, _encode(_without_non_finite(record)))
    return path


def record_file_name(record: Summary) -> str:
    """`<experiment>-<cell digest>-<run id>.json`, safe on every file system."""
    parts = (record.experiment_name[:60], record.cell_digest[:16], record.run_id[:60])
    return "-".join(re.sub(r"[^A-Za-z0-9_.]+", "_", part).lstrip(".") or "_" for part in parts) + ".json"


@overload
def read_record(path: Path) -> Record: ...
@overload
def read_record(path: Path, kind: type[S]) -> S: ...
def read_record(path: Path, kind: type[Summary] = Record) -> Summary:
    """Read one record; `kind=Summary` skips the raw samples and is several times faster.

    Raises `UserError` naming the file when it is missing, not JSON, of the wrong types, or of a newer schema.
    """
    data = _read(Path(path))
    _check_schema(data, path)
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise UserError(
            f"not a valid record: {error}", where=str(path), hint="run the cell again or delete the file"
        ) from None


@overload
def scan_records(directory: Path) -> Scan[Summary]: ...
@overload
def scan_records(directory: Path, kind: type[S]) -> Scan[S]: ...
def scan_records(directory: Path, kind: type[Any] = Summary) -> Scan[Any]:
    """Every record below `directory`, in order of path. Files that are no readable record become warnings."""
    scan: Scan[Any] = Scan(root=str(Path(directory)))
    for path in record_files(directory):
        try:
            record = read_record(path, kind)
        except UserError as error:
            scan.warnings.append(f"skipped {error}")
            continue
        scan.records.append(record)
        scan.paths.append(path)
    return scan


def record_files(directory: Path) -> Iterator[Path]:
    """JSON files below `directory` (itself a file, or a folder), without hidden, temporary and generated
    ones.
    """
    root = Path(directory)
    if root.is_file():
        yield root
        return
    if not root.is_dir():
        raise UserError("no such file or directory", where=str(root), hint="give a folder that holds records")
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            if name.endswith(".json") and not name.startswith(".") and name not in GENERATED_NAMES:
                yield Path(folder) / name


def complete_cells(directory: Path) -> dict[str, Path]:
    """Cell digest -> file of its latest complete record: the index for resuming a sweep.

    Reads only the heads of the records; files that cannot be read count as absent, since their cells must
    run again.
    """
    if not Path(directory).is_dir():
        return {}
    latest: dict[str, tuple[str, Path]] = {}
    for path in record_files(directory):
        try:
            head = msgspec.json.decode(_read(path), type=_Head)
        except (msgspec.DecodeError, UserError):
            continue
        known = latest.get(head.cell_digest)
        if head.complete and head.schema_version <= SCHEMA_VERSION and (known is None or head.created >= known[0]):
            latest[head.cell_digest] = (head.created, path)
    return {digest: path for digest, (_, path) in latest.items()}


def find_complete(directory: Path, digest: str) -> Path | None:
    """The latest complete record of one cell. For many cells call `complete_cells` once instead."""
    return complete_cells(directory).get(digest)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` as a whole. On failure nothing is left behind, and `UserError` names the path."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_and_sync(temporary, data)
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(
            f"cannot be written: {error.strerror or error}",
            where=str(path),
            hint="free space or choose another folder",
        ) from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot be read: {error.strerror}", where=str(path)) from error


def _check_schema(data: bytes, path: Path) -> None:
    try:
        version = msgspec.json.decode(data, type=_Head).schema_version
    except msgspec.ValidationError as error:
        raise UserError(
            f"not a record: {error}", where=str(path), hint="a record is a JSON object with `schema_version`"
        ) from None
    except msgspec.DecodeError as error:
        raise UserError(
            f"not JSON: {error}",
            where=str(path),
            hint="it may be cut short; run the cell again or delete the file",
        ) from None
    if version > SCHEMA_VERSION:
        raise UserError(
            f"schema version {version} is newer than {SCHEMA_VERSION}",
            where=str(path),
            hint="upgrade infermix",
        )
    if version < 1:
        raise UserError(f"schema version {version} does not exist", where=str(path), hint="versions start at 1")


def _encode(record: Record) -> bytes:
    fields = (
        msgspec.json.encode(name) + b": " + msgspec.json.encode(getattr(record, name), order="deterministic")
        for name in record.__struct_fields__
    )
    return b"{\n" + b",\n".join(fields) + b"\n}\n"


def _without_non_finite(record: Record) -> Record:
    """A shallow copy whose typed figures are all finite (JSON has no NaN, and reading would fail)."""
    dropped: list[str] = []

    def finite(figures: dict[str, Any], where: str) -> dict[str, Any]:
        bad = [name for name, value in figures.items() if not _is_finite(value)]
        dropped.extend(f"{where}.{name} was not finite and is left out of the record" for name in bad)
        return {name: value for name, value in figures.items() if name not in bad}

    changes = {
        name: finite(getattr(record, name), name) for name in ("metrics", "quality", "memory", "phases_s", "counters")
    }
    return msgspec.structs.replace(record, **changes, log=[*record.log, *dropped])


def _is_finite(figure: Any) -> bool:
    if isinstance(figure, msgspec.Struct):
        values = [figure.value, *figure.samples]  # type: ignore[attr-defined]
        return all(math.isfinite(value) for value in values)
    return math.isfinite(figure)


def _write_and_sync(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
