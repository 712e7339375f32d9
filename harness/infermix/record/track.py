"""Tracks: which records may share a table.

Rows are comparable when they ran the same model (same kind of weights), the same workload over the same data, drawn
from the same seed, with the same number of threads, on the same machine and device, and were either all measured or
all simulated. Everything else (parts, engine, dtype) is what a table compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import msgspec

from infermix.record.record import Summary


def track_id(record: Summary) -> str:
    """Short hash of what must be equal for two rows to share a table; needs `experiment`, `model`,
    `environment`.
    """
    canonical = msgspec.json.encode(track_fields(record), order="deterministic")
    return hashlib.sha256(canonical).hexdigest()[:12]


def track_fields(record: Summary) -> dict[str, Any]:
    """The fields behind `track_id`.

    Without a model digest (the model could not be read) the source as written stands in for it.
    """
    experiment = record.experiment
    source = _plain(experiment.get("model"))
    data = workload_data(record.data)
    return {
        "model": record.model.get("digest") or source,
        "weights": source.get("weights", "real"),
        "workload": experiment.get("workload"),
        **({"data": data} if data else {}),
        "seed": experiment.get("seed", 0),
        "num_threads": _plain(experiment.get("limits")).get("num_threads"),
        "machine": machine_of(record).get("fingerprint", ""),
        "device": record.device,
        **({"simulated": True} if record.simulated else {}),
    }


def workload_data(data: Mapping[str, str]) -> dict[str, str]:
    """Digests of the files that the workload reads; those of evaluators do not change what was timed."""
    return {path: digest for path, digest in data.items() if path.startswith("workload.")}


def track_title(record: Summary) -> str:
    """For people: model, workload, device and machine."""
    workload = _plain(record.experiment.get("workload")).get("name", "unknown workload")
    machine = machine_of(record).get("name") or "unknown machine"
    dummy = " (dummy weights)" if _plain(record.experiment.get("model")).get("weights") == "dummy" else ""
    told = "simulated: " if record.simulated else ""
    return f"{told}{model_label(record)}{dummy}, {workload}, {record.device or 'unknown device'} ({machine})"


def model_label(record: Summary) -> str:
    """The model's label, never with the directories of a local path."""
    label = str(record.model.get("label") or _plain(record.experiment.get("model")).get("source") or "unknown model")
    return PurePath(label).name if label.startswith(("/", "~", ".")) or "\\" in label else label


def machine_of(record: Summary) -> dict[str, Any]:
    """The machine as `capture_environment` described it; empty when nothing was captured."""
    return _plain(record.environment.get("machine"))


def _plain(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
