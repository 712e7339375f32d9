"""Draft heads from folders: published layouts are read, everything else is told apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import generate, requests
from draft_heads import write_eagle, write_medusa
from infermix.errors import Unsupported, UserError
from infermix_decoders.build_eagle import load_eagle
from infermix_decoders.build_medusa import load_medusa
from infermix_decoders.medusa_tree import assumed_accuracy, best_tree
from safetensors.torch import load_file, save_file

Build = Callable[..., Any]
OUTPUT = torch.zeros(96, 64)


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_medusa_published_alone_and_beside_a_model(tmp_path: Path) -> None:
    write_medusa(tmp_path, width=64, vocab_size=96)
    heads, accuracy = load_medusa(tmp_path, OUTPUT)
    assert len(heads) == len(accuracy) == 3
    tensors = load_file(tmp_path / "medusa_lm_head.safetensors")
    assert sorted(tensors)[:3] == ["0.0.linear.bias", "0.0.linear.weight", "0.1.weight"]
    (tmp_path / "medusa_lm_head.safetensors").unlink()
    whole = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    save_file({**whole, "model.embed_tokens.weight": OUTPUT}, tmp_path / "model.safetensors")
    again, _ = load_medusa(tmp_path, OUTPUT)
    assert all(
        torch.equal(a, b) for a, b in zip(heads.state_dict().values(), again.state_dict().values(), strict=True)
    )


def test_eagle_with_an_embedding_of_its_own_and_without_bias(build_engine: Build, tmp_path: Path) -> None:
    write_eagle(tmp_path / "eagle", width=64, bias=False)
    path = tmp_path / "eagle" / "model.safetensors"
    embedding = torch.randn(96, 64, generator=torch.Generator().manual_seed(0))
    save_file({**load_file(path), "embed_tokens.weight": embedding}, path)
    draft, found = load_eagle(tmp_path / "eagle", OUTPUT)
    assert not draft.shape.bias
    assert torch.equal(found, embedding)  # type: ignore[arg-type]
    plain = generate(build_engine(), requests({}))
    engine = build_engine(parts={"decoder": ("eagle", {"heads": str(tmp_path / "eagle")})})
    assert generate(engine, requests({})) == plain


def test_a_pickle_is_refused_by_name(tmp_path: Path) -> None:
    write_medusa(tmp_path, width=64, vocab_size=96)
    (tmp_path / "medusa_lm_head.safetensors").rename(tmp_path / "medusa_lm_head.pt")
    with pytest.raises(UserError, match=r"medusa_lm_head\.pt, a pickle"):
        load_medusa(tmp_path, OUTPUT)


def test_heads_of_another_model_are_refused(tmp_path: Path) -> None:
    write_medusa(tmp_path / "medusa", width=32, vocab_size=96)
    with pytest.raises(UserError, match=r"\[32, 32\], the model needs \[64, 64\]"):
        load_medusa(tmp_path / "medusa", OUTPUT)
    write_eagle(tmp_path / "eagle", width=32)
    with pytest.raises(UserError, match="32 wide, the model 64"):
        load_eagle(tmp_path / "eagle", OUTPUT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"medusa_num_heads": 0}, "medusa_num_heads is 0"),
        ({"medusa_num_heads": 2}, "belongs to no part"),
        ({"medusa_num_heads": 4}, "is missing"),
        ({"medusa_accuracy": [[0.5], [2.0], [0.1]]}, "shares between 0 and 1"),
        ({"medusa_accuracy": [[0.01] * 97] * 3}, "3 lists of 1 to 96 shares"),
    ],
)
def test_a_config_that_does_not_fit_is_told(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_medusa(tmp_path, width=64, vocab_size=96)
    change_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        load_medusa(tmp_path, OUTPUT)


def test_an_eagle_layer_that_is_computed_otherwise_is_refused(tmp_path: Path) -> None:
    write_eagle(tmp_path, width=64)
    change_config(tmp_path, rope_scaling={"rope_type": "llama3", "factor": 8.0})
    with pytest.raises(Unsupported, match="llama3"):
        load_eagle(tmp_path, OUTPUT)
    change_config(tmp_path, rope_scaling=None, num_hidden_layers=2)
    with pytest.raises(Unsupported, match="several layers"):
        load_eagle(tmp_path, OUTPUT)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear', expected an object"),
        ({"rope_theta": float("nan")}, "rope_theta is nan, expected a number above 0"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4, which 3 does not divide"),
        ({"num_attention_heads": 64, "num_key_value_heads": 32, "head_dim": 1}, "head_dim is 1, which 2 does not"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ],
)
def test_a_config_of_no_eagle_layer_is_told(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    write_eagle(tmp_path, width=64)
    change_config(tmp_path, **changes)
    with pytest.raises((UserError, Unsupported), match=message):
        load_eagle(tmp_path, OUTPUT)


@pytest.mark.parametrize("write", [write_medusa, write_eagle])
def test_whole_numbers_are_no_heads(tmp_path: Path, write: Callable[..., None]) -> None:
    medusa = write is write_medusa
    write(tmp_path, width=64, **({"vocab_size": 96} if medusa else {}))
    (path,) = tmp_path.glob("*.safetensors")
    save_file({name: tensor.to(torch.int32) for name, tensor in load_file(path).items()}, path)
    with pytest.raises(UserError, match="holds int32, heads need floating-point numbers"):
        (load_medusa if medusa else load_eagle)(tmp_path, OUTPUT)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train-heads"):
        load_medusa(tmp_path / "nothing", OUTPUT)


def test_the_medusa_tree_holds_what_is_most_often_right() -> None:
    accuracy = [[0.6, 0.2], [0.5, 0.3]]
    shape = best_tree(accuracy, 4)
    assert shape.ranks == (0, 0, 1, 1)
    assert shape.parents == (-1, 0, -1, 0)
    assert len(best_tree(accuracy, 50).parents) == 6
    within = best_tree(assumed_accuracy(4, 10), 31).within(2)
    assert max(within.depths) == 2
    assert all(parent < node for node, parent in enumerate(within.parents))
