"""Worked cases, checked by hand, that the cost model must reproduce."""

from __future__ import annotations

from pathlib import Path

import pytest
from infermix.cost import formulas as f
from infermix.cost.kv import kv_bytes_per_token, kv_bytes_read, kv_groups
from infermix.cost.memory import sequences_that_fit
from infermix.cost.model_facts import read_model_facts
from infermix.cost.roofline import (
    SCORES,
    decode_cost,
    ideal_step,
    prefill_cost,
    weight_bytes_stored,
)
from infermix.cost.source import resolve_source
from infermix.roles.facts import ModelFacts
from infermix.spec.experiment import ModelSource

H100_BYTES, H100_FLOPS = 3.35e12, 989e12


def shape(name: str, dtype: str = "bfloat16") -> ModelFacts:
    source = resolve_source(ModelSource(source=f"shape:{name}", weights="dummy"), Path())
    return read_model_facts(source, dtype=dtype)


FORMULAS = [
    ("ridge of an H100 in bf16", f.ridge(H100_FLOPS, H100_BYTES), 295.2, 0.05),
    ("rows to reach it with bf16 weights", f.ridge_rows(H100_FLOPS, H100_BYTES, 16), 295.2, 0.05),
    ("rows to reach it with int8 weights", f.ridge_rows(H100_FLOPS, H100_BYTES, 8), 147.6, 0.05),
    ("matmul intensity", f.matmul_intensity(295, 8192, 32768), 282.3, 0.05),
    ("rows for an intensity", f.matmul_rows_for(f.ridge(H100_FLOPS, H100_BYTES), 8192, 32768), 309.2, 0.05),
    ("attention intensity, prefill", f.attention_intensity(2048, 2048), 1024, 0),
    ("attention intensity, decode", f.attention_intensity(2048, 1), 0.9995, 5e-5),
    ("attention intensity, decode, 4 queries a KV head", f.attention_intensity(2048, 1, 4), 3.998, 5e-4),
    ("KV bytes", f.kv_bytes(40, 40, 128, 2048, 2), 1_677_721_600, 0),
    ("KV bytes of 64 sequences, GB", 64 * f.kv_bytes(40, 40, 128, 2048, 2) / 1e9, 107.37, 0.005),
    ("positions without a cache", f.positions_forwarded(512, 128, cached=False), 73_664, 0),
    ("positions with a cache", f.positions_forwarded(512, 128, cached=True), 639, 0),
    ("score matrix, GB", f.score_matrix_bytes(131_072, 8) / 1e9, 274.9, 0.05),
    ("LoRA parameters", f.lora_parameters(16, 4096, 4096), 131_072, 0),
    ("LoRA share", 100 * f.lora_parameters(16, 4096, 4096) / 4096**2, 0.781, 5e-4),
    ("blocks of a shared prefix", f.shared_prefix_blocks(2000, 1000, 16)[0], 125, 0),
    ("blocks without sharing", f.shared_prefix_blocks(2000, 1000, 16)[1], 125_000, 0),
    ("a prefix below one block shares nothing", f.shared_prefix_blocks(15, 1000, 16)[0], 1000, 0),
    ("waste of a reserved slot, %", 100 * f.waste(512, 80), 84.4, 0.05),
    ("blocks of 80 tokens", f.blocks(80, 16), 5, 0),
    ("waste of 80 tokens, %", 100 * f.waste(16 * f.blocks(80, 16), 80), 0, 0),
    ("blocks of 81 tokens", f.blocks(81, 16), 6, 0),
    ("waste of 81 tokens, %", 100 * f.waste(16 * f.blocks(81, 16), 81), 15.6, 0.05),
    ("tokens per target forward", f.tokens_per_target_forward(0.8, 5), 3.689, 5e-4),
    ("tokens per target forward, all accepted", f.tokens_per_target_forward(1, 5), 6, 0),
    ("speed-up, 1B drafts for 70B", f.speculative_speedup(3, 5, 1 / 70), 3.73, 0.005),
    ("speed-up, 8B drafts for 70B", f.speculative_speedup(3, 5, 8 / 70), 2.55, 0.006),
    ("swap, ms", 1e3 * f.transfer_s(1.678e9, 32e9), 52.4, 0.05),
    ("7B fp16 weights, tokens/s", 1 / f.decode_step_s(f.weight_bytes(7e9, 16), 0, 1, H100_BYTES), 239, 0.5),
    ("Mixtral at 4 bits, GB", f.weight_bytes(46.7e9, 4) / 1e9, 23.4, 0.06),
    ("Mixtral at 4.25 bits, GB", f.weight_bytes(46.7e9, 4.25) / 1e9, 24.8, 0.05),
    ("int4 with fp16 scales per 64", f.bits_per_weight(4, 64, 16), 4.25, 0),
    ("NF4", f.bits_per_weight(4, 64, 32), 4.5, 0),
    ("NF4, double quantization", f.bits_per_weight(4, 64, 8, scales_per_scale=256), 4.127, 5e-4),
]


