"""The joint computes what each family's own eager forward computes, and notices when it would not."""

from __future__ import annotations

from typing import Any

import packed_walk as walk
import pytest
from infermix.engine.bridge import Joint
from infermix.errors import Unsupported
from infermix_reference.attention_eager import EagerAttention
from infermix_reference.attention_sdpa import SdpaAttention
from tiny_models import WINDOW, tiny_model

#: Between them: window, softcap, sinks, absolute positions, experts, latent attention, mixed window groups.
MUTATED = ("llama", "mistral", "gemma2", "gpt2", "gpt_oss", "deepseek_v3")
NAMED = (
    *MUTATED,
    *("qwen2", "qwen3", "gemma3_text", "phi3", "olmo2", "smollm3", "starcoder2", "mixtral", "qwen3_moe"),
)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {}


def joint_of(models: dict[str, Any], family: str, kind: type[Joint] = Joint) -> Joint:
    if family not in models:
        models[family] = tiny_model(family)
    return kind(models[family])


@pytest.mark.parametrize("layout", ["paged", "dense", "none"])
@pytest.mark.parametrize("family", NAMED)
def test_packed_logits_equal_the_eager_full_forward(models: dict[str, Any], family: str, layout: str) -> None:
    joint = joint_of(models, family)
    assert walk.packed_error(joint, EagerAttention(), layout) < walk.TOLERANCE


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "deepseek_v3", "gpt_oss"])
def test_sdpa_agrees_as_well(models: dict[str, Any], family: str) -> None:
    assert walk.packed_error(joint_of(models, family), SdpaAttention(), "paged") < walk.TOLERANCE


def test_sdpa_refuses_softcap(models: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        walk.packed_error(joint_of(models, "gemma2"), SdpaAttention(), "paged")


MUTANTS = [
    ("mistral", walk.WithoutWindow),
    ("mistral", walk.WrongWindow),
    ("gemma2", walk.WithoutWindow),
    ("gemma2", walk.WithoutSoftcap),
    ("gpt_oss", walk.WithoutSinks),
    *((family, mutant) for family in MUTATED for mutant in (walk.WrongScale, walk.Leaking)),
]


@pytest.mark.parametrize(("family", "mutant"), MUTANTS, ids=lambda value: getattr(value, "__name__", value))
def test_a_wrong_attention_is_caught(models: dict[str, Any], family: str, mutant: type[EagerAttention]) -> None:
    assert walk.packed_error(joint_of(models, family), mutant(), "paged") > 10 * walk.TOLERANCE


@pytest.mark.parametrize("family", MUTATED)
def test_shifted_positions_are_caught(models: dict[str, Any], family: str) -> None:
    joint = joint_of(models, family, walk.ShiftedJoint)
    assert walk.packed_error(joint, EagerAttention(), "paged") > 10 * walk.TOLERANCE


def test_groups_split_by_window(models: dict[str, Any]) -> None:
    groups = joint_of(models, "gemma2").groups
    assert [(group.layers, group.window) for group in groups] == [((0, 2), WINDOW), ((1, 3), None)]


def test_latent_attention_has_keys_wider_than_values(models: dict[str, Any]) -> None:
    (group,) = joint_of(models, "deepseek_v3").groups
    assert (group.num_kv_heads, group.key_dim, group.value_dim) == (4, 24, 12)


def test_detach_gives_the_model_its_attention_back(models: dict[str, Any]) -> None:
    joint = joint_of(models, "llama")
    walk.packed_error(joint, EagerAttention(), "paged")
    assert joint.model.config._attn_implementation == "eager"
