"""Registers the stand-in of `isolated_script.py` as a quantizer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from infermix.hookspecs import hookimpl
from infermix.roles.component import Component, Role
from infermix.roles.environment import Environment
from infermix.toolkit.calibration import CalibratedOptions
from infermix.toolkit.isolated import IsolatedQuantizer
from msgspec import Meta

ENVIRONMENT = Environment(name="stand-in", summary="ours", pythons=("3.11", "3.12"))


class StandInOptions(CalibratedOptions, frozen=True, kw_only=True):
    fault: Annotated[Literal["none", "rope", "zeros", "crash"], Meta(description="what goes wrong")] = "none"


def _build(options: StandInOptions, context: None) -> Any:
    script = Path(__file__).with_name("isolated_script.py")
    return IsolatedQuantizer(
        name="stand_in", method="rtn", environment=ENVIRONMENT, script=script, options={"fault": options.fault}
    )


@hookimpl
def infermix_quantizer() -> list[Component]:
    return [
        Component(
            name="stand_in", role=Role.QUANTIZER, summary="rounds elsewhere", build=_build, options=StandInOptions,
            environment=ENVIRONMENT, lossless=lambda options: False,
        )
    ]  # fmt: skip
