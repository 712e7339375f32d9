"""Faults of the options that all workloads share."""

from __future__ import annotations

from typing import Any

import pytest
from infermix.spec.validate import Report, check_struct
from infermix.workload.components import SyntheticOptions


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"arrivals": {"use": "posson", "request_rate": 1}},
            ["arrivals.use: expected one of the known values, got 'posson' "
             "(did you mean 'poisson'? known: constant, gamma, on_off, poisson, ramp)"],
        ),
        (
            {"arrivals": {"request_rate": 1}},
            ["arrivals: object missing required field use "
             "(write {use: constant, ...}; known: constant, gamma, on_off, poisson, ramp)"],
        ),
        (
            {"arrivals": "poisson"},
            ["arrivals: expected object | null, got 'poisson' "
             "(write {use: poisson, ...}; known: constant, gamma, on_off, poisson, ramp)"],
        ),
        (
            {"arrivals": {"use": "poisson", "request_rate": -1, "cvv": 2}},
            ["arrivals.cvv: unknown key (known: request_rate)",
             "arrivals.request_rate: expected float > 0.0, got -1"],
        ),
        ({"stop_token_ids": [2, -1]}, ["stop_token_ids[1]: expected int >= 0, got -1"]),
    ],
)  # fmt: skip
def test_faults(options: dict[str, Any], expected: list[str]) -> None:
    report = Report()
    assert check_struct(options, SyntheticOptions, (), report) is None
    assert [str(error) for error in report.errors] == expected
