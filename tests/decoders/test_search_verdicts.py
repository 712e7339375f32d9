"""What `plan` says of several outputs and of searches."""

from __future__ import annotations

from pathlib import Path

import pytest
from infermix.compose import compose
from infermix.errors import UserError
from infermix.plugins import load_catalogue
from infermix.roles.component import Role
from infermix.spec.load import load_experiment

CATALOGUE = load_catalogue()


def verdict(tmp_path: Path, model: Path, workload: str, parts: str, engine: str = "native", limits: str = "") -> str:
    """Empty when the cell runs, otherwise its reasons."""
    path = tmp_path / "x.yaml"
    path.write_text(
        f"model: {model}\ndevice: cpu\ndtype: float32\nengine: {engine}\nparts: {{{parts}}}\n"
        f"workload: {{use: corpus, input_tokens: 8, max_new_tokens: 8, {workload}}}\n"
        f"limits: {{max_model_len: 64{limits}}}\n"
    )
    (plan,) = compose(load_experiment(path), CATALOGUE)
    assert plan.runs == (not plan.reasons)
    return "; ".join(plan.reasons)


@pytest.mark.parametrize(
    ("workload", "parts", "engine", "reason"),
    [
        ("num_outputs: 3, temperature: 1", "kv: paged", "native", ""),
        ("num_outputs: 3, temperature: 1", "kv: dense, decoder: jacobi", "native", ""),
        ("num_outputs: 3", "kv: paged", "native", "set temperature above 0, or take a decoder that searches"),
        ("num_outputs: 3, temperature: 1", "kv: {use: h2o, budget: 9}", "native", ""),
        ("num_outputs: 3, temperature: 1", "", "transformers", "needs engine:outputs"),
        ("num_outputs: 1", "decoder: autoregressive", "simulated", ""),
        ("num_outputs: 1", "decoder: beam", "simulated", "needs decoder:plain"),
        ("num_outputs: 1", "decoder: synthetic_acceptance", "simulated", "needs decoder:plain"),
        ("num_outputs: 1", "kv: dense", "disaggregated", ""),
        ("num_outputs: 1", "kv: concat", "disaggregated", "needs kv:swap, which kv 'concat' does not provide"),
        ("num_outputs: 1", "decoder: beam", "disaggregated", "rows of a search are not handed over"),
        ("num_outputs: 1", "decoder: jacobi", "disaggregated", "knows of a prompt is not handed over"),
    ],
)
def test_outputs(tiny_llama: Path, tmp_path: Path, workload: str, parts: str, engine: str, reason: str) -> None:
    found = verdict(tmp_path, tiny_llama, workload, parts, engine)
    assert reason in found
    assert bool(reason) == bool(found)


def test_outputs_and_searches_need_forks(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        f"model: {tiny_llama}\ndevice: cpu\ndtype: float32\nparts: {{decoder: {{use: beam, num_beams: 4}}}}\n"
        "workload: {use: corpus, num_outputs: 2, input_tokens: 8, max_new_tokens: 8}\n"
    )
    (plan,) = compose(load_experiment(path), CATALOGUE)
    for choice in (plan.workload, plan.parts[Role.DECODER]):
        assert "kv:fork" in choice.component.needs(choice.options, plan.facts, plan.machine)


BEAM = "decoder: {use: beam, num_beams: 4}"


@pytest.mark.parametrize(
    ("workload", "parts", "reason"),
    [
        ("num_outputs: 3", BEAM, ""),
        ("temperature: 0.7", BEAM, "a search is deterministic"),
        ("stop: [x]", BEAM, "knows stop tokens only"),
        ("num_outputs: 5", BEAM, "wants 5 outputs of each prompt, but decoder 'beam' finds 4 at most"),
        ("repetition_penalty: 1.1", BEAM, "applies no repetition penalty"),
        ("num_outputs: 2", f"kv: {{use: h2o, budget: 9}}, {BEAM}", ""),
        ("num_outputs: 1", f"scheduler: {{use: continuous, preemption: swap}}, {BEAM}", "not swapped to the host"),
    ],
)
def test_searches(tiny_llama: Path, tmp_path: Path, workload: str, parts: str, reason: str) -> None:
    swap = ", kv_swap_bytes: 1000000" if "swap" in parts else ""
    found = verdict(tmp_path, tiny_llama, workload, parts, limits=swap)
    assert reason in found
    assert bool(reason) == bool(found)


