"""A model without some of its layers: the same tensors, the logits of a model that never had them."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.errors import Unsupported, UserError
from infermix.roles.facts import LayerFacts
from infermix.toolkit.conformance import example_model
from infermix_decoders import layer_search
from infermix_decoders.layer_search import fingerprint, search_layers
from infermix_decoders.skipped_layers import facts_of_kept, keep_layers

Build = Any
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SIZES,
    "gemma3_text": {**SIZES, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt2": {"n_embd": 32, "n_layer": 4, "n_head": 2, "n_positions": 64},
}
#: Path to the list of layers, per family.
LAYERS = {"llama": "model", "gemma3_text": "model", "gpt2": "transformer"}
IDS = torch.arange(3, 40)[None] % 61


def tiny(family: str) -> Any:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](vocab_size=61, initializer_range=0.3, **FAMILIES[family])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=IDS, use_cache=False).logits


def without(model: Any, family: str, kept: list[int]) -> Any:
    """The plain way: a deep copy whose layers are deleted."""
    cut = copy.deepcopy(model)
    body = getattr(cut, LAYERS[family])
    name = "h" if family == "gpt2" else "layers"
    setattr(body, name, torch.nn.ModuleList([getattr(body, name)[index] for index in kept]))
    kinds = getattr(cut.config, "layer_types", None)
    if kinds:
        cut.config.layer_types = [kinds[index] for index in kept]
    cut.config.num_hidden_layers = len(kept)
    return cut


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kept", [[0, 3], [1, 2, 3], [2]], ids=str)
def test_logits_of_a_model_without_them(family: str, kept: list[int]) -> None:
    model = tiny(family)
    before = logits(model)
    twin = keep_layers(model, kept)
    assert torch.equal(logits(twin), logits(without(model, family, kept)))
    assert torch.equal(logits(model), before)
    assert not torch.equal(logits(twin), before)
    assert model.config.num_hidden_layers == 4


def test_tensors_are_shared() -> None:
    model = tiny("llama")
    twin = keep_layers(model, [0, 2])
    own = {tensor.data_ptr() for tensor in model.parameters()}
    assert {tensor.data_ptr() for tensor in twin.parameters()} < own
    assert [layer.self_attn.layer_idx for layer in twin.model.layers] == [0, 1]
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2, 3]


def test_a_method_put_on_a_module_works_on_the_copy() -> None:
    """As optimised forwards do: bound to the original it would compute with the original's layer."""
    model = tiny("llama")
    attention = model.model.layers[2].self_attn
    attention.forward = attention.forward
    twin = keep_layers(model, [0, 2])
    assert twin.model.layers[1].self_attn.forward.__self__ is twin.model.layers[1].self_attn


def test_the_search_skips_layers_that_do_nothing() -> None:
    model = tiny("llama")
    with torch.no_grad():
        for index in (1, 2):
            layer = model.model.layers[index]
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    found = search_layers(model, IDS.tolist(), lambda count: count / 4, 4)
    assert {1, 2} <= set(found.layers)
    assert found.speedup > 1
    exact = search_layers(model, IDS.tolist(), lambda count: 0.5 + count / 8 if count < 4 else 1.0, 4)
    assert exact.agreement == 1.0
    assert exact.layers == (1, 2)


def test_nothing_is_skipped_where_it_does_not_pay() -> None:
    found = search_layers(tiny("llama"), IDS.tolist(), lambda count: 1.0, 4)
    assert (found.layers, found.speedup) == ((), 1.0)


def test_facts() -> None:
    facts = facts_of_kept(example_model(), [1])
    assert (facts.num_layers, facts.matrices[0].count) == (1, 1)
    shared = LayerFacts("attention", 4, 2, 64, 64, kv_from=0)
    model = replace(example_model(), layers=(example_model().layers[0], shared))
    with pytest.raises(Unsupported, match="reads the keys of layer 0"):
        facts_of_kept(model, [1])


@pytest.mark.parametrize("layers", [(2,), (0, 0), (0, 1)], ids=str)
def test_layers_that_do_not_fit(build_engine: Build, layers: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="layers 0 to 1") as caught:
        build_engine(parts={"decoder": ("self_speculative", {"skip_layers": layers})})
    assert caught.value.key == "parts.decoder.skip_layers"


def test_the_record_says_what_was_skipped(build_engine: Build) -> None:
    engine = build_engine(parts={"decoder": ("self_speculative", {})})
    executed = engine.report().executed["decoder"]
    assert executed["draft_layers"] == 2 - len(executed["skipped_layers"])
    assert 0 <= executed["agreement"] <= 1
    assert "random token ids" in executed["calibration"]["corpus"]


def test_the_search_is_asked_once(build_engine: Build, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from infermix_decoders import build_self_speculative

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    parts = {"decoder": ("self_speculative", {})}
    first = build_engine(parts=parts).report().executed["decoder"]
    monkeypatch.setattr(build_self_speculative, "search_layers", lambda *given: pytest.fail("searched again"))
    assert build_engine(parts=parts).report().executed["decoder"] == first
    (path,) = (tmp_path / "infermix" / "draft_layers").iterdir()
    path.write_text("{}")
    with pytest.raises(pytest.fail.Exception, match="searched again"):
        build_engine(parts=parts)


def test_weights_are_told_apart() -> None:
    model = tiny("llama")
    before = fingerprint(model)
    assert fingerprint(tiny("llama")) == before
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight.zero_()
    assert fingerprint(model) != before


def test_samples_of_different_lengths() -> None:
    samples = [IDS[0].tolist(), IDS[0, :9].tolist(), IDS[0, 5:14].tolist()]
    found = search_layers(tiny("llama"), samples, lambda count: count / 4, 4)
    assert found.speedup >= 1


def test_the_search_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(
        layer_search, "keep_layers", lambda model, kept: tried.append(list(kept)) or keep_layers(model, kept)
    )
    monkeypatch.setattr(layer_search, "PATIENCE", 1)
    search_layers(tiny("llama"), IDS.tolist(), lambda count: 1.0, 4)
    assert len(tried) == 1 + 4 + 1
