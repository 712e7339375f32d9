"""The components that come with the core: the engines, the workloads and the evaluators."""

from __future__ import annotations

from infermix.engine.components import COMPONENTS as ENGINES
from infermix.engine.simulated.components import COMPONENTS as SIMULATED
from infermix.hookspecs import hookimpl
from infermix.quality.components import COMPONENTS as EVALUATORS
from infermix.roles.component import Component
from infermix.workload.components import COMPONENTS as WORKLOADS
from infermix.workload.trace_components import COMPONENTS as TRAFFIC


@hookimpl
def infermix_engine() -> list[Component]:
    return [*ENGINES, *SIMULATED]


@hookimpl
def infermix_workload() -> list[Component]:
    return [*WORKLOADS, *TRAFFIC]


@hookimpl
def infermix_evaluator() -> list[Component]:
    return list(EVALUATORS)
