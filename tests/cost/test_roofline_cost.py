"""Counting of FLOPs, experts and bytes; fractions of the limit; memory predictions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from infermix.cost.flops import attended_pairs, attention_flops, distinct_experts, output_matrix
from infermix.cost.kv import kv_bytes_read, kv_groups
from infermix.cost.memory import activation_bytes, fits, predict_memory, sequences_that_fit
from infermix.cost.roofline import (
    SCORES,
    decode_cost,
    ideal_step,
    limit_fractions,
    phase_cost,
    prefill_cost,
    weight_bytes_stored,
)
from infermix.roles.facts import Ceilings, LayerFacts, MachineFacts, MatrixFacts, ModelFacts
from infermix.roles.kv_space import KVShape

FULL = LayerFacts("attention", 8, 2, 64, 32)
FACTS = ModelFacts(
    source="made up",
    model_type="llama",
    architecture="LlamaForCausalLM",
    dtype="bfloat16",
    vocab_size=1000,
    hidden_size=512,
    max_position_embeddings=4096,
    layers=(FULL, replace(FULL, window=100), LayerFacts("recurrent", 0, 0, 0, 0)),
    matrices=(
        MatrixFacts("embedding", 512, 1000, 1),
        MatrixFacts("attention", 512, 512, 4),
        MatrixFacts("mlp", 512, 2048, 6),
    ),
    other_parameters=700,
    tied_embeddings=True,
)


@pytest.mark.parametrize("window", [None, 1, 3, 7, 50])
@pytest.mark.parametrize(("new", "context"), [(1, 1), (1, 9), (9, 9), (4, 9), (2, 4)])
def test_attended_pairs_by_counting(new: int, context: int, window: int | None) -> None:
    pairs = sum(
        1
        for query in range(context - new, context)
        for key in range(query + 1)
        if window is None or key > query - window
    )
    assert attended_pairs(new, context, window) == pairs


def test_attention_flops_count_both_widths() -> None:
    assert attention_flops(FULL, 1, 10) == 2 * 8 * (64 + 32) * 10
    assert attention_flops(FACTS.layers[1], 1, 300) == 2 * 8 * (64 + 32) * 100
    assert attention_flops(FACTS.layers[2], 1, 10) == 0


def test_distinct_experts() -> None:
    assert distinct_experts(0, 0, 5) == 0
    assert distinct_experts(8, 2, 1) == pytest.approx(2)
    assert distinct_experts(8, 2, 2) == pytest.approx(3.5)
    assert distinct_experts(8, 2, 10_000) == pytest.approx(8)


def test_tied_embedding_is_read_as_output_layer() -> None:
    head = output_matrix(FACTS)
    assert head is not None
    assert head.kind == "embedding"
    kinds = {kind.kind: kind for kind in decode_cost(FACTS, 10).kinds}
    assert kinds["lm_head"].weight_bytes == 2 * 512 * 1000
    assert kinds["lm_head"].flops == 2 * 512 * 1000
    assert kinds["embedding"].weight_bytes == 2 * 512


def test_windows_bound_what_is_read() -> None:
    groups = kv_groups(FACTS)
    each = 2 * (64 + 32) * 2
    assert kv_bytes_read(groups, 300, 2) == each * (300 + 100)
    scores = next(kind for kind in decode_cost(FACTS, 300, 4).kinds if kind.kind == SCORES)
    assert scores.kv_bytes == 4 * each * (300 + 100 + 2)


def test_quantized_weights_shrink_only_the_linears_of_layers() -> None:
    linears = 4 * 512 * 512 + 6 * 512 * 2048
    assert weight_bytes_stored(FACTS, 4.25) == linears * 4.25 / 8 + 2 * (512 * 1000 + 700)
    full, small = decode_cost(FACTS, 10), decode_cost(FACTS, 10, weight_bits=4.25)
    assert full.weight_bytes - small.weight_bytes == linears * (2 - 4.25 / 8)
    assert full.flops == small.flops


def test_quantized_kv() -> None:
    full, small = decode_cost(FACTS, 300), decode_cost(FACTS, 300, kv_element_bytes=1)
    assert full.kv_bytes == 2 * small.kv_bytes


def test_mixed_forward_equals_its_definition() -> None:
    chunk = phase_cost(FACTS, "chunk", batch=3, new_tokens=16, context=64)
    assert chunk.num_tokens == 48
    assert chunk.num_bytes == chunk.weight_bytes + chunk.kv_bytes
    assert chunk.intensity == chunk.flops / chunk.num_bytes
    assert phase_cost(FACTS, "all rows", batch=3, new_tokens=16, context=64, logits_rows=48).flops - chunk.flops == (
        2 * 512 * 1000 * 45
    )


def test_ideal_step_is_the_longer_of_both() -> None:
    cost = prefill_cost(FACTS, 256)
    slow_memory, slow_compute = ideal_step(cost, 1e6, 1e15), ideal_step(cost, 1e15, 1e6)
    assert (slow_memory.binds, slow_memory.seconds) == ("bandwidth", cost.num_bytes / 1e6)
    assert (slow_compute.binds, slow_compute.seconds) == ("compute", cost.flops / 1e6)


def test_limit_fractions() -> None:
    ceilings = Ceilings(100.0, {"bfloat16": 1000.0})
    found = limit_fractions(200.0, 500.0, 4.0, ceilings, "bfloat16")
    assert (found["mbu"], found["mfu"], found["binds"]) == (0.5, 0.125, "bandwidth")
    assert (found["ideal_s"], found["fraction"], found["ridge"], found["intensity"]) == (2.0, 0.5, 10.0, 2.5)
    assert limit_fractions(1.0, 500.0, 4.0, ceilings, "bfloat16")["binds"] == "compute"


def test_limit_fractions_claim_nothing_without_ceilings() -> None:
    assert set(limit_fractions(200.0, 500.0, 4.0, Ceilings(), "bfloat16")) == {"bytes_per_s", "flops_per_s"}
    partly = limit_fractions(200.0, 500.0, 4.0, Ceilings(100.0, {"float32": 1.0}), "bfloat16")
    assert "mbu" in partly
    assert not {"mfu", "binds", "fraction"} & set(partly)


def test_memory_prediction_takes_the_layouts_bytes() -> None:
    shape = KVShape(kv_groups(FACTS), 10, 16, 4, 64, bytes=123_456, bytes_per_token=384.0)
    memory = predict_memory(FACTS, shape, device="cuda:1", max_num_batched_tokens=256, max_num_seqs=4)
    assert memory.weights_bytes == FACTS.weight_bytes
    assert memory.kv_bytes == 123_456
    assert memory.overhead_bytes > 0
    parts = (memory.weights_bytes, memory.kv_bytes, memory.activation_bytes, memory.overhead_bytes)
    assert memory.total_bytes == sum(parts)
    machine = MachineFacts("cuda", "made up", memory.total_bytes, 1)
    assert not fits(memory, machine)
    assert fits(memory, replace(machine, memory_bytes=2 * memory.total_bytes))


def test_activations_are_the_larger_of_stream_and_logits() -> None:
    assert activation_bytes(FACTS, 4096, 1) == 4096 * (4 * 512 + 4096) * 2
    assert activation_bytes(FACTS, 1, 10_000) == 10_000 * 1000 * 6 + 512 * 2


def test_sequences_that_fit() -> None:
    each = kv_bytes_read(kv_groups(FACTS), 300, 2)
    room = FACTS.weight_bytes + 5 * int(each) + 10
    assert sequences_that_fit(FACTS, room, 300) == 5
    assert sequences_that_fit(FACTS, room, 300, other_bytes=11) == 4
    assert sequences_that_fit(FACTS, 10, 300) == 0
