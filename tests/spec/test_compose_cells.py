"""Composing cells: what is an error of the experiment, what is a verdict of a cell, and the sentence for each."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fake_parts import GPU, MACHINE, catalogue, write_config
from infermix.compose import CellPlan, compose
from infermix.errors import UserError
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.roles.facts import MachineFacts
from infermix.spec.experiment import Measure
from infermix.spec.load import load_experiment

HEAD = "model: {source: tiny.json, weights: dummy}\nworkload: load\n"

Plan = Callable[..., list[CellPlan]]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.chdir(tmp_path)

    def of(text: str = "", machine: MachineFacts | None = MACHINE, head: str = HEAD, **config: Any) -> list[CellPlan]:
        write_config(tmp_path, **config)
        Path("x.yaml").write_text(head + text, encoding="utf-8")
        return compose(load_experiment("x.yaml"), catalogue(), machine=machine)

    return of


def reasons(plans: list[CellPlan]) -> list[tuple[str, ...]]:
    return [each.reasons for each in plans]


def faults(plan: Plan, text: str, **more: Any) -> list[str]:
    with pytest.raises(UserError) as caught:
        plan(text, **more)
    return str(caught.value).splitlines()


def test_defaults_fill_every_hosted_role(plan: Plan) -> None:
    (only,) = plan()
    assert only.runs
    assert {role.value: choice.component.name for role, choice in only.parts.items()} == {
        "attention": "sdpa", "kv": "paged", "quantizer": "none",
        "decoder": "autoregressive", "scheduler": "continuous",
    }  # fmt: skip
    assert (only.device, only.dtype, only.time_limit_s) == ("cpu", "bfloat16", 600.0)
    assert only.facts is not None
    assert (only.facts.dtype, only.max_model_len, only.max_num_seqs) == ("bfloat16", 64, 4)


def test_speculation_on_random_tokens_is_refused(plan: Plan) -> None:
    """By what decoder and workload declare, whatever they are called."""
    head = "model: {source: tiny.json, weights: dummy}\n"
    drafting, plain = plan("sweep: {parts.decoder: [speculative, autoregressive]}\n", head=head + "workload: noise\n")
    assert (drafting.runs, plain.runs) == (False, True)
    (reason,) = drafting.reasons
    assert reason.startswith("decoder 'speculative' with workload 'noise': ")
    assert "says nothing about speculation" in reason
    (on_text,) = plan("parts: {decoder: speculative}\n", head=head + "workload: load\n")
    assert on_text.runs


def test_adapters_are_declared_on_the_row_and_the_part(plan: Plan) -> None:
    paged, dense = plan("sweep: {parts.kv: [paged, dense]}\n")
    assert (paged.runs, paged.adapters) == (True, {"view:dense": "gather"})
    assert paged.parts[Role.ATTENTION].via == {"view:dense": "gather"}
    assert (dense.runs, dense.adapters, dense.parts[Role.ATTENTION].via) == (True, {}, {})


def test_an_alternative_that_is_there_needs_no_adapter(plan: Plan) -> None:
    (only,) = plan("parts: {attention: windowed, kv: paged}\n")
    assert (only.runs, only.adapters) == (True, {})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("parts: {kv: opaque}", "attention 'sdpa' needs view:dense, which kv 'opaque' does not provide"),
        (
            "parts: {decoder: speculative, kv: dense}",
            "decoder 'speculative' needs kv:truncate, which kv 'dense' does not provide",
        ),
        (
            "parts: {attention: gpu, kv: dense}",
            "attention 'gpu' needs device:cuda, this cell runs on cpu (test machine)",
        ),
        (
            "parts: {attention: small, kv: dense}",
            "the model needs head_dim:64, which attention 'small' does not provide",
        ),
        (
            "parts: {attention: small, kv: dense}",
            "attention 'small' needs dtype:float16, this cell computes in bfloat16",
        ),
        (
            "parts: {quantizer: absent}",
            "quantizer 'absent' needs a_library_that_is_not_here: pip install infermix[absent]",
        ),
        ("engine: whole\nparts: {kv: dense}", "engine 'whole' takes quantizer, not kv 'dense'"),
        (
            "engine: whole\nquality: [score]",
            "evaluator 'score' needs engine:score, which engine 'whole' does not provide",
        ),
        (
            "workload: {use: load, tokens: 600}",
            "workload 'load' asks for sequences of 600 tokens, but the model has 512 positions",
        ),
        (
            "limits: {max_model_len: 32}",
            "workload 'load' asks for sequences of 64 tokens, but limits.max_model_len is 32",
        ),
        ("limits: {max_model_len: 900}", "limits.max_model_len is 900, but the model has 512 positions"),
        ("device: cuda", "this machine has no device cuda"),
    ],
)
def test_a_mix_that_cannot_run_is_invalid_with_its_reason(plan: Plan, text: str, reason: str) -> None:
    head = HEAD.splitlines()[0] + "\n" if text.startswith("workload") else HEAD
    (only,) = plan(text + "\n", head=head)
    assert not only.runs
    assert reason in only.reasons


def test_limits_on_single_gaps_are_refused_before_a_simulation_without_them(tmp_path: Path) -> None:
    """Else a simulation of hours would end with the error, and take the cells behind it along."""
    write_config(tmp_path)
    path = tmp_path / "x.yaml"
    path.write_text(
        "model: {source: tiny.json, weights: dummy}\nworkload: {use: synthetic, input_tokens: 8, output_tokens: 8}\n"
        "measure: {goodput: {itl_s: 0.1}}\n"
        "sweep: {engine: [{use: simulated}, {use: simulated, detail: tokens}, native]}\n",
        encoding="utf-8",
    )
    simulated, detailed, native = compose(load_experiment(path), load_catalogue(), machine=MACHINE)
    assert any("measure.goodput.itl_s without times of its tokens" in reason for reason in simulated.reasons)
    assert not [reason for each in (detailed, native) for reason in each.reasons if "itl_s" in reason]


def test_model_features_are_asked_of_the_attention_backend(plan: Plan) -> None:
    window = {"model_type": "mistral", "sliding_window": 64}
    plain, windowed = plan("sweep: {parts.attention: [sdpa, windowed]}\n", **window)
    assert plain.reasons == ("the model needs attn:sliding_window, which attention 'sdpa' does not provide",)
    assert windowed.runs


def test_several_reasons_are_all_told(plan: Plan) -> None:
    (only,) = plan("parts: {kv: opaque, decoder: speculative, quantizer: absent}\n")
    assert len(only.reasons) == 3


def test_whole_engines_take_no_default_parts(plan: Plan) -> None:
    (only,) = plan("engine: whole\n")
    assert only.runs
    assert [role.value for role in only.parts] == ["quantizer"]


def test_a_refused_model_counts_where_attention_is_hosted(plan: Plan) -> None:
    native, whole = plan("sweep: {engine: [native, whole]}\n", model_type="bloom", n_layer=2, n_head=4)
    assert not native.runs
    assert whole.runs


def test_what_does_not_fit_is_invalid(plan: Plan) -> None:
    small = MachineFacts("cpu", "tiny machine", 600_000_000, 2)
    large = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8}
    full, half = plan("sweep: {parts.quantizer: [none, half]}\n", small, **large)
    assert full.reasons[0].startswith("does not fit: needs ")
    assert "GB (weights " in full.reasons[0]
    assert full.memory is not None
    assert half.memory is not None
    assert half.memory.weights_bytes < full.memory.weights_bytes


def test_lengths_that_are_only_assumed_refuse_nothing(plan: Plan) -> None:
    small = MachineFacts("cpu", "small machine", 700_000_000, 2)
    many = "parts: {scheduler: {use: continuous, max_num_seqs: 4096}}\n"
    head = HEAD.replace(" load", " {use: load, tokens: 512, told: TOLD}")
    (told,) = plan(many, small, head.replace("TOLD", "true"))
    (untold,) = plan(many, small, head.replace("TOLD", "false"))
    assert told.reasons[0].startswith("does not fit: needs ")
    assert untold.runs
    (heavy,) = plan(many, small, head.replace("TOLD", "false"), hidden_size=4096, intermediate_size=16384)
    assert "KV 0.0" in heavy.reasons[0]


def test_dtype_auto(plan: Plan) -> None:
    def dtype(native: str, machine: MachineFacts, asked: str = "auto") -> str:
        return plan(f"dtype: {asked}\n", machine, torch_dtype=native)[0].dtype

    assert dtype("float32", MACHINE) == "float32"
    assert dtype("float32", GPU) == "bfloat16"
    assert dtype("float16", GPU) == "float16"
    assert dtype("bfloat16", MACHINE) == "bfloat16"
    assert dtype("bfloat16", MACHINE, "float32") == "float32"


def test_a_dtype_that_the_machine_lacks(plan: Plan) -> None:
    old = MachineFacts("cuda", "old gpu", 8 << 30, 4, 70, dtypes=frozenset({"float32", "float16"}))
    assert "old gpu does not compute in bfloat16" in plan("", old)[0].reasons


def test_unknown_names_and_options_are_errors_of_the_experiment_with_their_places(plan: Plan) -> None:
    found = faults(
        plan,
        "engine: nativ\nquality: [scor]\nsweep:\n  parts.attention: [sdpa, spda]\n"
        "  parts.kv: [paged, {use: paged, blok_size: 3}, {use: paged, block_size: 0}]\n",
    )
    assert [line.split("(")[0].strip() for line in found] == [
        "x.yaml:3:9: engine.use: no engine component is called 'nativ'",
        "x.yaml:4:11: quality[0].use: no evaluator component is called 'scor'",
        "x.yaml:7:34: parts.kv.blok_size: unknown key",
        "x.yaml:7:74: parts.kv.block_size: expected int >= 1, got 0",
        "x.yaml:6:27: parts.attention.use: no attention component is called 'spda'",
    ]
    assert "did you mean 'native'? known: native, whole" in found[0]
    assert "did you mean 'block_size'?" in found[2]


def test_a_plugin_that_failed_to_load_is_named(plan: Plan, tmp_path: Path) -> None:
    plan()
    Path("x.yaml").write_text(HEAD + "parts: {attention: flash}\n")
    with pytest.raises(UserError, match="plugins that failed to load: broken"):
        compose(load_experiment("x.yaml"), catalogue({"broken": "ImportError: no"}), machine=MACHINE)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("{source: nope.json, weights: dummy}", "x.yaml:1:17: model.source: there is no file or directory"),
        ("tiny.json", "tiny.json has a config and no weights"),
        ("package:not_installed", "the model package not_installed is not installed"),
    ],
)
def test_a_model_that_is_not_there_is_an_error_with_its_line(plan: Plan, model: str, message: str) -> None:
    (found,) = faults(plan, "", head=f"model: {model}\nworkload: load\n")
    assert found.startswith("x.yaml:1:")
    assert message in found


def test_cells_alone_compose_as_well(plan: Plan) -> None:
    (only,) = plan()
    (again,) = compose([only.cell], catalogue(), machine=MACHINE)
    assert (again.runs, again.memory) == (only.runs, only.memory)


def test_a_thousand_cells_are_planned_quickly(plan: Plan) -> None:
    seeds = ", ".join(map(str, range(125)))
    text = f"sweep:\n  seed: [{seeds}]\n  parts.attention: [sdpa, windowed]\n  parts.kv: [paged, dense]\n"
    text += "  parts.quantizer: [none, half]\n"
    start = time.process_time()
    assert len(plan(text)) == 1000
    assert time.process_time() - start < 1.5


def test_names_below_measure_are_checked_at_their_place(plan: Plan) -> None:
    text = "measure: {gates: {perplexity: 1.5}, guards: {cpu_wit: 0.1}, goodput: {tpt_s: 1.0}}\n"
    gate, guard, limit = faults(plan, text + "sweep: {parts.kv: [dense, paged]}\n")
    assert gate.startswith("x.yaml:3:19: measure.gates.perplexity: there is no gate 'perplexity'")
    assert "did you mean 'perplexity_ratio'?" in gate
    assert guard.startswith(
        "x.yaml:3:46: measure.guards.cpu_wit: there is no guard 'cpu_wit' (did you mean 'cpu_wait'?"
    )
    assert limit.startswith(
        "x.yaml:3:71: measure.goodput.tpt_s: there is no goodput limit 'tpt_s' (did you mean 'tpot_s'"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "measure: {gates: {empty_share: -1}}",
            "x.yaml:3:32: measure.gates.empty_share: expected float >= 0.0, got -1",
        ),
        ("measure: {guards: {swap: -0.5}}", "x.yaml:3:26: measure.guards.swap: expected float >= 0.0, got -0.5"),
        ("measure: {guards: {swap: .inf}}", "x.yaml:3:26: measure.guards.swap: '.inf' is not a finite number"),
    ],
)
def test_limits_below_measure_are_finite_and_not_negative(plan: Plan, text: str, expected: str) -> None:
    (found,) = faults(plan, text + "\n")
    assert found.startswith(expected)


def test_cells_made_in_python_are_held_to_the_same_limits(plan: Plan) -> None:
    (only,) = plan()
    measure = Measure(guards={"swap": float("inf")}, gates={"empty_share": -1.0})
    cell = msgspec.structs.replace(
        only.cell, experiment=msgspec.structs.replace(only.cell.experiment, measure=measure)
    )
    with pytest.raises(UserError) as caught:
        compose([cell], catalogue(), machine=MACHINE)
    assert str(caught.value).splitlines() == [
        "measure.gates.empty_share: expected a finite number from 0 on, got -1",
        "measure.guards.swap: expected a finite number from 0 on, got inf",
    ]
