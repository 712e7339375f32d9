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
        (
            {"arrivals": {"use": "on_off", "on_rate": 1e-6, "on_s": 0.001, "off_s": 1}},
            ["arrivals: a burst and the time behind it bring 1e-09 requests on average, at least 0.01 are needed: "
             "longer bursts, or a higher on_rate"],
        ),
        (
            {"arrivals": {"use": "gamma", "request_rate": 1, "cv": 1e200}},
            ["arrivals.cv: expected float <= 100.0, got 1e+200"],
        ),
        ({"arrivals": {"use": "poisson", "request_rate": 2e9}},
         ["arrivals.request_rate: expected float <= 1000000000.0, got 2000000000.0"]),
        ({"stop_token_ids": [2, -1]}, ["stop_token_ids[1]: expected int >= 0, got -1"]),
    ],
)  # fmt: skip
def test_faults(options: dict[str, Any], expected: list[str]) -> None:
    report = Report()
    assert check_struct(options, SyntheticOptions, (), report) is None
    assert [str(error) for error in report.errors] == expected
