"""Models with recurrent layers, over a layout that keeps their states, equal transformers' own full forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import packed_walk as walk
import pytest
import torch
from infermix.engine.adapters.recurrent import RecurrentJoint
from infermix.engine.bridge import Joint
from infermix.engine.packing import PackEntry, pack
from infermix.engine.self_check import relative_error, self_check
from infermix.engine.walk import full_logits, random_sequences
from infermix.errors import Unsupported, WrongResult
from infermix.roles.batch import Batch
from infermix.roles.families import STATEFUL
from infermix.roles.kv_space import KVBudget
from infermix_kv.state import StateLayout
from infermix_reference.attention_eager import EagerAttention
from infermix_reference.attention_sdpa import SdpaAttention
from infermix_reference.kv_paged import PagedLayout
from tiny_models import VOCAB, tiny_model
from transformers import CONFIG_MAPPING

#: Pure Mamba of both generations, Mamba hybrids with and without experts, gated delta nets, convolutions, RWKV.
NAMED = ("mamba", "mamba2", "jamba", "qwen3_next", "lfm2", "granitemoehybrid", "rwkv")


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    return {}


def joint_of(models: dict[str, Any], family: str, kind: type[RecurrentJoint] = RecurrentJoint) -> RecurrentJoint:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    if family not in models:
        models[family] = tiny_model(family)
    return kind(models[family])


@pytest.mark.parametrize("snapshots", [0, 3])
@pytest.mark.parametrize("family", NAMED)
def test_logits_equal_the_full_forward(models: dict[str, Any], family: str, snapshots: int) -> None:
    """Several sequences join, are prefilled in chunks beside decodes of others, and finish."""
    layout = StateLayout(4, snapshots)
    assert walk.packed_error(joint_of(models, family), EagerAttention(), layout) < walk.TOLERANCE


@pytest.mark.full
@pytest.mark.parametrize("family", sorted(STATEFUL - set(NAMED)))
def test_logits_of_the_other_families(models: dict[str, Any], family: str) -> None:
    assert walk.packed_error(joint_of(models, family), EagerAttention(), StateLayout(4)) < walk.TOLERANCE


def test_sdpa_agrees_as_well(models: dict[str, Any]) -> None:
    assert walk.packed_error(joint_of(models, "jamba"), SdpaAttention(), StateLayout(4)) < walk.TOLERANCE


class NeverReset(RecurrentJoint):
    """Mistake: a new sequence starts from what the last owner of its slot left there."""

    def _rectangle(self, batch: Batch, past: Sequence[int], query_len: int, *rest: Any) -> Any:
        index = torch.tensor([slot for (slot,) in batch.state_slots or ()])
        stale = {
            layer: {name: pool[index] for name, pool in kept.items()}
            for layer, kept in self._context.store.states.items()
        }
        if past[0] == 0 and any(part.any() for kept in stale.values() for part in kept.values()):
            carrier = self._carrier
            self._carrier = Stale(carrier, stale)
            try:
                return super()._rectangle(batch, past, query_len, *rest)
            finally:
                self._carrier = carrier
        return super()._rectangle(batch, past, query_len, *rest)


class Stale:
    """A carrier that starts from `stale` where it should start from nothing."""

    batched = True

    def __init__(self, carrier: Any, stale: Any) -> None:
        self._carrier, self._stale = carrier, stale

    def arguments(self, carried: Any) -> Any:
        return self._carrier.arguments(self._stale if carried is None else carried)

    def collect(self, arguments: Any, output: Any) -> Any:
        return self._carrier.collect(arguments, output)


class WrongSlot(RecurrentJoint):
    """Mistake: decodes read the state of their neighbour."""

    def _rectangle(self, batch: Batch, past: Sequence[int], *rest: Any) -> Any:
        if past[0] and len(past) > 1:
            batch.state_slots = (*batch.state_slots[1:], batch.state_slots[0])
        return super()._rectangle(batch, past, *rest)


class Forgetful(RecurrentJoint):
    """Mistake: the states after a step are not stored."""

    def _rectangle(self, batch: Batch, past: Sequence[int], *rest: Any) -> Any:
        before = {
            layer: {name: pool.clone() for name, pool in kept.items()}
            for layer, kept in self._context.store.states.items()
        }
        logits = super()._rectangle(batch, past, *rest)
        if past[0]:
            for layer, kept in self._context.store.states.items():
                for name, pool in kept.items():
                    pool.copy_(before[layer][name])
        return logits


class FromNothing(RecurrentJoint):
    """Mistake: chunks of several tokens are handed to scans that start from nothing."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._in_chunks = True


MUTANTS = [
    ("mamba", FromNothing),
    ("jamba", FromNothing),
    *(
        (family, mutant)
        for family in ("mamba", "jamba", "qwen3_next")
        for mutant in (WrongSlot, Forgetful, NeverReset)
    ),
]


