"""Task YAML files of the user's own folder, with data files next to them.

lm-eval resolves `data_files` against the current directory. Here they are relative to the YAML file: for each such
task an overlay is written that includes the original and names its data files absolutely.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from infermix.errors import UserError


class _Loader(yaml.SafeLoader):
    """Reads task files without importing what their `!function` tags name."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


@dataclass(frozen=True)
class LocalTask:
    """One YAML file that defines a task, or a group with its `members`."""

    name: str
    path: Path
    dataset_kwargs: dict[str, Any] = field(default_factory=dict)
    tags: tuple[str, ...] = ()
    members: tuple[str, ...] = ()


def find_tasks(folder: Path) -> Iterator[LocalTask]:
    """Tasks and groups below `folder`. Raises `UserError` for a folder that is not there and for broken YAML."""
    if not folder.is_dir():
        raise UserError("there is no such folder", where=str(folder), key="quality.lm_eval.include_path")
    for path in sorted((*folder.rglob("*.yaml"), *folder.rglob("*.yml"))):
        config = _read(path)
        if not isinstance(config, dict):
            continue
        task, group = config.get("task"), config.get("group")
        if isinstance(task, str):
            kwargs = config.get("dataset_kwargs") or {}
            yield LocalTask(task, path.resolve(), kwargs, tags=_names(config.get("tag")))
        elif isinstance(group, str):
            yield LocalTask(group, path.resolve(), members=_names(task))


def all_local(wanted: Sequence[str], tasks: Sequence[LocalTask]) -> bool:
    """Whether every wanted name, and every member of a local group, is defined by `tasks` themselves."""
    known = {name for task in tasks for name in (task.name, *task.tags)}
    return known.issuperset(wanted) and all(known.issuperset(task.members) for task in tasks)


def _names(value: Any) -> tuple[str, ...]:
    """Names in a `tag` or in a group's `task` list, whose entries may be mappings."""
    entries = value if isinstance(value, list) else [value]
    named = [entry.get("task") if isinstance(entry, dict) else entry for entry in entries]
    return tuple(name for name in named if isinstance(name, str))


def write_overlays(tasks: Iterable[LocalTask], target: Path) -> None:
    """Write an overlay into `target` for each task with data files. Raises `UserError` when one is missing."""
    for number, task in enumerate(tasks):
        if "data_files" not in task.dataset_kwargs:
            continue
        data_files = _resolve(task.dataset_kwargs["data_files"], task)
        overlay = {
            "include": str(task.path),
            "task": task.name,
            "dataset_kwargs": {**task.dataset_kwargs, "data_files": data_files},
        }
        (target / f"{number}.yaml").write_text(yaml.safe_dump(overlay), encoding="utf-8")


def _read(path: Path) -> Any:
    try:
        return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"not a readable task file: {error}", where=str(path)) from None


def _resolve(value: Any, task: LocalTask) -> Any:
    if isinstance(value, dict):
        return {key: _resolve(each, task) for key, each in value.items()}
    if isinstance(value, list):
        return [_resolve(each, task) for each in value]
    if "://" in value:
        return value
    path = task.path.parent / value
    if not path.is_file():
        raise UserError(
            f"there is no data file {path}",
            where=str(task.path),
            key="dataset_kwargs.data_files",
            hint="paths are relative to the task file",
        )
    return str(path.resolve())
