"""The real libraries in their environments, which `make environments` makes, and how they go wrong in silence."""

from __future__ import annotations

from typing import Any

import pytest
from infermix import environments
from infermix.errors import WrongResult
from isolated_jobs import CALIBRATION, component_of, quantizer_of, run_job

pytestmark = pytest.mark.full

LIBRARIES: list[Any] = [
    pytest.param("auto_gptq", {"group_size": 32}, id="auto_gptq"),
    pytest.param("auto_gptq", {"group_size": 32, "symmetric": False, "act_order": True}, id="auto_gptq-act-order"),
    pytest.param("autoawq", {"group_size": 32}, id="autoawq"),
    pytest.param("gptqmodel_gptq", {"group_size": 32}, id="gptqmodel_gptq"),
    pytest.param("gptqmodel_awq", {"group_size": 32}, id="gptqmodel_awq"),
]


@pytest.fixture(autouse=True)
def _results_elsewhere(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's environments, but no results that an earlier run has kept."""
    monkeypatch.setattr("infermix.engine.isolated.cache_dir", lambda *parts: tmp_path)


@pytest.mark.parametrize(("name", "given"), LIBRARIES)
def test_a_library_passes_its_gates(name: str, given: dict[str, Any]) -> None:
    component = component_of(name)
    options = component.options(**given, calibration=CALIBRATION)
    gates = run_job(quantizer_of(component, options), options).facts["gates"]
    assert gates["unquantized_perplexity_there"] == pytest.approx(gates["unquantized_perplexity"], rel=1e-3)
    assert gates["quantized_perplexity"] < 1.3 * gates["unquantized_perplexity"]


def test_corruption_a_a_config_that_transformers_4_does_not_read() -> None:
    """It takes the rotary base of its class default and says nothing."""
    component = component_of("auto_gptq")
    options = component.options(group_size=32, calibration=CALIBRATION)
    with pytest.raises(WrongResult, match="in the environment 'auto-gptq' and of"):
        run_job(quantizer_of(component, options, config_form="transformers-5"), options)


def test_corruption_c_a_search_that_overwrites_what_it_put_aside() -> None:
    component = component_of("autoawq")
    options = component.options(group_size=32, calibration=CALIBRATION)
    with pytest.raises(WrongResult, match="when read back"):
        run_job(quantizer_of(component, options, clone=False), options)


def test_the_environments_hold_what_was_pinned() -> None:
    component = component_of("auto_gptq")
    assert component.environment is not None
    packages = environments.packages(component.environment)
    found = {name.lower().replace("_", "-"): version for name, version in packages.items()}
    for pin in (*component.environment.pins, *component.environment.no_deps):
        name, _, version = pin.partition("==")
        assert found[name].partition("+")[0] == version
