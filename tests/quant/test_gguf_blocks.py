"""GGUF blocks kept packed: every kind bit for bit, whole models without a changed logit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_writing import random_blocks, write_llama
from infermix.cost.model_facts import read_model_facts
from infermix.cost.source import resolve_source
from infermix.engine.loader import LoadedModel, load_model
from infermix.errors import UserError
from infermix.features import match
from infermix.plugins import load_catalogue
from infermix.roles.component import Choice, Role
from infermix.roles.facts import MachineFacts, ModelFacts, ResolvedSource
from infermix.roles.quantizer import QuantizationReport, QuantizerContext
from infermix.spec.experiment import ModelSource
from infermix.toolkit.conformance.component import example_model
from infermix_gguf.blocks import BLOCKS, expand
from infermix_gguf.linear import GgufLinear
from infermix_gguf.quantizer import GgufQuantizer
from infermix_gguf.tensors import row_order

IDS = torch.arange(3, 35)[None]


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_blocks_are_worth_what_the_package_says(kind: str) -> None:
    """Random bytes: also scales that are subnormal, infinite or no numbers."""
    raw = np.random.default_rng(0).integers(0, 256, (5, 3 * BLOCKS[kind][1]), dtype=np.uint8)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[kind])
    np.testing.assert_array_equal(expand(torch.from_numpy(raw), kind).numpy(), expected)


@pytest.mark.parametrize("kind", list(BLOCKS))
def test_sizes_of_blocks(kind: str) -> None:
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]] == BLOCKS[kind]


def test_rows_in_another_order_are_found_and_other_rows_are_not() -> None:
    rows = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    rows[3] = rows[5]
    rows[2, 2], order = 0.0, torch.tensor([7, 1, 3, 0, 5, 2, 6, 4])
    wanted = rows[order].clone()
    wanted[wanted == 0] = -0.0
    found = row_order(rows, wanted)
    assert found is not None
    assert torch.equal(rows[found], wanted)
    wanted[4, 0] += 1e-6
    assert row_order(rows, wanted) is None
    assert row_order(rows, rows[:4]) is None


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def _load(file: Path, dtype: str) -> LoadedModel:
    return load_model(ResolvedSource("tiny", "gguf", file.parent, file), None, dtype=dtype, device="cpu")  # type: ignore[arg-type]


def _quantized(loaded: LoadedModel, dtype: str = "float32") -> QuantizationReport:
    return GgufQuantizer(()).apply(loaded.model, QuantizerContext("cpu", dtype, file=loaded.file))


#: As llama.cpp mixes kinds in Q4_K_M and Q5_K_M files, and files of one kind.
FILES = {
    "q4_k_m": ({"attn_v": "Q6_K", "ffn_down": "Q6_K"}, "Q4_K"),
    "q8_0": ({"attn_k": "Q5_0", "attn_v": "Q5_1"}, "Q8_0"),
}
#: Weights of each matrix, in units of the smallest.
SIZES = {"attn_q": 2, "attn_k": 1, "attn_v": 1, "attn_output": 2, "ffn_gate": 4, "ffn_up": 4, "ffn_down": 4}


@pytest.mark.parametrize("name", list(FILES))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_logit_changes(name: str, dtype: str, tmp_path: Path) -> None:
    kinds, default = FILES[name]
    loaded = _load(write_llama(tmp_path / "tiny.gguf", kinds, default), dtype)
    with torch.inference_mode():
        before = loaded.model(input_ids=IDS).logits
        report = _quantized(loaded, dtype)
        after = loaded.model(input_ids=IDS).logits
    assert torch.equal(before, after)
    assert len(report.kernels) == 14
    assert report.skipped == ("model.embed_tokens", "lm_head")
    held = [module for module in loaded.model.modules() if isinstance(module, GgufLinear)]
    assert report.quantized_bytes == sum(module.blocks.numel() for module in held)
    assert {f"{module.kind} blocks, dequantize+matmul" for module in held} == set(report.kernels.values())
    blocks = {each: BLOCKS[kinds.get(each, default)] for each in SIZES}
    expected = sum(8 * size / weights * SIZES[each] for each, (weights, size) in blocks.items())
    assert report.bits_per_weight == pytest.approx(expected / sum(SIZES.values()))


def test_tensors_in_other_forms_stay_expanded_and_are_named(tmp_path: Path) -> None:
    loaded = _load(write_llama(tmp_path / "tiny.gguf", {"ffn_up": "BF16", "attn_q": "TQ2_0"}, "Q4_0"), "float32")
    report = _quantized(loaded)
    assert report.method == "gguf 10 x Q4_0"
    assert report.details["expanded"] == {"BF16 is not read in blocks": 2, "TQ2_0 is not read in blocks": 2}
    assert "model.layers.1.mlp.up_proj" in report.skipped


def test_blocks_of_another_model_are_not_taken(tmp_path: Path) -> None:
    loaded = _load(write_llama(tmp_path / "tiny.gguf", {}, "Q8_0"), "float32")
    other = write_llama(tmp_path / "other.gguf", {}, "Q8_0", seed=1)
    with pytest.raises(UserError, match="no linear can stay packed: its Q8_0 tensor holds other rows than the model"):
        GgufQuantizer(()).apply(loaded.model, QuantizerContext("cpu", "float32", file=other))


def test_a_model_without_a_file_is_refused() -> None:
    with pytest.raises(UserError, match="the model comes from no GGUF file"):
        GgufQuantizer(()).apply(torch.nn.Linear(2, 2), QuantizerContext("cpu", "float32"))


def _problems(model: ModelFacts) -> tuple[str, ...]:
    found = load_catalogue().find(Role.QUANTIZER, "gguf")
    choice = Choice(found, found.component.options())
    return match({Role.QUANTIZER: choice}, (), model, MachineFacts("cpu", "cpu", 2**33, 2)).problems


def test_plan_wants_a_gguf_file(tmp_path: Path) -> None:
    assert "needs weights:gguf_blocks" in _problems(example_model())[0]
    write_llama(tmp_path / "tiny.gguf", {}, "Q8_0")
    assert _problems(read_model_facts(resolve_source(ModelSource(source="tiny.gguf"), tmp_path))) == ()


def test_random_blocks_are_small_numbers() -> None:
    """What the models of these tests are made of."""
    for kind in BLOCKS:
        rows = random_blocks(kind, (4, 512), np.random.default_rng(0))
        weights = expand(torch.from_numpy(rows), kind)
        assert bool(weights.isfinite().all())
        assert 0.001 < float(weights.std()) < 1