@pytest.mark.parametrize(("value", "expected", "tolerance"), [c[1:] for c in FORMULAS], ids=[c[0] for c in FORMULAS])
def test_formula(value: float, expected: float, tolerance: float) -> None:
    assert value == pytest.approx(expected, abs=tolerance, rel=0)


def test_matmul_intensity_has_a_bound_that_no_number_of_rows_reaches() -> None:
    assert f.matmul_rows_for(8192, 8192, 32768) == float("inf")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-7b", 6_738_415_616),
        ("llama-3-70b", 70_553_706_496),
        ("mistral-7b", 7_241_732_096),
        ("smollm2-135m", 134_515_008),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen3-8b", 8_190_735_360),
        ("llama-3.2-1b", 1_235_814_400),
    ],
)
def test_parameters_of_the_shipped_shapes(name: str, parameters: int) -> None:
    assert shape(name).num_parameters == parameters


def test_kv_of_llama_2_13b() -> None:
    facts = shape("llama-2-13b")
    assert facts.weight_bytes / 1e9 == pytest.approx(26.03, abs=0.005)
    assert kv_bytes_per_token(facts) * 2048 == 1_677_721_600
    assert kv_bytes_read(kv_groups(facts), 2048, 2) == 1_677_721_600


@pytest.mark.parametrize(
    ("batch", "milliseconds", "tokens_per_s", "gigabytes"), [(1, 8.02, 124.7, 26.87), (64, 23.8, 2689, 79.7)]
)
def test_textbook_decode_step_of_llama_2_13b(
    batch: int, milliseconds: float, tokens_per_s: float, gigabytes: float
) -> None:
    facts = shape("llama-2-13b")
    each = kv_bytes_per_token(facts) * 1024
    seconds = f.decode_step_s(facts.weight_bytes, each, batch, H100_BYTES)
    assert seconds * 1e3 == pytest.approx(milliseconds, abs=0.05)
    assert batch / seconds == pytest.approx(tokens_per_s, rel=1e-3)
    assert (facts.weight_bytes + batch * each) / 1e9 == pytest.approx(gigabytes, abs=0.05)


def test_what_fits_80_gb() -> None:
    facts = shape("llama-2-13b")
    assert (facts.weight_bytes + 256 * kv_bytes_per_token(facts) * 1024) / 1e9 == pytest.approx(240.8, abs=0.05)
    assert sequences_that_fit(facts, 80 * 10**9, 1024) == 64
    assert sequences_that_fit(facts, 20 * 10**9, 1024) == 0


@pytest.mark.parametrize(("batch", "milliseconds"), [(1, 3.54), (64, 5.64)])
def test_byte_floor_of_llama_3_8b_on_an_h200(batch: int, milliseconds: float) -> None:
    """Measured ceilings of an H200; the embedding table is not read, only looked up."""
    step = ideal_step(decode_cost(shape("llama-3-8b"), 1024 + 64, batch), 4280e9, 685e12)
    assert step.seconds * 1e3 == pytest.approx(milliseconds, abs=0.005)
    assert step.binds == "bandwidth"


def test_prefill_is_bound_by_compute_and_costs_two_flops_a_weight() -> None:
    facts = shape("llama-3-8b")
    cost = prefill_cost(facts, 2048)
    linears = sum(m.parameters for m in facts.matrices if m.kind in ("attention", "mlp"))
    kinds = {kind.kind: kind for kind in cost.kinds}
    assert kinds["attention"].flops + kinds["mlp"].flops == 2 * linears * 2048
    assert kinds["lm_head"].flops == 2 * 128_256 * 4096
    assert kinds[SCORES].flops == 4 * 32 * 128 * 32 * (2048 * 2049 // 2)
    assert ideal_step(cost, 4280e9, 685e12).binds == "compute"


def test_decoding_without_a_cache_forwards_everything() -> None:
    facts = shape("llama-3-8b")
    assert decode_cost(facts, 512, cached=False).flops == pytest.approx(prefill_cost(facts, 512).flops)


def test_mixtral_under_int4() -> None:
    facts = shape("mixtral-8x7b")
    kept = sum(m.parameters for m in facts.matrices if m.kind in ("embedding", "lm_head", "router"))
    kept += facts.other_parameters
    assert weight_bytes_stored(facts, 4) == (facts.num_parameters - kept) / 2 + 2 * kept
    assert weight_bytes_stored(facts) == facts.weight_bytes


@pytest.mark.parametrize(("batch", "share"), [(1, 2 / 8), (8, 1 - 0.75**8), (512, 1.0)])
def test_only_the_experts_that_are_hit_are_read(batch: int, share: float) -> None:
    facts = shape("mixtral-8x7b")
    experts = next(kind for kind in decode_cost(facts, 64, batch).kinds if kind.kind == "expert")
    resident = 2 * sum(m.parameters for m in facts.matrices if m.kind == "expert")
    assert experts.weight_bytes == pytest.approx(resident * share)
    assert experts.flops == pytest.approx(2 * batch * (resident / 2) * 2 / 8)