def test_rows_of_a_search_count_in_the_memory_prediction(tiny_llama: Path, tmp_path: Path) -> None:
    sizes = []
    for parts in ("kv: dense", f"kv: dense, {BEAM}"):
        path = tmp_path / "x.yaml"
        path.write_text(
            f"model: {tiny_llama}\ndevice: cpu\ndtype: float32\nparts: {{{parts}}}\nlimits: {{max_model_len: 64}}\n"
            "workload: {use: corpus, input_tokens: 8, max_new_tokens: 8, num_requests: 6}\n"
        )
        (plan,) = compose(load_experiment(path), CATALOGUE)
        assert plan.memory is not None
        sizes.append((plan.max_num_seqs, plan.memory.kv_bytes))
    (plain, plain_bytes), (beams, beam_bytes) = sizes
    assert beams == 4 * plain
    assert beam_bytes > 3 * plain_bytes


@pytest.mark.parametrize(
    ("decoder", "least", "most"),
    [
        ("autoregressive", 0, 0),
        ("{use: speculative, draft: target}", 1.0, 1.0),
        ("{use: speculative, draft: target, draft_quantizer: rtn}", 0.2, 0.9),
        ("{use: self_speculative, skip_layers: [1]}", 0, 0),
    ],
)
def test_a_draft_model_counts_in_the_memory_prediction(
    tiny_llama: Path, tmp_path: Path, decoder: str, least: float, most: float
) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        f"model: {tiny_llama}\ndevice: cpu\ndtype: float32\nparts: {{decoder: {decoder}}}\n"
        "limits: {max_model_len: 64}\n"
        "workload: {use: corpus, input_tokens: 8, max_new_tokens: 8, num_requests: 6}\n"
    )
    (plan,) = compose(load_experiment(path), CATALOGUE)
    memory = plan.memory
    assert memory is not None
    weights = memory.second_bytes - (memory.kv_bytes if memory.second_bytes else 0)
    assert least * memory.weights_bytes - 1e5 <= weights <= most * memory.weights_bytes + 1e5
    assert (memory.second_bytes > 0) == (decoder != "autoregressive")
    assert memory.total_bytes >= memory.second_bytes + memory.weights_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("draft: ./none", r"x.yaml:5:\d+: parts.decoder.draft: "),
        (
            "draft: target, draft_quantizer: nope",
            r"x.yaml:5:\d+: parts.decoder.draft_quantizer: no .*'nope'",
        ),
    ],
)
def test_a_draft_that_is_not_there(tiny_llama: Path, tmp_path: Path, options: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        verdict(tmp_path, tiny_llama, "num_requests: 2", f"decoder: {{use: speculative, {options}}}")


@pytest.mark.parametrize("decoder", ["medusa", "eagle"])
def test_heads_that_are_not_there(tiny_llama: Path, tmp_path: Path, decoder: str) -> None:
    message = r"x.yaml:5:\d+: parts.decoder.heads: .*/none/config.json: there is no such file \(infermix train-heads"
    parts = f"kv: dense, decoder: {{use: {decoder}, heads: none}}"
    with pytest.raises(UserError, match=message):
        verdict(tmp_path, tiny_llama, "num_requests: 2", parts)
    (tmp_path / "none").mkdir()
    (tmp_path / "none/config.json").write_text("{}")
    assert verdict(tmp_path, tiny_llama, "num_requests: 2", parts) == ""
