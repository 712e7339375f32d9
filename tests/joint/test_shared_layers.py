"""Models that share keys and values across layers: stored once, read by all, logits of the eager full forward."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import packed_walk as walk
import pytest
import torch
from infermix.cost.kv import kv_bytes_per_token, kv_groups
from infermix.cost.model_facts import read_model_facts
from infermix.cost.roofline import phase_cost
from infermix.cost.source import resolve_source
from infermix.engine.bridge import Joint
from infermix.roles.kv_space import KVBudget, KVGroup
from infermix.spec.experiment import ModelSource
from infermix_kv.hybrid import HybridLayout
from infermix_reference.attention_eager import EagerAttention
from infermix_reference.kv_concat import ConcatLayout
from infermix_reference.kv_paged import PagedLayout
from tiny_models import WINDOW, tiny_config, tiny_model

FAMILIES = ("gemma3n_text", "gemma4_text")
LAYOUTS = {"paged": PagedLayout(4), "hybrid": HybridLayout(4, 6), "concat": ConcatLayout()}


@pytest.fixture(scope="module")
def joints() -> dict[str, Joint]:
    from transformers import CONFIG_MAPPING

    return {family: Joint(tiny_model(family)) for family in FAMILIES if family in CONFIG_MAPPING}


def joint_of(joints: dict[str, Joint], family: str) -> Joint:
    if family not in joints:
        pytest.skip(f"this transformers has no {family}")
    return joints[family]


@pytest.mark.parametrize("layout", ["dense", "none", *LAYOUTS])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_eager_full_forward(
    joints: dict[str, Joint], family: str, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = walk.layout
    monkeypatch.setattr(walk, "layout", lambda name: LAYOUTS.get(name) or plain(name))
    assert walk.packed_error(joint_of(joints, family), EagerAttention(), layout) < walk.TOLERANCE


@pytest.mark.parametrize("family", FAMILIES)
def test_shared_layers_are_stored_once(joints: dict[str, Joint], family: str) -> None:
    joint = joint_of(joints, family)
    assert {index: layer.kv_from for index, layer in joint.layers.items() if layer.kv_from is not None} == {
        4: 2,
        5: 3,
    }
    assert [group.layers for group in joint.groups] == [(0, 2), (1, 3)]
    shape = PagedLayout(4).shape(joint.groups, KVBudget(1, 64, 4))
    widths = sum(2 * group.key_dim for group in joint.groups)
    assert shape.bytes_per_token == 2 * 2 * widths * 4  # two layers of each kind, two heads, K and V in fp32
    assert PagedLayout(4).store(shape, "meta", torch.float32).allocated_bytes() == shape.bytes


def test_reading_another_layer_than_the_owner_is_noticed(
    joints: dict[str, Joint], monkeypatch: pytest.MonkeyPatch
) -> None:
    joint = joint_of(joints, "gemma3n_text")
    wrong = {4: 0, 5: 1}
    mixed = {i: replace(layer, kv_from=wrong.get(i)) for i, layer in joint.layers.items()}
    monkeypatch.setattr(joint._context, "layers", mixed)
    monkeypatch.setattr(walk, "layout", LAYOUTS.get)
    monkeypatch.setattr("infermix.engine.probe.LayerProbe.require_same", lambda self, layers: None)
    assert walk.packed_error(joint, EagerAttention(), "paged") > 100 * walk.TOLERANCE


def test_facts_from_the_config_agree_with_the_modules(joints: dict[str, Joint], tmp_path: Path) -> None:
    joint = joint_of(joints, "gemma3n_text")
    tiny_config("gemma3n_text").save_pretrained(tmp_path)
    source = resolve_source(ModelSource(source=str(tmp_path), weights="dummy"), Path("."))
    facts = read_model_facts(source, dtype="float32", dummy=True)
    assert facts.refusal is None
    assert kv_groups(facts) == joint.groups
    assert [layer.kv_from for layer in facts.layers] == [None] * 4 + [2, 3]
    assert kv_bytes_per_token(facts) == 4 * 2 * 2 * 16 * 4
    read = next(
        kind for kind in phase_cost(facts, "decode", batch=1, new_tokens=1, context=20).kinds if kind.kv_bytes
    )
    token = 2 * 2 * 16 * 4  # of one layer; three layers of each kind read, four write
    assert read.kv_bytes == token * (3 * WINDOW + 3 * 20 + 4)
    assert KVGroup((0, 2), 2, 16, 16, WINDOW) in joint.groups
