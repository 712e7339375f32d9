"""Short names for what a row mixes: a part with the options that tell it from the other rows of its table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from infermix.record.record import PartRecord, Summary
from infermix.roles.component import PART_ROLES, Role

#: The column of model transforms; absent in a table in which no row has any.
TRANSFORMS = "transforms"
#: Columns that say what a row mixes, in order. `settings` holds swept values that are no part.
MIX_COLUMNS = (*(role.value for role in PART_ROLES), TRANSFORMS, Role.ENGINE.value, "dtype", "settings")
ABSENT = "-"


def mixes(records: Sequence[Summary]) -> list[dict[str, str]]:
    """Per record: mix column -> label.

    Options of a part appear when the experiment of any of its rows states them, or when its rows differ in them.
    """
    telling = _telling_options(records)
    found = [_mix(record, telling) for record in records]
    if any(record.transforms for record in records):
        for record, labels in zip(records, found, strict=True):
            if record.parts and not record.transforms:
                labels[TRANSFORMS] = "none"
    return found


def with_options(name: str, options: Mapping[str, Any]) -> str:
    """`paged(block_size=16)`; the bare name without options."""
    if not options:
        return name
    return f"{name}({', '.join(f'{key}={_short(value)}' for key, value in sorted(options.items()))})"


def notes(record: Summary) -> list[str]:
    """What a reader must know about a row: declared adapters, parts that change the outputs, eager steps on a GPU."""
    found = [f"{role} via {adapter}" for role, part in _parts(record) for adapter in _adapters(part)]
    lossy = [role for role, part in _parts(record) if not part.lossless]
    if lossy:
        found.append(f"lossy: {', '.join(lossy)}")
    return found if record.device == "cpu" else [*found, *_eager(record)]


def _eager(record: Summary) -> list[str]:
    """What ran eagerly although the device has graphs: all steps, or else a part's own work."""
    graphs = record.environment.get("graphs") or {}
    if graphs.get("captured") == 0:
        return [f"no step captured: {graphs.get('reason', 'no reason given')}"]
    own = ((role, part.executed.get("graphs") or {}) for role, part in _parts(record))
    return [
        f"{role} launched eagerly: {facts.get('reason', 'no reason given')}"
        for role, facts in own
        if facts.get("captured") == 0
    ]


def adapters(record: Summary) -> list[str]:
    """Names of the declared adapters between the parts of a row."""
    return sorted({adapter for _, part in _parts(record) for adapter in _adapters(part)})


def concerns(record: Summary) -> list[str]:
    """One sentence per guard that is not green, the red ones first."""
    guards = [guard for guard in record.guards if guard.verdict != "green"]
    guards.sort(key=lambda guard: guard.verdict != "red")
    return [f"{guard.verdict}: {guard.name}" + (f" ({guard.detail})" if guard.detail else "") for guard in guards]


def _mix(record: Summary, telling: Mapping[tuple[str, str], set[str]]) -> dict[str, str]:
    labels = dict.fromkeys(MIX_COLUMNS, ABSENT)
    for role, part in _parts(record):
        keys = telling.get((role, part.name), ())
        label = with_options(part.name, {k: v for k, v in part.options.items() if k in keys})
        labels[role] = label if labels[role] == ABSENT else f"{labels[role]} + {label}"
    labels["dtype"] = record.dtype or ABSENT
    labels["settings"] = _settings(record.overrides)
    return labels


def _parts(record: Summary) -> Iterable[tuple[str, PartRecord]]:
    yield from ((role.value, record.parts[role.value]) for role in PART_ROLES if role.value in record.parts)
    yield from ((TRANSFORMS, part) for part in record.transforms)
    if record.engine is not None:
        yield Role.ENGINE.value, record.engine


def _telling_options(records: Sequence[Summary]) -> dict[tuple[str, str], set[str]]:
    """(Column, part) -> keys of the options that its labels show."""
    seen: dict[tuple[str, str], dict[str, set[bytes]]] = {}
    found: dict[tuple[str, str], set[str]] = {}
    for record in records:
        stated = _stated_options(record.experiment)
        for role, part in _parts(record):
            found.setdefault((role, part.name), set()).update(stated.get((role, part.name), ()))
            options = seen.setdefault((role, part.name), {})
            for key, value in part.options.items():
                options.setdefault(key, set()).add(msgspec.json.encode(value, order="deterministic"))
    for place, options in seen.items():
        found[place].update(key for key, values in options.items() if len(values) > 1)
    return found


def _stated_options(experiment: Mapping[str, Any]) -> dict[tuple[str, str], set[str]]:
    """(Column, part) -> keys that the experiment itself gives; everything else is a default."""
    uses = [(role, use) for role, use in (experiment.get("parts") or {}).items()]
    uses += [(TRANSFORMS, use) for use in experiment.get(TRANSFORMS) or ()]
    uses += [(Role.ENGINE.value, experiment.get("engine") or {})]
    found: dict[tuple[str, str], set[str]] = {}
    for column, use in uses:
        found.setdefault((column, use.get("name", "")), set()).update(use.get("options") or {})
    return found


def _adapters(part: PartRecord) -> list[str]:
    return sorted({str(adapter) for adapter in part.via.values()})


def _settings(overrides: Mapping[str, Any]) -> str:
    """Swept values beside parts, engine, dtype and metrics of quality, which have columns of their own.

    The model as a whole has a table of its own.
    """
    shown = {
        path: value
        for path, value in overrides.items()
        if path.partition(".")[0] not in ("parts", TRANSFORMS, "engine", "dtype", "name", "quality")
        and path != "model"
    }
    return ", ".join(f"{path}={_short(value)}" for path, value in sorted(shown.items())) or ABSENT


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str | int) or value is None:
        return str(value).lower() if isinstance(value, bool) else str(value)
    return msgspec.json.encode(value, order="deterministic").decode()
