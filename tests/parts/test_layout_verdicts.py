"""What a plan says about layouts that ask something of the model, and models that ask something of the layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from infermix.compose import CellPlan, compose
from infermix.plugins import load_catalogue
from infermix.roles.facts import MachineFacts
from infermix.spec.load import load_experiment

CPU = MachineFacts("cpu", "test machine", 64 << 30, 8)
GPU = MachineFacts("cuda", "test gpu", 80 << 30, 8, 90)
SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 128, "sliding_window": None}
LLAMA = {"model_type": "llama", **SIZES, **HEADS}
MAMBA = {"model_type": "mamba", **SIZES, "state_size": 8}
#: The widths of DeepSeek-V3's attention in a model of two small layers.
DEEPSEEK = {
    "model_type": "deepseek_v3", **SIZES, **HEADS, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "q_lora_rank": 32,
    "qk_nope_head_dim": 128, "v_head_dim": 128, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}  # fmt: skip


MISTRAL = {**LLAMA, "model_type": "mistral", "sliding_window": 8}
SWAPPING = ", scheduler: {use: continuous, preemption: swap}"


@pytest.fixture
def verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., CellPlan]:
    monkeypatch.chdir(tmp_path)

    def of(
        config: dict[str, Any], kv: str, attention: str = "sdpa", machine: MachineFacts = CPU, more: str = "",
        parts: str = "",
    ) -> CellPlan:  # fmt: skip
        Path("model.json").write_text(json.dumps(config), encoding="utf-8")
        Path("x.yaml").write_text(
            "model: {source: model.json, weights: dummy}\n"
            "workload: {use: synthetic, num_requests: 2, input_tokens: 60, output_tokens: 4, ignore_eos: false}\n"
            f"parts: {{kv: {kv}, attention: {attention}{parts}}}\n{more}\n",
            encoding="utf-8",
        )
        (plan,) = compose(load_experiment("x.yaml"), load_catalogue(), machine=machine)
        return plan

    return of


def test_latents_need_a_model_that_has_them(verdict: Any) -> None:
    assert verdict(LLAMA, "latent").reasons == ("kv 'latent' needs model:latent, which llama models do not have",)
    plan = verdict(DEEPSEEK, "latent")
    assert plan.reasons == ()
    assert plan.adapters == {"view:dense": "gather"}


def test_latents_take_less_memory_than_what_they_expand_to(verdict: Any) -> None:
    latent, paged = verdict(DEEPSEEK, "latent").memory.kv_bytes, verdict(DEEPSEEK, "paged").memory.kv_bytes
    assert paged / latent == pytest.approx(4 * (128 + 64 + 128) / (512 + 64))


def test_a_backend_for_narrower_heads_is_refused(verdict: Any) -> None:
    assert not any("head_dim" in reason for reason in verdict(DEEPSEEK, "latent", "triton", GPU).reasons)
    wide = {**DEEPSEEK, "kv_lora_rank": 1024}
    reasons = verdict(wide, "latent", "triton", GPU).reasons
    assert "kv 'latent' needs head_dim:1088, which attention 'triton' does not provide" in reasons


def test_recurrent_layers_need_a_layout_that_keeps_states(verdict: Any) -> None:
    (reason,) = verdict(MAMBA, "paged").reasons
    assert reason.startswith("the model needs kv:state (a layout that keeps the states of its recurrent layers)")
    assert reason.endswith("which kv 'paged' does not provide")
    assert verdict(MAMBA, "state").reasons == ()
    assert verdict(LLAMA, "state").reasons == ("kv 'state' needs model:state, which llama models do not have",)


@pytest.mark.parametrize("kv", ["hybrid, block_size: 4", "sink_window, window: 8, sink_tokens: 0, block_size: 4"])
def test_drafts_that_are_longer_than_what_a_ring_takes_at_once(verdict: Any, kv: str) -> None:
    def reasons(num_drafts: int) -> tuple[str, ...]:
        decoder = f", decoder: {{use: prompt_lookup, num_draft_tokens: {num_drafts}}}"
        return verdict(MISTRAL, f"{{use: {kv}, max_chunk_tokens: 5}}", parts=decoder).reasons

    assert reasons(4) == ()
    assert reasons(5) == (
        f"kv {kv.partition(',')[0]!r} takes 5 tokens of a sequence at once, the decoder verifies 5 drafts and a "
        "token of its own (max_chunk_tokens of 6, or fewer draft tokens)",
    )


def test_host_memory_that_holds_no_block(verdict: Any) -> None:
    block = 16 * 2 * 2 * 4 * 16 * 4
    small, enough = (f"limits: {{kv_swap_bytes: {size}}}" for size in (block - 1, block))
    (reason,) = verdict(LLAMA, "paged", more=small, parts=SWAPPING).reasons
    assert reason.startswith(f"{block - 1} bytes of host memory do not hold one block of KV (at least {block} bytes")
    assert verdict(LLAMA, "paged", more=enough, parts=SWAPPING).reasons == ()


@pytest.mark.parametrize("kv", ["hybrid", "sink_window", "h2o", "snapkv", "kivi"])
def test_layouts_that_only_their_own_engine_understands_are_not_handed_over(verdict: Any, kv: str) -> None:
    kv = "{use: kivi, group_size: 16, block_size: 16, residual_length: 32}" if kv == "kivi" else kv
    (reason,) = verdict(LLAMA, kv, more="engine: disaggregated").reasons
    assert reason.startswith("engine 'disaggregated' needs kv:export, which kv ")
    assert verdict(LLAMA, "quantized", more="engine: disaggregated").reasons == ()


@pytest.mark.parametrize(
    ("kv", "runs"),
    [("h2o", False), ("{use: snapkv, observation_window: 2}", False), ("snapkv", True), ("quantized", True)],
)
def test_a_draft_model_needs_what_it_wrote_to_stay(verdict: Any, kv: str, runs: bool) -> None:
    by_model = verdict(LLAMA, kv, parts=", decoder: {use: self_speculative, skip_layers: [1]}")
    assert any("does not come back when its drafts are rejected" in reason for reason in by_model.reasons) != runs
    assert by_model.runs == runs
    assert verdict(LLAMA, kv, parts=", decoder: prompt_lookup").runs
