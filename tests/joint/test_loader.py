"""Loading: safetensors, dummy weights, eos ids; bad files give one clear error that names them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from infermix.engine.loader import load_model, load_tokenizer
from infermix.errors import UserError
from infermix.roles.facts import ResolvedSource
from tiny_models import tiny_config, tiny_model

FACTS: Any = None


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny-llama")
    model = tiny_model("llama")
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(directory)
    return directory


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def source(directory: Path, kind: Any = "safetensors", **config: Any) -> ResolvedSource:
    return ResolvedSource("tiny", kind, directory, None, config)


def load(directory: Path, dtype: str = "float32", **config: Any) -> Any:
    return load_model(source(directory, **config), FACTS, dtype=dtype, device="cpu")


def test_weights_come_back(saved: Path) -> None:
    loaded = load(saved)
    ids = torch.arange(7)[None]
    assert torch.equal(loaded.model(ids).logits, tiny_model("llama")(ids).logits)
    assert loaded.eos_token_ids == (2, 5)
    assert not loaded.model.training
    assert loaded.notes == ()


def test_dtype_is_the_one_asked_for(saved: Path) -> None:
    model = load(saved, "bfloat16").model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_config_overrides_reach_the_model(saved: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    model = load(saved, **{**config, "rms_norm_eps": 0.5}).model
    assert model.model.norm.variance_epsilon == 0.5


def test_a_model_without_tokenizer(saved: Path) -> None:
    assert load_tokenizer(source(saved)) is None


def test_truncated_file(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"model\.safetensors.*truncated"):
        load(copy)


def test_missing_file(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    (copy / "pytorch_model.bin").touch()
    with pytest.raises(UserError, match="is a pickle"):
        load(copy)


def test_missing_shard(copy: Path) -> None:
    index = {"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="model-00002-of-00002"):
        load(copy)


def test_missing_config(copy: Path) -> None:
    (copy / "config.json").unlink()
    with pytest.raises(UserError, match="config"):
        load(copy)


def test_missing_weights_are_not_drawn_at_random(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 5}))
    with pytest.raises(UserError, match=r"weights of the architecture are not in the files.*layers\.4"):
        load(copy)


def test_other_shapes_than_the_config_says(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": 80}))
    with pytest.raises(UserError, match=r"other shapes than config\.json says: model\.layers"):
        load(copy)


def test_unused_tensors_are_noted(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    (note,) = load(copy).notes
    assert "not used" in note
    assert "layers.3" in note


def test_unknown_architecture(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="config"):
        load_model(source(tmp_path, "dummy", model_type="nonesuch"), FACTS, dtype="float32", device="cpu")


def draw(seed: int, dtype: str = "float32", **overrides: Any) -> Any:
    config = tiny_config("llama", **overrides).to_dict()
    return load_model(source(Path("."), "dummy", **config), FACTS, dtype=dtype, device="cpu", seed=seed).model


def test_dummy_weights_follow_the_seed() -> None:
    before = torch.random.get_rng_state()
    first, again, other = draw(1), draw(1), draw(2)
    weights = [model.lm_head.weight for model in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert torch.equal(before, torch.random.get_rng_state())


def test_dummy_weights_are_sane() -> None:
    model = draw(1, "bfloat16", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.model.norm.weight, torch.ones(64, dtype=torch.bfloat16))
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32
    assert torch.equal(model.model.rotary_emb.inv_freq, draw(2).model.rotary_emb.inv_freq)
    assert model(torch.arange(5)[None]).logits.isfinite().all()