@pytest.mark.parametrize(("family", "mutant"), MUTANTS, ids=lambda value: getattr(value, "__name__", value))
def test_mistakes_are_caught(models: dict[str, Any], family: str, mutant: type[RecurrentJoint]) -> None:
    joint = joint_of(models, family, mutant)
    assert reused_slots_error(joint) > 10 * walk.TOLERANCE


def reused_slots_error(joint: RecurrentJoint) -> float:
    """Two rounds of sequences through the same slots: what the first one leaves must not reach the second."""
    layout = StateLayout(4)
    sequences = random_sequences((9, 14, 6), VOCAB, seed=5)
    shape = layout.shape(joint.groups, KVBudget(3, 32, 4, states=joint.states))
    space, store = layout.space(shape), layout.store(shape, "cpu", torch.float32)
    joint.attach(EagerAttention(), store)
    seen: list[list[torch.Tensor]] = [[] for _ in sequences]
    try:
        for first_id in (0, 10):
            seen = [[] for _ in sequences]
            for start, stop in ((0, 2), (2, 5), (5, 6)):
                entries = [
                    PackEntry(first_id + number, ids[start:stop], start) for number, ids in enumerate(sequences)
                ]
                for entry in entries:
                    assert space.reserve(entry.seq_id, stop)
                batch = pack(entries, space, shape, "cpu", all_logits=True)
                for number, rows in enumerate(joint.forward(batch).split(stop - start)):
                    seen[number].append(rows)
            for number in range(len(sequences)):
                space.release(first_id + number)
    finally:
        joint.detach()
    full = [full_logits(joint, ids[:6], walk.ALL_ROWS) for ids in sequences]
    return relative_error([torch.cat(rows) for rows in seen], full)


@pytest.mark.parametrize("family", ["mamba", "jamba", "qwen3_next", "rwkv"])
def test_slots_are_reused_without_a_trace(models: dict[str, Any], family: str) -> None:
    assert reused_slots_error(joint_of(models, family)) < walk.TOLERANCE


@pytest.mark.parametrize("family", ["mamba2", "jamba"])
def test_snapshots_take_tokens_back(models: dict[str, Any], family: str) -> None:
    """Five tokens are computed, three taken back, and others put in their place."""
    joint = joint_of(models, family)
    layout = StateLayout(4, snapshots=4)
    shape = layout.shape(joint.groups, KVBudget(2, 32, 4, states=joint.states))
    space = layout.space(shape)
    joint.attach(EagerAttention(), layout.store(shape, "cpu", torch.float32))
    left, right = random_sequences((12, 12), VOCAB, seed=7)
    try:
        for ids, start in ((left[:7], 0), (left[7:], 7), (right[9:], 9)):
            if start == 9:
                space.truncate(0, 9)
            assert space.reserve(0, start + len(ids))
            rows = joint.forward(pack([PackEntry(0, ids, start)], space, shape, "cpu", all_logits=True))
    finally:
        joint.detach()
    full = full_logits(joint, left[:9] + right[9:], 3)
    assert relative_error([rows], [full]) < walk.TOLERANCE
    with pytest.raises(Unsupported, match="cannot cut sequence 0 at token 7"):
        space.truncate(0, 7)


@pytest.mark.parametrize("family", ["mamba", "qwen3_next"])
def test_the_self_check_admits_it_and_refuses_mistakes(models: dict[str, Any], family: str) -> None:
    given = {"device": torch.device("cpu"), "dtype": torch.float32}
    joint = joint_of(models, family)
    report = self_check(joint.model, joint, EagerAttention(), StateLayout(4), **given)
    assert report["relative_error"] < walk.TOLERANCE
    with pytest.raises(WrongResult):
        self_check(joint.model, joint_of(models, family, WrongSlot), EagerAttention(), StateLayout(4), **given)


def test_bytes_do_not_depend_on_the_context(models: dict[str, Any]) -> None:
    joint = joint_of(models, "mamba")
    sizes = set()
    for context in (16, 4096):
        layout = StateLayout(16)
        shape = layout.shape(joint.groups, KVBudget(4, context, 4, states=joint.states))
        assert shape.bytes_per_token == 0
        assert layout.store(shape, "meta", torch.float32).allocated_bytes() == shape.bytes
        sizes.add(shape.bytes)
    # per layer and slot: a convolution's last inputs and the states of every channel, fp32
    config = joint.model.config
    channels = config.intermediate_size * (config.conv_kernel + config.state_size)
    assert sizes == {5 * config.num_hidden_layers * channels * 4}


def test_a_plain_joint_refuses_recurrent_layers(models: dict[str, Any]) -> None:
    joint_of(models, "jamba")
    with pytest.raises(Unsupported, match="kv: state"):
        Joint(models["jamba"])


def test_a_layout_without_states_is_refused(models: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match="no place for"):
        walk.packed_error(joint_of(models, "mamba"), EagerAttention(), PagedLayout(4))


def test_states_must_be_those_of_the_config(models: dict[str, Any]) -> None:
    joint = joint_of(models, "mamba")
    with pytest.raises(Unsupported, match="the config says states"):
        RecurrentJoint(joint.model, joint.groups, joint.states[1:])
