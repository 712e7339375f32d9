"""What a plan says about limits that nothing in the cell uses, or that cannot work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from infermix.cell.answers import Answers
from infermix.cell.assemble import assemble
from infermix.cli import main
from infermix.compose import compose
from infermix.failure import CellFailure
from infermix.plugins import load_catalogue
from infermix.roles.facts import MachineFacts
from infermix.spec.load import load_experiment

CPU = MachineFacts("cpu", "test machine", 64 << 30, 8)
MODEL = {
    "model_type": "llama", "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128,
}  # fmt: skip
SWAP = "scheduler: {use: continuous, preemption: swap}"
#: K and V of 16 tokens in two layers of 4 heads of 16 float32.
BLOCK = 16 * 2 * 2 * 4 * 16 * 4
SINK = "kv: {use: sink_window, window: 8, sink_tokens: 0, block_size: 4, max_chunk_tokens: 20}"

Reasons = Callable[..., tuple[str, ...]]


@pytest.fixture
def reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reasons:
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(json.dumps(MODEL), encoding="utf-8")

    def of(parts: str, limits: str = "", engine: str = "native") -> tuple[str, ...]:
        Path("x.yaml").write_text(
            "model: {source: model.json, weights: dummy}\n"
            "workload: {use: synthetic, num_requests: 2, input_tokens: 60, output_tokens: 4, ignore_eos: false}\n"
            f"dtype: float32\nparts: {{{parts}}}\nlimits: {{{limits}}}\nengine: {engine}\n",
            encoding="utf-8",
        )
        (plan,) = compose(load_experiment("x.yaml"), load_catalogue(), machine=CPU)
        return plan.reasons

    return of


@pytest.mark.parametrize("engine", ["native", "disaggregated", "{use: simulated}"])
def test_host_memory_that_nobody_swaps_to_is_refused(reasons: Reasons, engine: str) -> None:
    (reason,) = reasons("kv: paged", "kv_swap_bytes: 1000000", engine)
    assert reason.startswith("limits.kv_swap_bytes is 1000000, but no part of this cell swaps")
    assert reasons("kv: paged", engine=engine) == ()


def test_host_memory_that_somebody_swaps_to_is_fine(reasons: Reasons) -> None:
    assert reasons(f"kv: paged, {SWAP}", "kv_swap_bytes: 1000000") == ()


@pytest.mark.parametrize("engine", ["native", "{use: simulated}"])
def test_memory_for_a_kv_that_keeps_nothing_is_refused(reasons: Reasons, engine: str) -> None:
    (reason,) = reasons("kv: none", "kv_memory_bytes: 1000000", engine)
    assert reason.startswith("limits.kv_memory_bytes is 1000000, but kv 'none' keeps nothing between steps")
    assert reasons("kv: none", engine=engine) == ()
    assert reasons("kv: paged", "kv_memory_bytes: 1000000", engine) == ()


def test_replicas_share_the_host_memory(reasons: Reasons) -> None:
    def of(num_bytes: int) -> tuple[str, ...]:
        return reasons(f"kv: paged, {SWAP}", f"kv_swap_bytes: {num_bytes}", "{use: native, replicas: 3}")

    (reason,) = of(3 * BLOCK - 1)
    assert reason.startswith(
        f"{3 * BLOCK - 1} bytes of host memory do not hold one block of KV for each of 3 engines"
    )
    assert f"at least {3 * BLOCK} bytes" in reason
    assert of(3 * BLOCK) == ()


def test_a_simulated_machine_must_hold_one_sequence(reasons: Reasons) -> None:
    (stated,) = reasons("kv: paged", "kv_memory_bytes: 100", "{use: simulated}")
    assert stated.startswith("100 bytes of KV memory do not hold one sequence of 64 tokens")
    (device,) = reasons("kv: paged", engine="{use: simulated, memory_bytes: 1000}")
    assert device.startswith("0 bytes of KV memory do not hold one sequence")
    assert reasons("kv: paged", engine="{use: simulated, memory_bytes: 80000000000}") == ()


def _drafting(decoder: str, num_draft_tokens: int) -> str:
    return f"{SINK}, decoder: {decoder.replace('DRAFTS', str(num_draft_tokens))}"


@pytest.mark.parametrize(
    "decoder",
    [
        "{use: self_speculative, skip_layers: [1], num_draft_tokens: DRAFTS}",
        "{use: token_healing, decoder: self_speculative, "
        "decoder_options: {skip_layers: [1], num_draft_tokens: DRAFTS}}",
    ],
)
def test_a_draft_model_must_not_run_out_of_the_window(reasons: Reasons, decoder: str) -> None:
    """The last draft is not computed by the draft model, so one more than the window can be taken back."""
    (reason,) = reasons(_drafting(decoder, 10))
    assert "window of 8 tokens while the draft model runs 10 drafts ahead" in reason
    assert "at most 9 draft tokens" in reason
    assert reasons(_drafting(decoder, 9)) == ()
    assert reasons(_drafting("{use: prompt_lookup, num_draft_tokens: DRAFTS}", 10)) == ()


def test_drafts_of_an_inner_decoder_count(reasons: Reasons) -> None:
    decoder = "{use: token_healing, decoder: prompt_lookup, decoder_options: {num_draft_tokens: DRAFTS}}"
    (reason,) = reasons(_drafting(decoder, 20))
    assert reason.startswith("kv 'sink_window' takes 20 tokens of a sequence at once, the decoder verifies 20 drafts")
    assert reasons(_drafting(decoder, 19)) == ()


@pytest.mark.parametrize("limit", ["kv_memory_bytes: 1000000", "kv_memory_fraction: 0.5"])
def test_a_limit_that_an_engine_has_no_use_for_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], limit: str
) -> None:
    """Limits are stated for all cells of a comparison, so this is no mistake; the plan and the record say it."""
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(json.dumps(MODEL), encoding="utf-8")
    Path("x.yaml").write_text(
        "model: {source: model.json, weights: dummy}\ndevice: cpu\ndtype: float32\n"
        "workload: {use: synthetic, num_requests: 2, input_tokens: 8, output_tokens: 4}\n"
        f"limits: {{{limit}}}\nengine: transformers\n",
        encoding="utf-8",
    )
    (plan,) = compose(load_experiment("x.yaml"), load_catalogue(), machine=CPU)
    name = limit.partition(":")[0]
    told = f"limits.{name} is not used by engine 'transformers', whose KV takes what its requests need"
    assert (plan.runs, plan.notes) == (True, (told,))
    assert told in assemble(plan, Answers(failure=CellFailure("error", "stopped")), None, {}).log
    assert main(["plan", "x.yaml"]) == 0
    assert told in capsys.readouterr().out


def test_an_engine_that_uses_a_limit_notes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.json").write_text(json.dumps(MODEL), encoding="utf-8")
    Path("x.yaml").write_text(
        "model: {source: model.json, weights: dummy}\nworkload: {use: synthetic, num_requests: 2}\n"
        "limits: {kv_memory_bytes: 1000000}\n",
        encoding="utf-8",
    )
    (plan,) = compose(load_experiment("x.yaml"), load_catalogue(), machine=CPU)
    assert plan.notes == ()
