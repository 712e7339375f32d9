"""What a table holds for all its rows, and what a reader should be careful about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from infermix.record.record import Summary
from infermix.record.track import machine_of, model_label
from infermix.report.labels import with_options

VERSIONS = ("infermix", "torch", "transformers", "triton")


def conditions(records: Sequence[Summary], shared: Mapping[str, str], superseded: int) -> list[tuple[str, str]]:
    """Pairs of (name, text) in the order in which they are printed."""
    found = [
        ("model", _join(model_label(record) for record in records)),
        ("config overrides", _join(_overrides(record) for record in records)),
        ("weights", _join(_weights(record) for record in records)),
        ("machine", _join(_machine(record) for record in records)),
        ("device", _join(record.device for record in records)),
        ("threads", _join(_threads(record) for record in records)),
        ("workload", _join(_workload(record) for record in records)),
        ("equal in all rows", ", ".join(f"{column} {label}" for column, label in shared.items())),
        ("measured", _dates(records)),
        ("versions", _versions(records)),
        ("older records left out", str(superseded) if superseded else ""),
    ]
    return [(name, text) for name, text in found if text]


def cautions(records: Sequence[Summary]) -> list[str]:
    """Sentences about rows that share a table although something beside their mix differs."""
    found = []
    fingerprints = {machine_of(record).get("fingerprint", "") for record in records}
    if len(fingerprints) > 1:
        found.append(f"These rows come from {len(fingerprints)} different machines.")
    if "" in fingerprints:
        found.append("The machine of some rows is unknown.")
    for package in VERSIONS:
        versions = {_packages(record).get(package) for record in records} - {None}
        if len(versions) > 1:
            found.append(f"Rows were measured with different versions of {package}.")
    # A cell that failed before it was told its threads has whatever the shell says.
    if len({_threads(record) for record in records if record.state == "ok"}) > 1:
        found.append("Rows were measured with different numbers of threads.")
    if any(_edited(record) for record in records):
        found.append("Some rows were measured with code that differs from its commit.")
    return found


def _join(texts: Iterable[str]) -> str:
    return "; ".join(sorted({text for text in texts if text}))


def _overrides(record: Summary) -> str:
    config = _dict(_dict(record.experiment.get("model")).get("config"))
    return ", ".join(f"{key} {value}" for key, value in sorted(config.items()))


def _weights(record: Summary) -> str:
    kind = _dict(record.experiment.get("model")).get("weights", "real")
    return "dummy (random)" if kind == "dummy" else "real"


def _machine(record: Summary) -> str:
    machine = machine_of(record)
    cpu = record.environment.get("cpu")
    name = str(machine.get("name") or cpu or "")
    cores = machine.get("num_cores")
    return f"{name}, {cores} cores" if name and cores else name


def _threads(record: Summary) -> str:
    limit = _dict(record.experiment.get("limits")).get("num_threads")
    threads = _dict(record.environment.get("threads"))
    count = limit or threads.get("torch") or threads.get("OMP_NUM_THREADS")
    return str(count) if count else ""


def _workload(record: Summary) -> str:
    workload = _dict(record.experiment.get("workload"))
    return with_options(str(workload.get("name", "")), _dict(workload.get("options")))


def _dates(records: Sequence[Summary]) -> str:
    days = sorted(record.created[:10] for record in records)
    return days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"


def _versions(records: Sequence[Summary]) -> str:
    pythons = {str(record.environment.get("python", "")) for record in records} - {""}
    texts = [f"python {', '.join(sorted(pythons))}"] if pythons else []
    for package in VERSIONS:
        versions = {_packages(record).get(package) for record in records} - {None}
        if versions:
            texts.append(f"{package} {', '.join(sorted(map(str, versions)))}")
    return "; ".join(texts)


def _packages(record: Summary) -> dict[str, Any]:
    return _dict(record.environment.get("packages"))


def _edited(record: Summary) -> bool:
    return bool(_dict(record.environment.get("git")).get("edited"))


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
